"""Which kernels are chosen and how they are launched for drawn calls: a part of the record of ``house.py``."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from house_refusals import digest

from deep_gemm import kernels, select
from deep_gemm.arch import SM90
from deep_gemm.errors import DeepGemmError
from deep_gemm.runtime import engine
from deep_gemm.select import calibration
from deep_gemm.spec import Accumulate, Dtype, GemmSpec, Grouping, Operand, Scaling, align, ceil_div

CARDS = {"H100": ("NVIDIA H100 80GB HBM3", 132), "H200": ("NVIDIA H200", 132), "H20": ("NVIDIA H20", 78)}
"""The cards for which configs are chosen; the last one has no calibration of its own."""
DRAWN = 3000
PER_CHUNK = 100


def draw(index: int) -> GemmSpec:
    """The spec of a random call. Every kind of call has its share."""
    rng = random.Random(f"house {index}")

    def size(low: int, high: int, step: int = 1) -> int:
        return align(int(low * (high / low) ** rng.random()), step)

    kind = rng.choice(("fp8", "fp8", "1d1d", "row", "half", "half", "half", "m fp8", "m half", "k fp8", "k half"))
    m, n, k = size(1, 16384), size(64, 32768, rng.choice((1, 8, 16, 64, 128))), size(128, 32768, 16)
    k = align(k, 128) if rng.random() < 0.6 else k
    dtype: Dtype = rng.choice(("bf16", "bf16", "bf16", "f16")) if "half" in kind else "e4m3"
    output: Dtype = "bf16" if dtype == "e4m3" else dtype
    accumulate: Accumulate = "none"
    major_a, major_b = "k", "k"
    scaling: tuple[Scaling, Scaling] = ("none", "none")
    more: dict[str, Any] = {}
    if "fp8" in kind:
        scaling = ("1x128", "128x128")
    if kind in ("1d1d", "k fp8"):
        scaling, output = ("1x128", "1x128"), "f32"
    if kind == "row":
        scaling = ("row", "row")
    if kind == "half":
        major_a, major_b = rng.choice(("k", "k", "k", "mn")), rng.choice(("k", "k", "mn"))
    if kind in ("fp8", "1d1d", "row", "half") and rng.random() < (0.15 if kind == "fp8" else 0.5):
        output = rng.choice((output, "f32"))
        accumulate = rng.choice(get_args(Accumulate))
    if kind.startswith("m "):
        grouping: Grouping = rng.choice(("contiguous", "psum", "masked"))
        groups = rng.choice((1, 4, 8, 32, 64, 128, 256))
        m = rng.choice((64, 128, 256, 1024, 4096)) if grouping == "masked" else size(128, 65536, 128)
        more = {"grouping": grouping, "groups": groups, "alignment": 1 if grouping == "masked" else 128}
        more["expected_m"] = min(m, 1 << rng.randrange(0, 12)) if grouping == "masked" else 0
        k, major_b = (align(k, 64), rng.choice(("k", "mn"))) if dtype != "e4m3" else (k, "k")
    if kind.startswith("k "):
        more = {"grouping": "k", "groups": rng.choice((1, 4, 8, 32, 64))}
        k = more["groups"] * align(size(128, 8192), 128)
        output, accumulate = rng.choice(("f32", "f32", "bf16")), rng.choice(get_args(Accumulate))
        if dtype != "e4m3":
            dtype, major_a, major_b = "bf16", "mn", "mn"
    if rng.random() < 0.1:
        more |= {"num_sms": rng.choice((1, 16, 66, 120)), "whole_gpu": False}
    if rng.random() < 0.1:
        more |= {"batch_invariant": True}
    if rng.random() < 0.05:
        more |= {"compiled_dims": rng.choice(("n", "nk", "mnk"))}
    if rng.random() < 0.05:
        more |= {"block_multiple": rng.choice(((1, 64), (64, 1), (16, 16), (128, 128)))}
    aligned = n % (4 if output == "f32" else 8) == 0 and rng.random() < 0.95
    a, b = Operand(dtype, major_a, scaling[0]), Operand(dtype, major_b, scaling[1])  # type: ignore[arg-type]
    d = Operand(output, "mn", aligned=aligned)
    return GemmSpec(**{"m": m, "n": n, "k": k, "a": a, "b": b, "d": d, "num_sms": 0, "accumulate": accumulate, **more})


def strides(spec: GemmSpec) -> dict[str, tuple[int, ...]]:
    """Those of freshly allocated operands."""
    m, n, k, blocks = spec.m, spec.n, spec.k, ceil_div(spec.k, 128)
    row = n if not spec.d.aligned else align(n, 8)
    found: dict[str, tuple[int, ...]] = {
        "a": (align(k, 16), 1) if spec.a.major == "k" else (1, align(m, 8)),
        "b": (align(k, 16), 1) if spec.b.major == "k" else (1, align(n, 8)),
        "d": (m * row, row, 1) if spec.grouping == "k" else (row, 1),
        "sfa": (1,) if spec.a.scaling == "row" else (1, align(m, 4)),
    }
    rows = {"row": (1,), "1x128": (1, align(n, 4)), "128x128": (blocks, 1), "none": (blocks, 1)}
    found["sfb"] = rows[spec.b.scaling]
    if spec.grouping in ("contiguous", "psum", "masked"):
        found["sfb"] = (ceil_div(n, 128) * blocks, blocks, 1)
    return found | ({"c": found["d"]} if spec.accumulate != "none" else {})


def numbers(spec: GemmSpec) -> dict[str, tuple[int, ...]]:
    """Those that a launch with `strides` takes besides."""
    blocks = ceil_div(spec.k, 128)
    return {"blocks": (blocks, blocks)}


def choice(spec: GemmSpec, known: calibration.Calibration) -> tuple[str, str]:
    """The name of the chosen kernel; and a digest of its estimate, of its launches with and without promises, and of
    the second and third choice. Or why there is none."""
    try:
        ranked = select.rank(spec, SM90, known)
    except DeepGemmError as error:
        return f"{type(error).__name__} {digest(error, 8)}", ""
    params = [engine.kernel_params(spec, each.config, SM90) for each in ranked[:3]]
    first = kernels.get(params[0].kernel)
    launches = [
        outcome_or(lambda c=constant, p=pdl: first.launch_plan(params[0], spec, strides(spec), p, c, numbers(spec)))
        for constant, pdl in ((False, False), (True, True))
    ]
    names = [kernels.get(each.kernel).kernel_name(each) for each in params]
    total = f"{ranked[0].estimate.total_us:.6g} {ranked[0].sustained_us:.6g}"
    return names[0], digest((names[1:], total, launches), 8)


def outcome_or(call: Callable[[], object]) -> str:
    """What it returns, without maps' offsets of 0, or what it refuses."""
    try:
        return repr(call()).replace(", offset=0)", ")")
    except DeepGemmError as error:
        return f"{type(error).__name__} {error}"


def choices(chunk: int) -> list[list[str]]:
    """For each spec of a chunk and each card, the kernel and the digest. The digest is that of all cards."""
    found = []
    known = {card: calibration.for_device(device, sms) for card, (device, sms) in CARDS.items()}
    for index in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        spec, row, rest = draw(index), [], []
        for card, (_, sms) in CARDS.items():
            asked = replace(spec, num_sms=min(spec.num_sms or sms, sms))
            name, more = choice(asked, known[card])
            row.append(name)
            rest.append(more)
        found.append([*row, digest(rest, 8)])
    return found
