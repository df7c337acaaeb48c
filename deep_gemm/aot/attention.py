"""The kernels of sparse attention's indexer, which is no product of two matrices."""

from __future__ import annotations

from collections.abc import Iterable

from deep_gemm import kernels
from deep_gemm.aot.layers import Layer
from deep_gemm.arch import ArchSpec
from deep_gemm.kernels.logits import DIMS, HEADS
from deep_gemm.params import KernelParams
from deep_gemm.spec import LogitsScheduleSpec, LogitsSpec, PagedLogitsSpec, Spec

NEXT_N = (1, 2)
"""Tokens of a request that are decoded at once: with and without a token that was guessed ahead."""


def indexers(layers: Iterable[Layer]) -> set[tuple[int, int]]:
    """Heads and their size of each indexer among the layers, told by its queries' and keys' weights."""
    sizes = {layer.name: layer.n for layer in layers}
    found = set()
    for name, columns in sizes.items():
        module, _, own = name.rpartition(".")
        size = sizes.get(f"{module}.wk", 0)
        if own == "wq_b" and size and columns % size == 0:
            found.add((columns // size, size))
    return found


def kernels_of(layers: Iterable[Layer], arch: ArchSpec) -> list[KernelParams]:
    """Logits of prompts and of pages, and their schedule. None for heads that have no kernel."""
    found: list[KernelParams] = []
    for heads, size in sorted(indexers(layers)):
        if heads not in HEADS or size not in DIMS:
            continue
        pages = [PagedLogitsSpec(1, next_n, heads, size, 64, 1, 1, 1, 1) for next_n in NEXT_N]
        specs: list[Spec] = [LogitsSpec(1, 1, heads, size, 1), *pages, LogitsScheduleSpec(1, 1)]
        for spec in specs:
            kernel = kernels.for_helper(spec, arch)
            found.append(kernel.params(spec, kernel.config_of(spec, arch), arch))
    return list(dict.fromkeys(found))
