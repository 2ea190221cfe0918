"""muGraphs: the language of everything that is searched, proven and run.

Read `graph` first: kernel graphs, block graphs, schedules, and their text form, which `parser` reads back. Then
`operators`, one record for each operator, and `dtypes`, one for each type. `domains.protocol` has the few operations
that operators are made of; `evaluate` walks a graph over any domain. `check` says when a graph is well formed.

The rest in any order: `builder` writes graphs, `canonical` names structures, `footprint` counts bytes and operations,
`views` places slices in arrays, `schedule_json` stores schedules. `domains` and `passes` have reading orders too.
"""
