"""Operations: one module each, with its operands, its checks, its spec, its reference and its cases."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..spec import GemmSpec
from . import fp8_dense, half_dense

DEFAULT = fp8_dense.NAME
"""What a layer of a model runs if nothing else is said of it."""

_SPECS: dict[str, Callable[..., GemmSpec]] = {
    fp8_dense.NAME: fp8_dense.spec,
    half_dense.BF16: functools.partial(half_dense.spec, half_dense.BF16),
    half_dense.FP16: functools.partial(half_dense.spec, half_dense.FP16),
}
NAMES = tuple(_SPECS)
"""Operations that layers can run."""


def spec(m: int, n: int, k: int, num_sms: int, op: str = DEFAULT, whole_gpu: bool = True) -> GemmSpec:
    """What a call of ``op`` with freshly allocated tensors of these sizes asks for, under the options of this
    process. KeyError for an operation that does not exist."""
    return _SPECS[op](m, n, k, num_sms=num_sms, whole_gpu=whole_gpu)
