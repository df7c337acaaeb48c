"""Device code of users: the names that it may have, and the warnings that are errors in it."""

from __future__ import annotations

import re

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = """
alignas alignof asm auto bool break case catch char class const constexpr continue decltype default delete do double
else enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept
nullptr operator private protected public register return short signed sizeof static struct switch template this
throw true try typedef typename union unsigned using virtual void volatile while blockDim blockIdx gridDim threadIdx
f64 f32 f16 bf16 e4m3 i64 i32 i8 u8 u16 u32 u64 TensorMap
"""
_TAKEN = frozenset(_WORDS.split())
"""Keywords of C++ and CUDA, and our types."""

_NUMBERS = (
    39,  # division by zero
    61,  # integer operation result is out of range
    62,  # shift count is negative
    63,  # shift count is too large
    117,  # non-void function should return a value
    170,  # pointer points outside of underlying object
    175,  # subscript out of range
    179,  # right operand of % is zero
    549,  # variable is used before its value is set
    836,  # returning reference to local variable
    940,  # missing return statement at end of non-void function
    1056,  # returning pointer to local variable
    1057,  # returning reference to local temporary
)
"""Numbers that NVCC and NVRTC share, of warnings of undefined behaviour only: an optimiser removes what leads there, so
that the result is wrong."""

SURE_MISTAKES = f"#pragma nv_diag_error {', '.join(map(str, _NUMBERS))}"
"""The line that makes errors of them from there on."""


def is_text(text: object) -> bool:
    """Whether it can be a source file. NVRTC ends at a NUL, NVCC skips it; half of a surrogate pair has no bytes."""
    return isinstance(text, str) and "\0" not in text and re.search("[\ud800-\udfff]", text) is None


def is_name(name: object) -> bool:
    """Whether a kernel, a parameter or a value may be called ``name``."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None and name not in _TAKEN
