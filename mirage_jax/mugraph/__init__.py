"""muGraphs: the language of everything that is searched, proven and run."""
