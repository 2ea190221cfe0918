"""The table of types: what kernels' texts and signatures call a type is the same type to Triton."""

import pytest

from mirage_jax.lower.triton.context import TRITON_TYPES
from mirage_jax.mugraph.dtypes import DTYPES


@pytest.mark.parametrize("name", TRITON_TYPES)
def test_signatures_name_the_types_of_the_text(name: str) -> None:
    language = pytest.importorskip("triton.language")
    pointer = language.str_to_ty(f"*{DTYPES[name].signature}", None)
    assert pointer.element_ty == getattr(language, TRITON_TYPES[name].removeprefix("tl."))


def test_types_without_tensors_have_neither_name() -> None:
    assert all(bool(dtype.triton) == bool(dtype.signature) for dtype in DTYPES.values())
