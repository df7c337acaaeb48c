"""The kernels of sparse attention's indexer, which is no product of two matrices, and of hyper-connections."""

from __future__ import annotations

from collections.abc import Iterable

from deep_gemm import kernels
from deep_gemm.aot.layers import HYPER, Layer
from deep_gemm.arch import ArchSpec
from deep_gemm.kernels.logits import DIMS, HEADS
from deep_gemm.kernels.sm90_tf32_hc_prenorm_gemm import PRENORM
from deep_gemm.params import KernelParams
from deep_gemm.spec import LogitsScheduleSpec, LogitsSpec, PagedLogitsSpec, PrenormSpec, Spec

NEXT_N = (1, 2)
"""Tokens of a request that are decoded at once: with and without a token that was guessed ahead."""


def indexers(layers: Iterable[Layer]) -> set[tuple[int, int]]:
    """Heads and their size of each indexer among the layers, told by the weights of its queries and
    heads: keys are compressed in some models."""
    sizes = {layer.name: layer.n for layer in layers}
    found = set()
    for name, columns in sizes.items():
        module, _, own = name.rpartition(".")
        heads = sizes.get(f"{module}.weights_proj", 0)
        if own == "wq_b" and heads and columns % heads == 0:
            found.add((heads, columns // heads))
    return found


def kernels_of(layers: Iterable[Layer], arch: ArchSpec) -> list[KernelParams]:
    """Logits of prompts and of pages, and their schedule; and products of hyper-connections, for every M and every
    number of splits. None for sizes that have no kernel. Raises UnsupportedError if ``arch`` has none at all."""
    found: list[KernelParams] = []
    known = list(layers)
    for n, k in sorted({(layer.n, layer.k) for layer in known if layer.name.rpartition(".")[2] in HYPER}):
        product = PrenormSpec(1, n, k)
        if PRENORM.refuses(product) is None:
            kernels.for_helper(product, arch)
            found += [PRENORM.params(product, config, arch) for config in PRENORM.configs(arch, n)]
    for heads, size in sorted(indexers(known)):
        if heads not in HEADS or size not in DIMS:
            continue
        pages = [PagedLogitsSpec(1, next_n, heads, size, 64, 1, 1, 1, 1) for next_n in NEXT_N]
        specs: list[Spec] = [LogitsSpec(1, 1, heads, size, 1), *pages, LogitsScheduleSpec(1, 1)]
        for spec in specs:
            kernel = kernels.for_helper(spec, arch)
            found.append(kernel.params(spec, kernel.config_of(spec, arch), arch))
    return list(dict.fromkeys(found))
