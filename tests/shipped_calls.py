"""Random calls with default options, and the kernels that they use: is each in the set that a wheel ships?

    python tests/shipped_calls.py [CALLS]

draws so many calls for each GPU model, 20,000 by default, in some two minutes, and ends with status 1 if a kernel is
missing that is not of the kinds in `LEFT`. `tests/unit/test_shipped.py` draws fewer. What is drawn does not depend on
what ships: every dtype of d that an operation takes, every c, every layout.
"""

import collections
import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from deep_gemm import kernels, ops, select
from deep_gemm.aot import cards, shipped
from deep_gemm.arch import SM90
from deep_gemm.errors import UnsupportedError
from deep_gemm.kernels.groups import parts_of_k
from deep_gemm.kernels.logits import DIMS, HEADS
from deep_gemm.kernels.row_kernels import FUNCTIONS, GROUPS
from deep_gemm.ops.table import BF16, FP8, FP16, K_BF16, K_FP8, K_PADDED, ROWWISE, SUM_BF16, WGRAD
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import (
    Accumulate,
    CopySpec,
    GemmSpec,
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

LAYER = "FP8Linear"
"""Drawn beside the operations."""

ROWS = (("row", "none"),)
OUTPUTS = (
    *ROWS, ("none", "column"), ("row", "column"), ("row", "tile"), ("tile", "none"), ("none", "tile"), ("tile", "tile"),
)  # fmt: skip


def size(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    return align(int(low * (high / low) ** rng.random()), step)


def side(rng: random.Random, step: int) -> int:
    """N or K: of a layer, or any multiple of ``step``."""
    return rng.choice(LAYERS) if rng.random() < 0.5 else size(rng, 64, 65536, step)


LEFT: dict[str, Callable[[str, GemmSpec], bool]] = {
    "FP8 with scales of blocks to float32, or with c": lambda op,
    x: (op == FP8 and (x.d.dtype == "f32" or x.accumulate != "none")),
    "FP8 with scales of rows to float32 or float16, or with c": lambda op,
    x: (op == ROWWISE and (x.d.dtype, x.accumulate) != ("bf16", "none")),
    "FP8 with 1D1D to float16, to bfloat16 with c, or with c that is not d": lambda op,
    x: (op == WGRAD and (x.d.dtype, x.accumulate) not in (("f32", "none"), ("f32", "in place"), ("bf16", "none"))),
    "BF16 to float32 in other layouts than nt, or with c but tn with d": lambda op,
    x: (
        op == BF16 and (x.d.dtype, x.accumulate) != ("bf16", "none") and (x.d.dtype, x.accumulate, x.a.major,
        x.b.major) not in (("f32", "none", "k", "k"), ("f32", "in place", "mn", "mn"))),
    "FP16 to float32, or with c": lambda op, x: op == FP16 and (x.d.dtype, x.accumulate) != ("f16", "none"),
    "groups along K: BF16 without c or with c that is not d, FP8 to bfloat16 with c": lambda op,
    x: (
        (op == K_BF16 and x.accumulate != "in place") or (
        op in (K_FP8, K_PADDED) and x.d.dtype == "bf16" and x.accumulate != "none")),
    "E5M2 operands": lambda op, x: "e5m2" in x.dtypes,
    "batches to float32": lambda op, x: x.grouping == "batched" and x.d.dtype == "f32",
    "the sum of a batch to float32 without c, to bfloat16 with c, or with c that is not d": lambda op,
    x: (op == SUM_BF16 and (x.d.dtype, x.accumulate) not in (("f32", "in place"), ("bf16", "none"))),
    "products whose K has parts under batch invariance, but FP8 and BF16 to an aligned bfloat16 d in the layout nt":
    lambda op, x: parts_of_k(x) > 1 and not (
        op in (FP8, BF16) and x.d.aligned and (x.form, x.d.dtype, x.accumulate) == ("nt", "bf16", "none")),
    "d whose rows are not aligned, but of a layer": lambda op,
    x: not x.d.aligned and not of_a_layer(op, x),
}  # fmt: skip
"""Products that are left to the JIT. Documents name them."""

LEFT_OTHERS = ("rows of FP16", "logits to bfloat16 of 32 or 64 elements", "functions of rows that few models have")
"""What else is."""


def of_a_layer(op: str, asked: GemmSpec) -> bool:
    known = ops.table.PRODUCTS[op]
    return (asked.d.dtype, asked.accumulate) == (known.outputs[0], known.accumulate)


@dataclass(frozen=True)
class Call:
    """A drawn call: its operation ("" if it is no product), the kind that is left to the JIT ("" if it is of none), its
    kernel, and whether its product uses d as a layer does."""

    op: str
    left: str
    params: KernelParams
    of_a_layer: bool = False


def product(rng: random.Random, op: str, card: cards.Card) -> Call:
    """A call of ``op``. Its operands lie as they may: in any layout that there are kernels for, and one D in twenty at
    an odd address. d and c are a layer's in every other call, and else any that the operation takes. One call in ten
    has some of the SMs, and one is batch invariant. Calls that are refused need no kernel: others are drawn instead."""
    known = ops.table.PRODUCTS[op]
    wide = not known.is_scaled
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
        sms = card.sms if rng.random() < 0.9 else rng.randint(1, card.sms)
        how: dict[str, Any] = {"groups": groups, "expected_m": expected, "whole_gpu": sms == card.sms}
        if rng.random() < 0.5:
            how |= {"output": rng.choice(known.outputs), "accumulate": rng.choice(get_args(Accumulate))}
        is_invariant = rng.random() < 0.1
        # Some products write to memory of their own, which is aligned.
        for aligned, majors in itertools.product((False if is_odd else None, True), every):
            asked = ops.spec(m, n, k, sms, op, aligned=aligned, majors=majors, **how)
            asked = replace(asked, batch_invariant=is_invariant)
            with contextlib.suppress(UnsupportedError):
                return chosen(op, asked, card)
    raise AssertionError(f"{op} refuses twenty calls, the last of {m} x {n} x {k}")


def chosen(op: str, asked: GemmSpec, card: cards.Card) -> Call:
    params = engine.kernel_params(asked, select.rank(asked, SM90, card.calibration)[0].config, SM90)
    left = next((name for name, is_left in LEFT.items() if is_left(op, asked)), "")
    return Call(op, left, params, of_a_layer(op, asked))


def layer_pass(rng: random.Random, card: cards.Card) -> Call:
    """One of the products of an `FP8Linear`'s step: forward, the gradient of its input, or that of its weight, to the
    dtype of the weight or added to a float32 one."""
    tokens, wide, narrow = size(rng, 1, 65536), rng.choice(LAYERS), rng.choice(LAYERS)
    which = rng.choice(("forward", "input", "weight"))
    if which != "weight":
        output = rng.choice(("bf16", "f16"))
        return chosen(FP8, ops.spec(tokens, wide, narrow, card.sms, FP8, output=output), card)  # type: ignore[arg-type]
    output, accumulate = rng.choice((("bf16", "none"), ("f32", "none"), ("f32", "in place")))
    use: dict[str, Any] = {"output": output, "accumulate": accumulate}
    return chosen(WGRAD, ops.spec(wide, narrow, align(tokens, 16), card.sms, WGRAD, **use), card)


def other(rng: random.Random, card: cards.Card) -> Call:
    """A call that multiplies no two matrices of one dtype."""
    m, n, k = size(rng, 1, 65536), side(rng, 8), side(rng, 64)
    dtype, heads, dim = rng.choice(("bf16", "f16", "f32")), rng.choice(HEADS), rng.choice(DIMS)
    plain, transposed = rng.choice(OUTPUTS)
    rows = (plain, transposed) in ROWS
    cast = {"gated": rng.random() < 0.3 and "tile" not in (plain, transposed)}
    cast |= {"source_rows": m} if rows and rng.random() < 0.3 else {}
    cast |= {"factors": True} if rows and rng.random() < 0.3 else {}
    of_rows = rng.choice(("bf16", "bf16", "bf16", "f16"))
    name, output = rng.choice(list(FUNCTIONS)), rng.choice((of_rows, "e4m3"))
    of_logits = rng.choice(("f32", "bf16"))
    function = FUNCTIONS[name]
    given = rng.choice(function.variants)
    specs: list[Callable[[], Spec]] = [
        lambda: QuantizeSpec(m, k, dtype, plain, transposed, **cast),  # type: ignore[arg-type]
        lambda: LogitsSpec(m, n, heads, dim, n, output=of_logits, num_sms=card.sms),  # type: ignore[arg-type]
        lambda: PagedLogitsSpec(
            *(m, rng.choice((1, 2, 3, 4, 6, 8)), heads, dim, 64, 4096, 64, card.sms, 4096),  # type: ignore[arg-type]
            output=of_logits,  # type: ignore[arg-type]
        ),
        lambda: RowsSpec(name, m, n, of_rows, output, rng.choice(function.forms), given),  # type: ignore[arg-type]
        lambda: LogitsScheduleSpec(m, card.sms),
        lambda: PrenormSpec(m, rng.choice((8, 16, 24, 32)), k, rng.choice((1, 4, 16)), card.sms),
        lambda: rng.choice((CopySpec(m, k), TransposeBytesSpec(m, k), TransposeSpec(m, k), KGroupMapsSpec(4, m, n))),
    ]
    asked = rng.choice(specs)()
    left = ""
    if isinstance(asked, RowsSpec) and of_rows == "f16":
        left = LEFT_OTHERS[0]
    if isinstance(asked, RowsSpec) and (GROUPS in given or not function.of_all_models):
        left = LEFT_OTHERS[2]
    if isinstance(asked, (LogitsSpec, PagedLogitsSpec)) and of_logits == "bf16" and dim < max(DIMS):
        left = LEFT_OTHERS[1]
    kernel = kernels.for_helper(asked, SM90)
    return Call("", left, kernel.params(asked, kernel.config_of(asked, SM90), SM90))


def drawn(card: cards.Card, calls: int, seed: str = "") -> Iterator[Call]:
    """Random calls on a GPU model."""
    for index in range(calls):
        rng = random.Random(f"shipped {seed} {card.name} {index}")
        op = rng.choice((*ops.table.PRODUCTS, "", LAYER))
        yield layer_pass(rng, card) if op == LAYER else product(rng, op, card) if op else other(rng, card)


def main() -> int:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    known = set(shipped.kernels_of())
    used: set[KernelParams] = set()
    kinds: collections.Counter[str] = collections.Counter()
    lost: collections.Counter[str] = collections.Counter()
    print(f"{len(known)} kernels ship")
    for card in cards.every():
        before = lost.total()
        for call in drawn(card, calls):
            used.add(call.params)
            is_lost = call.params not in known
            kinds[call.left] += is_lost or not call.left
            if is_lost and not call.left:
                lost[f"{call.op} {kernels.get(call.params.kernel).kernel_name(call.params)}"] += 1
        print(f"{card.name}: {lost.total() - before} of {calls} calls miss", flush=True)
    print(f"{len(used & known)} of the kernels were used, and {len(used - known)} others")
    for name in (*LEFT, *LEFT_OTHERS):
        print(f"left to the JIT, {kinds[name] / kinds.total():6.2%} of the calls: {name}")
    print(f"{lost.total()} of the {kinds['']} other calls miss {dict(lost) or ''}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
