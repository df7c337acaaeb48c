"""Products that write FP8 with 1x128 scales, without a gate: what they mean, what is refused, and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu, gpu

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, UnsupportedError, kernels, ops, quantize, select
from deep_gemm.arch import SM90
from deep_gemm.kernels.families import FP8_GROUPED, FP8_SCALED, HALF_GEMM
from deep_gemm.ops.reference import ACTIVATIONS
from deep_gemm.runtime import engine
from deep_gemm.spec import GemmSpec

__all__ = ["gpu"]

M, N, K = 9, 256, 384
Pair = tuple[torch.Tensor, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands() -> tuple[Pair, Pair]:
    return quantize.rows(random(M, K, seed=1)), quantize.blocks(random(N, K, seed=2) / 8)


def pair(rows: int = M, columns: int = N) -> Pair:
    return quantize.rows(torch.zeros(rows, columns))


PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"alpha": 0.5, "bias": random(N, seed=3), "row_factor": random(M, seed=4)},
    **{name: {"activation": name} for name in ACTIVATIONS},
}


def epilogues(name: str, **more: Any) -> Epilogue:
    if name == "custom":
        body, scale = "return fminf(x * scale, 1.0f) + row + column;", random(N, seed=5)

        def reference(x: torch.Tensor, scale: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            return (x * scale).clamp(max=1.0) + row + column

        return Epilogue.custom("own", body, columns={"scale": scale}, reference=reference, **more)
    return Epilogue(**PARTS[name], **more)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("name", [*PARTS, "custom"])
def test_it_is_the_cast_of_the_float32_result(name: str, use_ue8m0: bool) -> None:
    (a, b), exact, d = operands(), torch.empty(M, N), pair()
    deep_gemm.fp8_gemm_nt(a, b, exact, epilogue=epilogues(name))
    deep_gemm.fp8_gemm_nt(a, b, d, epilogue=epilogues(name, use_ue8m0=use_ue8m0))
    wanted = quantize.rows(exact, use_ue8m0=use_ue8m0)
    assert torch.equal(d[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(d[1], wanted[1])


def given(c: Any = None, d: Any = None, **parts: Any) -> Callable[[], object]:
    a, b = operands()
    out = pair() if d is None else d
    return lambda: deep_gemm.fp8_gemm_nt(a, b, out, c, epilogue=Epilogue(**parts))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "c": (
        given(c=pair()[0]),
        "c and a d of FP8 cannot be combined. Pass a d of c's dtype, and cast it with deep_gemm.q",
    ),
    "residual": (given(residual=pair()[0], activation="silu"), "residual and a d of FP8 cannot be combined"),
    "shape": (given(d=pair(M, 2 * N)), r"d must have the shape \(9, 256\)"),
    "without an epilogue": (
        lambda: deep_gemm.fp8_gemm_nt(*operands(), pair()),  # type: ignore[arg-type]
        r"d must be a torch.Tensor without an epilogue, but it is of type tuple. For FP8 values and their scales pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        call()


def spec(m: int = 256, n: int = 4096, text: str = "gelu+fp8", **more: Any) -> GemmSpec:
    return ops.spec(m, n, 7168, 132, epilogue=text, **{"output": "e4m3", "aligned": True, **more})


NO_KERNEL = {
    "columns": (spec(n=320), "columns of a D of FP8 must be a multiple of 128, not 320"),
    "rows of d": (spec(aligned=False), "rows of a D of FP8 must begin on 16-byte boundaries"),
    "c": (spec(accumulate="from c"), "it adds nothing to a D of FP8 but a bias"),
    "residual": (spec(text="residual+fp8"), "it adds nothing to a D of FP8 but a bias"),
    "no scales": (
        spec(text="gelu"),
        "D of FP8 has scales, which an epilogue asks for, but D is e4m3 and the epilogue g",
    ),
    "no FP8": (spec(output="f32"), r"D of FP8 has scales, .* but D is f32 and the epilogue gelu\+fp8"),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_what_has_no_kernel_says_why(name: str) -> None:
    asked, sentence = NO_KERNEL[name]
    with pytest.raises(UnsupportedError, match=sentence):
        kernels.for_spec(asked, SM90)


SCALINGS = (("1x128", "128x128"), ("1x128", "1x128"), ("row", "row"))


@pytest.mark.parametrize("majors", ["kk", "km", "mm", "mk"])
@pytest.mark.parametrize("op", ["bf16_gemm_nt", "fp16_gemm_nt"])
def test_sixteen_bits_have_it_in_all_layouts(op: str, majors: str) -> None:
    of_a, of_b = ("k" if each == "k" else "mn" for each in majors)
    asked = ops.spec(256, 4096, 7168, 132, op, majors=(of_a, of_b), epilogue="gelu+fp8", output="e4m3", aligned=True)  # type: ignore[arg-type]
    ranked = select.rank(asked, SM90)
    assert {each.config.family for each in ranked} == {HALF_GEMM.name}
    assert {each.config.block_n // each.config.cluster_k for each in ranked} == {128, 256}


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("grouping", ["none", "contiguous", "psum", "masked"])
def test_a_consumer_has_all_columns_of_a_scale(grouping: str, scaling: Any) -> None:
    if grouping != "none" and scaling != SCALINGS[0]:
        return
    more = {"none": {}, "masked": {"groups": 4, "expected_m": 20}}.get(grouping, {"groups": 4, "alignment": 128})
    ranked = select.rank(replace(spec(scaling=scaling), grouping=grouping, **more), SM90)
    assert {each.config.family for each in ranked} == {(FP8_SCALED if grouping == "none" else FP8_GROUPED).name}
    widths = {each.config.block_n for each in ranked}
    assert {128} <= widths <= {128, 256}
    assert all(kernels.gemm_family(each.config.family).rules.mma_n(each.config) == 128 for each in ranked)


@pytest.mark.compile
@pytest.mark.parametrize("text", ["fp8", "alpha+rows+bias:f32+gelu_erf+fp8:ue8m0", "bias:bf16+silu+fp8"])
@pytest.mark.parametrize(("scaling", "tile"), [("1d2d", (128, 256, (2, 1), 1, 1)), ("rowwise", (128, 128))])
def test_the_widest_tile_spills_nothing(text: str, scaling: str, tile: Any) -> None:
    params = FP8_SCALED.case(FP8_SCALED.config(*tile), scaling=scaling, epilogue=text, output="e4m3")
    assert engine.build(params).resources.problems() == []


def test_kernels_get_the_scales_as_an_operand(gpu: FakeGpu) -> None:
    a, b = operands()
    scales = torch.zeros(2, M + 7)[:, :M].t()
    for epilogue, text in ((Epilogue(), "fp8"), (Epilogue(activation="silu", use_ue8m0=True), "silu+fp8:ue8m0")):
        for _ in range(2):
            values = torch.zeros(M, N + 16).to(torch.float8_e4m3fn)[:, :N]
            deep_gemm.fp8_gemm_nt(a, b, (values, scales), epilogue=epilogue)
            launched = gpu.launched[-1]
            assert (launched.spec.n, launched.spec.d.dtype, launched.spec.d.scaling) == (N, "e4m3", "1x128")
            assert launched.spec.epilogue == text
            assert (launched.strides["d"], launched.strides["sfd"]) == ((N + 16, 1), (1, M + 7))
            assert (launched.at["d"], launched.at["sfd"]) == (values.data_ptr(), scales.data_ptr())
