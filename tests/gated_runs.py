"""One call of each kernel with a gate (SwiGLU) or FP8 output with given device code, whose result and surroundings are
checked."""

from typing import Any

import torch
from forced import ALPHA, DTYPES
from grouped_cases import E4M3, Case, Routing, strides
from grouped_runs import kind_of, launch
from k_grouped_cases import DEVICE

from deep_gemm.jit import Builder
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.m_grouped import MGrouped
from deep_gemm.ops.reference import Finish
from deep_gemm.params import KernelParams
from deep_gemm.parts import EIGHT, Parts
from deep_gemm.spec import SCALE_BLOCK, align
from deep_gemm.testing import guarded

INNER, K, MAX_M = 384, 656, 301
COUNTS = (100, 0, 1, 128, 300, 7, 7, 200)
ROUTING = Routing(COUNTS, Routing(COUNTS).end + 200)
"""An empty group, ends inside tiles, and a row of tiles of padding alone."""
ONE = Routing((200,), alignment=8)
"""Of a product without groups."""
HALF_UNIT = {"bf16": 2.0**-8, "f16": 2.0**-10, "f32": 2.0**-15}


def is_right(params: KernelParams, builder: Builder) -> bool:
    """Whether the result is that of the exact product, and nothing else was written."""
    try:
        check(params, builder)
    except AssertionError:
        return False
    return True


def check(params: KernelParams, builder: Builder) -> None:
    """Assert it."""
    form, parts, kind = params.grouping, params.epilogue, kind_of(params)
    inner = INNER if kind == "fp8" or parts.cast else INNER + 8  # 16-bit tiles may cross the edge of D
    case = Case(kind, ONE if form == "none" else ROUTING, 2 * inner, K, DEVICE, integers=True)
    (case.sfb if kind == "fp8" else case.b).div_(32)  # sums are about 4
    a, b, layout = case.arguments("contiguous" if form == "none" else form, MAX_M)
    rows, columns = (a[0] if kind == "fp8" else a).shape[:-1], inner if parts.is_gated else 2 * inner
    blocks = columns // SCALE_BLOCK
    d = guarded((*rows, columns), E4M3 if parts.cast else DTYPES[params.output], DEVICE, strides(rows, columns + 16))
    step = align(rows[-1], 4) + 4
    of_scales = (1, step) if len(rows) == 1 else (blocks * step, 1, step)
    sfd = guarded((*rows, blocks), torch.float32, DEVICE, of_scales)
    if by_eight := parts.interleaved == EIGHT:  # gate's rows first, and then up's, until now
        b = (turned(b[0]), b[1])
    given: dict[str, Any] = {"a": a, "b": b, "d": d.tensor, "epilogue": str(parts)}
    given |= {"alpha": ALPHA} if parts.alpha else {}
    bias, each = random(len(case.routing.counts), 2 * inner, seed=3), random(case.routing.m, seed=4)
    tensors = {
        "bias": bias.to(DTYPES.get(parts.bias, torch.float32)),
        "row_factor": case.spread(each[:, None], MAX_M)[..., 0] if form == "masked" else each,
        "sfd": sfd.tensor,
    }
    operation: Any
    if form == "none":
        operation, tensors["bias"] = Dense(f"{kind}_gemm_nt", epilogue_tensors=parts.tensors), tensors["bias"][0]
        given["b"] = (b[0][0], b[1][0]) if kind == "fp8" else b[0]
    else:
        name = f"m_grouped_{kind}_gemm_nt_{'masked' if form == 'masked' else 'contiguous'}"
        operation = MGrouped(name, epilogue_tensors=parts.tensors)
        given[operation.layout] = layout
        given |= {"expected_m": 64} if form == "masked" else {"alignment": 128, "use_psum_layout": form == "psum"}
    given |= {name: tensors[name] for name in parts.tensors}
    launch(operation, given, params.config, builder)
    d.check("d")
    sfd.check("the scales of d")
    exact = case.exact()
    for group, part in enumerate(case.routing.slices()):
        more: dict[str, Any] = {"bias": tensors["bias"] if form == "none" else tensors["bias"][group]}
        more |= {"row_factor": each[part]}
        more = {name: tensor for name, tensor in more.items() if name in parts.tensors}
        finish = Finish(
            parts.activation,
            ALPHA if parts.alpha else 1.0,
            clamp=parts.clamp,
            interleaved=bool(parts.interleaved) and not by_eight,
            **more,
        )
        wanted = finish(exact[part], (slice(None), slice(None)))
        own = (group, slice(part.stop - part.start)) if form == "masked" else part
        if parts.cast:
            assert_cast(parts, d.tensor[own], sfd.tensor[own], wanted)
        else:
            assert_near(d.tensor[own].float(), wanted, HALF_UNIT[params.output] * wanted.abs() + 2**-18)
    assert_padding(case.routing, params, d.tensor, sfd.tensor)


def turned(b: torch.Tensor) -> torch.Tensor:
    """Eight rows of gate and eight of up in turn."""
    both = b.view(torch.uint8).unflatten(1, (2, -1, EIGHT))
    return both.transpose(1, 2).reshape(b.shape).view(b.dtype)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> None:
    assert bool(((found - wanted).abs() <= bound).all())


def assert_cast(parts: Parts, values: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor) -> None:
    """Scales are those of the largest magnitudes, and values are rounded to E4M3, of which the least step is 2^-9."""
    exact = wanted.abs().unflatten(1, (-1, SCALE_BLOCK)).amax(2).clamp(min=1e-4) / 448
    if parts.cast == "ue8m0":
        assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
        assert bool(((scales >= exact * (1 - 2**-15)) & (scales <= 2 * exact * (1 + 2**-15))).all())
    else:
        assert_near(scales, exact, exact * 2**-15)
    each = scales.repeat_interleave(SCALE_BLOCK, 1)
    assert_near(values.float() * each, wanted, wanted.abs() / 15 + each * 2**-9)


def assert_padding(routing: Routing, params: KernelParams, d: torch.Tensor, sfd: torch.Tensor) -> None:
    """Rows without a group: in the index form all are written, those of tiles of padding alone with zeros and the scale
    of zeros; in other forms none."""
    parts, inside = params.epilogue, torch.zeros(d.shape[:-1], dtype=torch.bool)
    for group, part in enumerate(routing.slices()):
        inside[(group, slice(part.stop - part.start)) if params.grouping == "masked" else part] = True
    bits = d.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[d.element_size()])
    filler = 255 if d.element_size() == 1 else -1
    if params.grouping != "contiguous":
        assert bool((bits[~inside.to(d.device)] == filler).all())
        if parts.cast:
            assert bool((sfd.view(torch.int32)[~inside.to(d.device)] == -1).all())
        return
    assert bool((d[routing.end :].float() == 0).all())
    if parts.cast:
        least = 2.0**-22 if parts.cast == "ue8m0" else (torch.tensor(1e-4) / 448).item()
        assert bool((sfd[routing.end :] == least).all())
        assert bool((sfd.view(torch.int32) != -1).all())
