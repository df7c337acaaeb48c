"""How many distinct kernels serve every M of a weight, or of a whole model: what a warm-up has to compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from deep_gemm.benchmarks.shapes import DEEPSEEK_V3, REFERENCE_NK
from deep_gemm.params import KernelParams
from deep_gemm.workload import GemmShape, model_layers

Row = dict[str, Any]
KernelAt = Callable[[int, int], Callable[[int], KernelParams]]
Known = dict[tuple[int, int], dict[int, KernelParams]]
T = TypeVar("T", bound=Hashable)

LAST_M = 16384
EVERY_M = 512
"""Up to here each M is asked for: this is where kernels change from one M to the next."""

STEP_M = 64
"""Past it, one M in so many, and then by bisection where two neighbours differ."""

DIMS = "nk"
"""The sizes whose baking-in is compared with none."""


def choices(choose: Callable[[int], T], last: int = LAST_M, every: int = EVERY_M, step: int = STEP_M) -> dict[int, T]:
    """What `choose` says of M = 1..`last`, at the M that were asked.

    Two neighbours more than one apart that agree are taken to agree in between; where they differ, the interval is
    halved until the change is found. A choice that holds only inside an interval with equal ends is missed.
    """
    points = list(range(1, min(every, last) + 1))
    points += list(range(every + step, last + 1, step))
    points = sorted({*points, last})
    found = {m: choose(m) for m in points}
    open_ = [(low, high) for low, high in itertools.pairwise(points) if high - low > 1]
    while open_:
        low, high = open_.pop()
        if high - low > 1 and found[low] != found[high]:
            middle = (low + high) // 2
            found[middle] = choose(middle)
            open_ += [(low, middle), (middle, high)]
    return dict(sorted(found.items()))


def kernel_at(n: int, k: int) -> Callable[[int], KernelParams]:
    """The kernel that a call of M x n x k runs, on a whole sm_90a GPU, as a function of M; sizes at run time."""
    from deep_gemm import ahead, arch, engine, select

    def choose(m: int) -> KernelParams:
        asked = ahead.problem(GemmShape(m, n, k), arch.SM90)
        return engine.kernel_params(asked, select.rank(asked, arch.SM90)[0].config, arch.SM90)

    return choose


def specialised(params: KernelParams, n: int, k: int) -> KernelParams:
    """The same kernel with compiled_dims="nk": n and k baked in."""
    return replace(params, shape=(params.shape[0], n, k))


def count(pairs: Iterable[tuple[int, int]], at: KernelAt = kernel_at, known: Known | None = None) -> Row:
    """`kernels` with sizes at run time, `kernels_nk` with N and K compiled in, and `asked`: how many M were tried.

    `pairs` are N x K; `known` keeps what was found for them. Helpers such as the transpose of scales, one for
    all, are not counted.
    """
    general: set[KernelParams] = set()
    special: set[KernelParams] = set()
    asked, known = 0, {} if known is None else known
    for n, k in dict.fromkeys(pairs):
        if (n, k) not in known:
            known[n, k] = choices(at(n, k))
        found = known[n, k]
        asked += len(found)
        general |= set(found.values())
        special |= {specialised(params, n, k) for params in found.values()}
    return {"kernels": len(general), "kernels_nk": len(special), "asked": asked}


def kernels(at: KernelAt = kernel_at) -> Iterator[Row]:
    """A row for each of the seven N x K, and for DeepSeek-V3's dense layers on one GPU and on each of eight."""
    span = f"M = 1..{LAST_M}"
    known: Known = {}
    for n, k in REFERENCE_NK:
        yield {"mode": "kernels", "what": f"{n} x {k}, {span}"} | count([(n, k)], at, known)
    for tp in (1, 8):
        layers = model_layers(DEEPSEEK_V3, tp)
        what = f"DeepSeek-V3, {len(layers)} dense layers, tp {tp}, {span}"
        yield {"mode": "kernels", "what": what} | count(((layer.n, layer.k) for layer in layers), at, known)
