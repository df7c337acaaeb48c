"""How many kernels serve every M of a weight or of a whole model: the number that a warm-up has to compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from deep_gemm.aot.layers import BATCHED_OPS, GROUPED_OPS, Layer
from deep_gemm.aot.workload import GemmShape, plan
from deep_gemm.bench.shapes import DEEPSEEK_V3, REFERENCE_NK
from deep_gemm.params import KernelParams

Row = dict[str, Any]
KernelAt = Callable[[int, int], Callable[[int], list[KernelParams]]]
Known = dict[tuple[int, int], set[KernelParams]]

LAST_M = 16384


def dense_layers(config: dict[str, Any], tp: int = 1) -> list[Layer]:
    """The layers of a model that have kernels, without those of routed experts and batches for each head."""
    return [layer for layer in plan(config, tp).served if layer.op not in (*GROUPED_OPS, *BATCHED_OPS)]


def kernel_at(n: int, k: int) -> Callable[[int], list[KernelParams]]:
    """A function of M that gives the kernels of a call M x n x k on a whole sm_90a GPU, with sizes at run time."""
    from deep_gemm import arch
    from deep_gemm.aot import build

    return lambda m: build.kernels_of(GemmShape(m, n, k), arch.SM90)


def specialised(params: KernelParams, n: int, k: int) -> KernelParams:
    """The same kernel with compiled_dims="nk": n and k compiled in."""
    return replace(params, shape=(params.shape[0], n, k))


def count(pairs: Iterable[tuple[int, int]], at: KernelAt = kernel_at, known: Known | None = None) -> Row:
    """`kernels` with sizes at run time and `kernels_nk` with N and K compiled in, for every M = 1..`LAST_M`.

    `pairs` are N x K; `known` caches the kernels of each. Helpers such as the transpose of scales are not counted.
    """
    from deep_gemm.select import representatives

    general: set[KernelParams] = set()
    special: set[KernelParams] = set()
    known = {} if known is None else known
    for n, k in dict.fromkeys(pairs):
        if (n, k) not in known:
            known[n, k] = set(itertools.chain.from_iterable(map(at(n, k), representatives(LAST_M))))
        general |= known[n, k]
        special |= {specialised(params, n, k) for params in known[n, k]}
    return {"kernels": len(general), "kernels_nk": len(special)}


def kernels(at: KernelAt = kernel_at) -> Iterator[Row]:
    """A row for each of the seven N x K, and for DeepSeek-V3's dense layers on one GPU and on each of eight."""
    span = f"M = 1..{LAST_M}"
    known: Known = {}
    for n, k in REFERENCE_NK:
        yield {"mode": "kernels", "what": f"{n} x {k}, {span}"} | count([(n, k)], at, known)
    for tp in (1, 8):
        layers = dense_layers(DEEPSEEK_V3, tp)
        what = f"DeepSeek-V3, {len(layers)} dense layers, tp {tp}, {span}"
        yield {"mode": "kernels", "what": what} | count(((layer.n, layer.k) for layer in layers), at, known)
