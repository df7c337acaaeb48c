"""One launch of a kernel with an epilogue on operands whose sums are exact, beside the same steps in torch."""

from collections.abc import Callable
from dataclasses import replace

import torch
from forced import ALPHA, DTYPES, fits, force_gemm, mn_major, scaling_of

from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.epilogues import every
from deep_gemm.ops.cast_reference import cast_blocks
from deep_gemm.ops.reference import Finish, Scalings, exact_product
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts, by_part
from deep_gemm.runtime import engine
from deep_gemm.spec import SCALE_BLOCK, align, ceil_div
from deep_gemm.testing import guarded, guarded_copy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F32 = torch.bfloat16, torch.float32
TEXTS = ("bias:f32+gelu", str(every(True)), "alpha+rows+bias:f32+relu+residual", "bias:f16+relu2")
"""Of families' cases; and two whose results are exact for these operands."""
EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "rows+bias:bf16+custom:mix(weight;shift,scale) return x > shift ? x * weight : x * scale;": (
        lambda x, weight, shift, scale: torch.where(x > shift, x * weight, x * scale)
    ),
    "bias:f32+custom:place(weight;) return (row + 2 * column) % 3 ? x * weight : column - 4.0f * row;": (
        lambda x, row, column, weight: torch.where((row + 2 * column) % 3 != 0, x * weight, column - 4.0 * row)
    ),
}
"""Epilogues with expressions, exact too, and the same in torch."""
SHAPES = [(200, 520, 656, 8), (37, 264, 128, 132), (1, 8, 16, 132)]
CAST_SHAPES = [(200, 640, 656, 8), (37, 256, 128, 132), (1, 128, 16, 132)]
ODD_SHAPES = [(100, 333, 400, 8), (1, 1, 128, 132)]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small, so that sums are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float().to(DEVICE)


def powers(*shape: int, seed: int) -> torch.Tensor:
    return torch.exp2(integers(*shape, seed=seed) / 2 // 1)


def fp8_scales(rows: int, k: int, kind: str, seed: int) -> torch.Tensor:
    if kind == "1x128":
        return mn_major(powers(rows, ceil_div(k, 128), seed=seed))
    shape = (ceil_div(rows, 128), ceil_div(k, 128)) if kind == "128x128" else (rows, 1)
    return powers(*shape, seed=seed)


def product(dtype: str, m: int, n: int, k: int, scaling: Scalings) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Operands, and the exact product in float64."""
    a, b = integers(m, k, seed=1), integers(n, k, seed=2)
    if dtype != "e4m3":
        return {"a": a.to(DTYPES[dtype]), "b": b.to(DTYPES[dtype])}, a.double() @ b.double().t()
    x, y = (each.to(torch.float8_e4m3fn) for each in (a, b))
    sfa, sfb = (fp8_scales(rows, k, kind, at) for at, (rows, kind) in enumerate(zip((m, n), scaling, strict=True)))
    return {"a": x, "sfa": sfa, "b": y, "sfb": sfb}, exact_product(x, sfa, y, sfb, scaling=scaling)


def vectors(parts: Parts, m: int, n: int, out: torch.dtype, padding: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of an epilogue; those that are not asked for are left out."""
    residual = guarded_copy(integers(m, n, seed=5).to(out), (align(n, 8) + padding, 1)).tensor
    found = by_part(powers(m, seed=3), integers(n, seed=4), residual)
    found |= {name: found[name].to(dtype) for name in found if (dtype := DTYPES.get(getattr(parts, name)))}
    if own := parts.expression:
        sizes = [m] * len(own.rows) + [n] * len(own.columns)
        found |= {
            name: powers(size, seed=7 + at) for at, (name, size) in enumerate(zip(own.labels, sizes, strict=False))
        }
    return {name: found[name] for name in parts.tensors if name != "sfd"}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, activation: str) -> None:
    """Equal if all steps are exact, and within a rounding otherwise."""
    if activation in ("", "relu", "relu2"):
        assert torch.equal(found, wanted.to(found.dtype))
        return
    u = {BF16: 2.0**-8, torch.float16: 2.0**-11, F32: 2.0**-17}[found.dtype]
    assert ((found.double() - wanted.double()).abs() <= u * wanted.double().abs() + 2**-14).all()


def finish_of(parts: Parts, tensors: dict[str, torch.Tensor]) -> Finish:
    """The epilogue in torch."""
    vectors = {name: x for name, x in tensors.items() if name.startswith("vector")}
    given = {name: x for name, x in tensors.items() if name not in vectors}
    own, expression = None, parts.expression
    if expression is not None:
        values = dict(zip((*expression.rows, *expression.columns), vectors.values(), strict=True))
        values = {name: x[:, None] if name in expression.rows else x for name, x in values.items()}

        def own(x: torch.Tensor, where: tuple[slice, slice]) -> torch.Tensor:
            row, column = (torch.arange(size, device=DEVICE) for size in x.shape)
            places = {name: at for name, at in (("row", row[:, None]), ("column", column)) if expression.uses(name)}
            return EXPRESSIONS[str(replace(parts, cast=""))](x, **values, **places)

    return Finish(parts.activation, ALPHA if parts.alpha else 1.0, **given, own=own)


def check(params: KernelParams, function: Function) -> None:
    """Tiles that cross the edge of D, and several tiles of a CTA; nothing outside of D is written, and what lies around
    the residual is NaN. FP8 is the cast of a result that is exact."""
    parts = params.epilogue
    out = torch.float8_e4m3fn if parts.cast else DTYPES[params.output]
    for m, n, k, sms in CAST_SHAPES if parts.cast else SHAPES if params.store == "tma" else ODD_SHAPES:
        if params.dtype != "e4m3" and not fits(params, m, n, k, sms):
            continue
        tensors, exact = product(params.dtype, m, n, k, scaling_of(params))
        more = vectors(parts, m, n, out, 8 if params.store == "tma" else 1)
        d = guarded((m, n), out, DEVICE, (align(n, 8) + 16, 1) if params.store == "tma" else None)
        sfd = guarded((m, ceil_div(n, SCALE_BLOCK)), F32, DEVICE, (1, align(m, 4) + 4))
        given = {**tensors, **more, "d": d.tensor, **({"sfd": sfd.tensor} if parts.cast else {})}
        force_gemm(params, function, given, sms, engine.raw_stream(torch.cuda.current_device()))()
        torch.cuda.synchronize()
        d.check(f"d, {m} x {n} x {k}")
        sfd.check(f"scales of d, {m} x {n} x {k}")
        wanted = finish_of(parts, more)(exact, (slice(None), slice(None)))
        if not parts.cast:
            assert_close(d.tensor, wanted, parts.activation)
            continue
        values, scales = cast_blocks(wanted, 1, SCALE_BLOCK, parts.cast == "ue8m0")
        assert torch.equal(d.tensor.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(sfd.tensor, scales)


def is_right(params: KernelParams, function: Function) -> bool:
    """Whether `check` finds nothing."""
    try:
        check(params, function)
    except AssertionError:
        return False
    return True
