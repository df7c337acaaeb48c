"""Fallbacks for calls without a kernel. DG_FALLBACK names the ways, which are tried in order."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from deep_gemm.errors import DeepGemmError, UnsupportedError
from deep_gemm.log import warn_once
from deep_gemm.runtime import monitor
from deep_gemm.runtime.operation import KernelOperation
from deep_gemm.settings import settings

TORCH = "torch"
BACKENDS = "deep_gemm.backends"
"""The module that has other ways, such as Triton's. It is imported only when one is needed."""


def run(operation: KernelOperation, x: Any, reason: UnsupportedError) -> None:
    """Compute ``operation`` on the checked operands ``x`` in the first way that can. ``reason`` says why no kernel can.
    Raises ``reason`` if the setting names no way, and UnsupportedError with every way's reason if all refuse."""
    refused = []
    for way in settings.fallback:
        try:
            monitor.run(operation, x, f"fallback {way}", _way(operation, way, x))
        except (UnsupportedError, ImportError) as error:
            refused.append(f"{way} cannot either: {error}")
            continue
        slow = ", which is slow" if way == TORCH else ""
        others = "".join(f" {why}" for why in refused)
        warn_once(
            f"fallback:{operation.name}:{way}:{_NUMBER.sub('', str(reason))}",  # the same for all sizes
            f"DG_FALLBACK={way}: {operation.name} is computed by {_NAMES.get(way, way)}{slow}. {reason}{others}",
        )
        return
    if not refused:
        raise reason
    raise UnsupportedError(f"{reason} {' '.join(refused)}") from reason


_NUMBER = re.compile(r"\d+")
_NAMES = {TORCH: "the reference implementation", "cublaslt": "cuBLAS, through torch"}


def _way(operation: KernelOperation, way: str, x: Any) -> Callable[[Any], None]:
    if way == TORCH:
        operation.check_values(x)  # as on the CPU
        return operation.reference
    if way in operation.fallbacks:
        return operation.fallbacks[way]
    if operation.in_place:
        raise UnsupportedError(f"{way} does not add to c.")
    if special := operation.special(x):
        raise UnsupportedError(f"{way} does not take {special}.")
    try:
        found = importlib.import_module(BACKENDS).get_kernel(way, operation.name)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"there is no {way} for {operation.name} here ({error}).") from error
    except (DeepGemmError, LookupError) as error:
        raise UnsupportedError(f"{error}") from error
    return lambda x: found(*arguments(operation, x.tensors))


def arguments(operation: KernelOperation, tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The operands as positional arguments of the public function, where values and their scales are a pair."""
    found: dict[str, Any] = {}
    for name, argument in operation.operands.items():
        whole, _, part = argument.partition("[")
        found[whole] = (*found.get(whole, ()), tensors[name]) if part else tensors[name]
    return tuple(found.values())
