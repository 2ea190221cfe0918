"""Which values a region makes again, instead of reading them from the region before it.

A cut through the scores of an attention, or the distances of points, would store and load matrices. The region after
the cut repeats the equations that make them, back to small values, such as the maximum of each row, and to what it
reads anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from mirage_jax.jaxpr_frontend.partition.cutting import Piece
from mirage_jax.jaxpr_frontend.partition.eligibility import Eligibility
from mirage_jax.jaxpr_frontend.partition.program import FlatEqn, FlatProgram, bytes_of
from mirage_jax.jaxpr_frontend.translate.rules import PRODUCT_PRIMITIVES

MIN_BYTES = 1 << 20  # smaller values stay in a cache
MIN_SAVING = 3  # bytes of a value over those that are read in its place
SMALLER = 8  # times smaller than a value: what is summed up over its rows


def number(program: FlatProgram, piece: Piece) -> int:
    """What a piece is called, however the program around it is cut: its first equation as JAX has it."""
    return id(program.eqns[piece[0]].eqn)


class Remade:
    """What the pieces of a program make again. `is_cheap`: making an equation's results again takes no longer than to
    store and load them. Pieces with the numbers in `left` make nothing again.
    """

    def __init__(
        self,
        eligibility: Eligibility,
        pieces: Sequence[Piece],
        is_cheap: Callable[[FlatEqn], bool],
        left: Collection[int] = (),
    ) -> None:
        self.eligibility, self.program, self.is_cheap, self.left = eligibility, eligibility.program, is_cheap, left
        self.piece_of = {n: piece for piece in pieces for n in piece}

    def of(self, piece: Piece) -> set[int]:
        """The equations of other pieces that this one repeats."""
        found = set[int]()
        if number(self.program, piece) in self.left:
            return found
        read = {self.eligibility.source(v) for v in self.program.read_by(piece)}.difference(self.program.made_by(piece))
        todo = sorted(read, key=self._bytes)
        while todo:
            if not self._crosses(value := todo.pop(), piece):
                continue
            equations, sources = self._sources(value, piece)
            others = sources - read - set(self.program.made_by(found))
            if equations and MIN_SAVING * sum(map(self._bytes, others)) <= self._bytes(value):
                found |= equations
                read |= sources
                todo += sorted(others, key=self._bytes)
        return found

    def _bytes(self, value: int) -> int:
        return bytes_of(self.program.avals[value])

    def _crosses(self, value: int, piece: Piece) -> bool:
        """Is a large value stored only because pieces such as this one read it?"""
        maker = self.program.producers.get(value)
        if maker is None or not self._is_elsewhere(maker, piece):
            return False
        return self._bytes(value) >= MIN_BYTES and value not in self._stored

    def _is_elsewhere(self, n: int, piece: Piece) -> bool:
        """Is an equation in another piece, or in none, because a piece without products is no region?"""
        return self.piece_of[n] is not piece if n in self.piece_of else self._is_light(n)

    def _is_light(self, n: int) -> bool:
        return n not in self.eligibility.reasons and self.program.eqns[n].primitive not in PRODUCT_PRIMITIVES

    @cached_property
    def _stored(self) -> set[int]:
        """Values that the program returns, or that equations outside of all pieces read. Light equations whose results
        only pieces read do not count.
        """
        stored = set(self.program.results)
        for n in reversed(range(len(self.program.eqns))):
            is_for_pieces = self._is_light(n) and stored.isdisjoint(self.program.eqns[n].outputs)
            if n not in self.piece_of and not is_for_pieces:
                stored.update(self.program.eqns[n].reads)
        return stored

    def _sources(self, value: int, piece: Piece) -> tuple[set[int], set[int]]:
        """The equations that make a value, back to small values and those that are not cheap, and all these values."""
        equations, sources, todo = set[int](), set[int](), [value]
        while todo:
            maker = self.program.producers.get(v := self.eligibility.source(todo.pop()))
            if maker in equations or maker in self.eligibility.constants or maker in self.eligibility.masks:
                continue  # every region makes its own of the latter
            if maker is None or not self._is_made_again(maker, v, value, piece):
                sources.add(v)
                continue
            equations.add(maker)
            todo += self.program.eqns[maker].reads
        return equations, sources

    def _is_made_again(self, maker: int, v: int, value: int, piece: Piece) -> bool:
        if not self._is_elsewhere(maker, piece) or SMALLER * self._bytes(v) <= self._bytes(value):
            return False
        return self.is_cheap(self.program.eqns[maker])
