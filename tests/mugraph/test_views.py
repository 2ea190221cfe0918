"""Where parts of arrays lie, against numpy."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mirage_jax.mugraph.views import View, ViewStep


@st.composite
def views(draw: st.DrawFn) -> View:
    """A few cuts of an array whose dimensions are divided and joined in between."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    whole, cuts = _joined(draw, sizes), []
    for _ in range(draw(st.integers(0, 2))):
        starts = [draw(st.integers(0, n - 1)) for n in sizes]
        limits = [draw(st.integers(s + 1, n)) for s, n in zip(starts, sizes, strict=True)]
        cuts.append(ViewStep(tuple(sizes), tuple(starts), tuple(limits)))
        sizes = [b - a for a, b in zip(starts, limits, strict=True)]
        sizes = list(_joined(draw, sizes))
    return View(whole, tuple(cuts), _joined(draw, sizes))


def _joined(draw: st.DrawFn, sizes: list[int]) -> tuple[int, ...]:
    """A shape of as many elements: neighbours are joined here and there, and dimensions of one element come and go."""
    out: list[int] = []
    for n in sizes:
        if out and draw(st.booleans()):
            out[-1] *= n
        else:
            out += [n, *([1] if draw(st.booleans()) else [])]
    return tuple(out)


@given(views())
def test_place_is_where_numpy_finds_it(view: View) -> None:
    flat = np.arange(math.prod(view.whole))
    part = view.of(flat.reshape(view.whole))
    assert part.shape == view.shape
    if view.place is None:
        return
    offset, strides = view.place
    index = np.indices(view.shape).reshape(len(view.shape), -1)
    np.testing.assert_array_equal(part.ravel(), offset + np.array(strides, int) @ index)


@given(views())
def test_as_json(view: View) -> None:
    assert View.from_json(view.to_json()) == view


def test_what_has_strides() -> None:
    heads = ViewStep((8, 4, 16), (0, 0, 8), (8, 4, 16))
    assert View((8, 64), (heads,), (8, 4, 8)).place == (8, (64, 16, 1))
    assert View((8, 64), (heads,), (8, 32)).place is None  # halves of heads, side by side, are none of a matrix
    assert View((8, 64), (), (512,)).place == (0, (1,))
    assert View((8, 64), (ViewStep((8, 64), (7, 0), (8, 64)),), (64,)).place == (448, (1,))
    assert View((), (), ()).place == (0, ())
