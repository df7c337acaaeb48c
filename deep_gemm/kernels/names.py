"""Names that users may give to kernels, parameters and values in device code."""

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


def is_name(name: object) -> bool:
    """Whether a kernel, a parameter or a value may be called ``name``."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None and name not in _TAKEN
