"""Random calls with default options, and the kernels that they use: is each in the set that a wheel ships?

    python tests/shipped_calls.py [CALLS]

draws so many calls for each GPU model, 20,000 by default, in some minutes, and prints those whose kernel is missing.
`tests/unit/test_shipped.py` draws fewer.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator

from deep_gemm import kernels, ops, select
from deep_gemm.aot import cards, shipped
from deep_gemm.arch import SM90
from deep_gemm.errors import UnsupportedError
from deep_gemm.kernels.logits import DIMS, HEADS
from deep_gemm.kernels.rows import FUNCTIONS
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import (
    CopySpec,
    KGroupMapsSpec,
    LogitsScheduleSpec,
    LogitsSpec,
    PagedLogitsSpec,
    PrenormSpec,
    QuantizeSpec,
    RowsSpec,
    Spec,
    TransposeBytesSpec,
    TransposeSpec,
    align,
)

LAYERS = (512, 576, 768, 1024, 1536, 2048, 2112, 2304, 3072, 4096, 5120, 7168, 8192, 14336, 16384, 18432, 24576, 32768)
"""N and K of layers."""
ROWS = (("row", "none"),)
OUTPUTS = (
    *ROWS,
    ("none", "column"),
    ("row", "column"),
    ("row", "tile"),
    ("tile", "none"),
    ("none", "tile"),
    ("tile", "tile"),
)


def size(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    return align(int(low * (high / low) ** rng.random()), step)


def side(rng: random.Random, step: int) -> int:
    """N or K: of a layer, or any multiple of ``step``."""
    return rng.choice(LAYERS) if rng.random() < 0.5 else size(rng, 64, 65536, step)


def product(rng: random.Random, op: str, card: cards.Card) -> KernelParams:
    """The kernel of a call of ``op``. Its operands lie as they may: in any layout that there are kernels for, and one
    D in twenty at an odd address. Calls that are refused need no kernel: others are drawn instead."""
    known = ops.table.PRODUCTS[op]
    wide = known.dtype != "e4m3"
    for _ in range(20):
        m, n, k = size(rng, 1, 65536), side(rng, rng.choice((1, 8, 16))), side(rng, 64 if wide else 16)
        groups = size(rng, 1, 256) if known.grouping != "none" else 1
        if known.grouping in ("contiguous", "psum"):
            m = align(m, 128)
        if known.grouping == "masked":
            m = size(rng, 8, 8192)
        if known.grouping == "k":
            k = groups * size(rng, 128, 8192, 128)
        every = list(itertools.product(("k", "mn"), repeat=2)) if wide else [known.majors]
        rng.shuffle(every)
        expected, is_odd = size(rng, 1, m), rng.random() < 0.05
        # Some products write to memory of their own, which is aligned.
        for aligned, majors in itertools.product((False if is_odd else None, True), every):
            d = {"aligned": aligned, "majors": majors}
            asked = ops.spec(m, n, k, card.sms, op, groups=groups, expected_m=expected, **d)  # type: ignore[arg-type]
            with contextlib.suppress(UnsupportedError):
                return engine.kernel_params(asked, select.rank(asked, SM90, card.calibration)[0].config, SM90)
    raise AssertionError(f"{op} refuses twenty calls, the last of {m} x {n} x {k}")


def other(rng: random.Random, card: cards.Card) -> KernelParams:
    """The kernel of a call that multiplies no two matrices of one dtype."""
    m, n, k = size(rng, 1, 65536), side(rng, 8), side(rng, 64)
    dtype, heads, dim = rng.choice(("bf16", "f16", "f32")), rng.choice(HEADS), rng.choice(DIMS)
    plain, transposed = rng.choice(OUTPUTS)
    rows = (plain, transposed) in ROWS
    cast = {"gated": rng.random() < 0.3 and "tile" not in (plain, transposed)}
    cast |= {"source_rows": m} if rows and rng.random() < 0.3 else {}
    cast |= {"factors": True} if rows and rng.random() < 0.3 else {}
    name, output = rng.choice(list(FUNCTIONS)), rng.choice(("bf16", "e4m3"))
    function = FUNCTIONS[name]
    given = tuple(each for each in function.optional if rng.random() < 0.5)
    specs: list[Callable[[], Spec]] = [
        lambda: QuantizeSpec(m, k, dtype, plain, transposed, **cast),  # type: ignore[arg-type]
        lambda: LogitsSpec(m, n, heads, dim, n, num_sms=card.sms),
        lambda: PagedLogitsSpec(m, rng.choice((1, 2, 3, 4, 6, 8)), heads, dim, 64, 4096, 64, card.sms, 4096),
        lambda: RowsSpec(name, m, n, "bf16", output, rng.choice(function.forms), given),  # type: ignore[arg-type]
        lambda: LogitsScheduleSpec(m, card.sms),
        lambda: PrenormSpec(m, rng.choice((8, 16, 24, 32)), k, rng.choice((1, 4, 16)), card.sms),
        lambda: rng.choice((CopySpec(m, k), TransposeBytesSpec(m, k), TransposeSpec(m, k), KGroupMapsSpec(4, m, n))),
    ]
    asked = rng.choice(specs)()
    kernel = kernels.for_helper(asked, SM90)
    return kernel.params(asked, kernel.config_of(asked, SM90), SM90)


def drawn(card: cards.Card, calls: int, seed: str = "") -> Iterator[tuple[str, KernelParams]]:
    """What random calls on a GPU model run: the operation ("" if it is no product), and the kernel."""
    for index in range(calls):
        rng = random.Random(f"shipped {seed} {card.name} {index}")
        op = rng.choice((*ops.table.PRODUCTS, ""))
        yield op, product(rng, op, card) if op else other(rng, card)


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    known = set(shipped.kernels_of())
    used: set[KernelParams] = set()
    print(f"{len(known)} kernels ship")
    for card in cards.every():
        missing: collections.Counter[str] = collections.Counter()
        for op, params in drawn(card, calls):
            used.add(params)
            missing[f"{op} {kernels.get(params.kernel).entry(params)}"] += params not in known
        lost = {name: count for name, count in missing.items() if count}
        print(f"{card.name}: {sum(lost.values())} of {calls} calls miss {lost or ''}", flush=True)
    print(f"{len(used)} kernels were used")


if __name__ == "__main__":
    main()
