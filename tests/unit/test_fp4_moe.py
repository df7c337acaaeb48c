"""`fp8_fp4_moe` and `bf16_fp4_moe`, mixtures with MXFP4 weights, beside float64, and beside separate calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp4_moe_cases import ERRORS, SIZES, exact, problem
from gpu_fakes import FakeGpu
from moe_cases import relative

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, fused, quantize
from deep_gemm.ops import fp4_moe_chain

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"fp8": deep_gemm.fp8_fp4_moe, "bf16": deep_gemm.bf16_fp4_moe}
kinds = pytest.mark.parametrize("kind", FUNCTIONS)


@kinds
@pytest.mark.parametrize("activation", ["swiglu", "swigluoai"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_near_those_in_float64(sizes: tuple[int, ...], activation: str, kind: str) -> None:
    given, meant = problem(kind, *sizes)
    for clamp in (None, 0.5):
        for bias in (None, given["bias"]):
            call = {**given, "activation": activation, "clamp": clamp, "bias": bias}
            found, wanted = FUNCTIONS[kind](**call), exact(**{**call, **meant})
            assert relative(found, wanted) < ERRORS[kind]
            assert not found[5:6].any()
    assert relative(FUNCTIONS[kind](**given), wanted) > 0.1, "the bound is not loose"


@kinds
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_is_as_that_of_separate_calls(sizes: tuple[int, ...], kind: str) -> None:
    """Bit for bit: a token at a time, each expert by dense products."""
    given, _ = problem(kind, *sizes)
    found = FUNCTIONS[kind](**given, activation="swigluoai")
    tokens, experts, _, width, inner = sizes
    multiply = deep_gemm.fp8_fp4_gemm_nt if kind == "fp8" else deep_gemm.bf16_fp4_gemm_nt
    out = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
    for token in range(0, tokens, 9):
        total = torch.zeros(width)
        for expert, weight in zip(given["topk_idx"][token].tolist(), given["topk_weights"][token], strict=True):
            if not 0 <= expert < experts:
                continue
            gate_up, down = ((pair[0][expert], pair[1][expert]) for pair in (given["gate_up"], given["down"]))
            x: Any = given["x"][token : token + 1]
            both, row = torch.empty(1, 2 * inner).bfloat16(), torch.empty(1, width).bfloat16()
            multiply(quantize.rows(x) if kind == "fp8" else x, gate_up, both)
            of_gate_up, of_down = given["bias"]
            groups = torch.tensor([expert], dtype=torch.int32)
            h = fused.swigluoai_and_mul(both, out, limit=7.0, bias=of_gate_up, groups=groups)
            multiply(h, down, row)
            total = total + (row[0].float() + of_down[expert]) * weight
        assert torch.equal(found[token], total.bfloat16())


@kinds
def test_few_tokens_take_five_launches_of_the_masked_form(kind: str, gpu: FakeGpu) -> None:
    """In which an expert's rows are as many as there are tokens, not multiples of 128."""
    for tokens, grouping in ((5, "masked"), (64, "masked"), (65, "psum")):
        given, _ = problem(kind, tokens, 8, 2, 256, 128)
        gpu.launched.clear()
        FUNCTIONS[kind](**given)
        specs = [launch.spec for launch in gpu.launched]
        assert [launch.kernel for launch in gpu.launched] == ["dispatch", "fp4", "activate", "fp4", "combine"]
        assert {spec.grouping for spec in (specs[1], specs[3])} == {grouping}
        if grouping == "masked":
            assert specs[1].m == specs[2].room == -(-tokens // 4) * 4
        assert specs[2].choices == 2 * tokens


@kinds
def test_weights_of_a_checkpoint_and_wide_exponents_give_the_same(kind: str) -> None:
    """Those of a checkpoint are transformed in the call, with exponents of 8 bits."""
    given, _ = problem(kind, *SIZES[1], packed=True)
    wanted = FUNCTIONS[kind](**problem(kind, *SIZES[1])[0])
    assert torch.equal(FUNCTIONS[kind](**given), wanted)


def test_tokens_that_are_fp8_already_give_the_same_bits() -> None:
    for sizes in SIZES:
        given, _ = problem("fp8", *sizes)
        cast = {**given, "x": quantize.rows(given["x"], row_major=True)}
        assert torch.equal(deep_gemm.fp8_fp4_moe(**cast), deep_gemm.fp8_fp4_moe(**given))


@kinds
def test_y_may_be_given_and_rows_may_lie_apart(kind: str) -> None:
    given, _ = problem(kind, *SIZES[2])
    width = given["x"].shape[1]
    wide, x = torch.full((64, width + 8), 7.0).bfloat16(), torch.zeros(64, width + 5).bfloat16()
    x[:, 3 : width + 3] = given["x"]
    y, wanted = wide[:, :width], FUNCTIONS[kind](**given)
    assert FUNCTIONS[kind](**{**given, "x": x[:, 3 : width + 3]}, y=y) is y
    assert torch.equal(y, wanted)
    assert bool((wide[:, width:] == 7).all())


@kinds
def test_no_tokens(kind: str) -> None:
    given, _ = problem(kind, 0, 3, 2, 64, 32)
    assert FUNCTIONS[kind](**given).shape == (0, 64)


def test_most_experts_have_no_more_rows_than_are_expected() -> None:
    torch.manual_seed(0)
    for tokens, top_k, experts in ((1, 8, 256), (16, 4, 32), (64, 4, 32), (64, 8, 256)):
        chosen = torch.rand(200, tokens, experts).argsort(2)[..., :top_k]
        counts = torch.nn.functional.one_hot(chosen, experts).sum((1, 2)).float()
        expected = fp4_moe_chain.expected_rows(tokens * top_k, experts)
        assert (counts > expected).float().mean() < 0.05
        assert expected < 4 * tokens * top_k / experts + 4


GIVEN = problem("fp8", 9, 4, 2, 256, 96)[0]
PACKED, FACTORS = GIVEN["gate_up"]
OF_GATE_UP, OF_DOWN = GIVEN["bias"]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": GIVEN["x"].float()}, "x must be torch.bfloat16, or a pair of torch.float8_e4m3fn and its scales, but it is"),
    ({"x": GIVEN["x"][:, :240]}, r"the width of x must be a positive multiple of 32"),
    ({"x": GIVEN["x"][:, :64].contiguous()}, r"gate_up must be the weights \(N, K\) = \(192, 64\) of transform_fp4"),
    ({"topk_idx": torch.full((9, 2), 5)}, r"topk_idx\[0, 0\] is 5, but experts are from 0 to 3, and -1 or 4 is none"),
    ({"topk_weights": torch.rand(9, 3)}, r"topk_weights must be torch.float32 \(9, 2\), but they are"),
    ({"gate_up": PACKED}, r"gate_up must be a pair \(tensor, scales\)"),
    ({"gate_up": problem("bf16", 9, 4, 2, 256, 96)[0]["gate_up"]}, r"gate_up must be torch.uint8, .* Transform the we"),
    ({"gate_up": (PACKED, FACTORS[:, :64])}, r"the factors of gate_up must be torch.float32 \(4, 192\)"),
    ({"down": GIVEN["gate_up"]}, r"down must be the weights \(N, K\) = \(256, 96\) of transform_fp4_weights"),
    ({"bias": OF_DOWN}, "bias must be None or two tensors, of gate_up and of down, but it is"),
    ({"bias": (OF_GATE_UP, OF_GATE_UP)}, r"the bias of down must be torch.bfloat16 \(4, 256\), but it is"),
    ({"bias": (OF_GATE_UP.float(), OF_DOWN)}, r"the bias of gate_up must be torch.bfloat16 \(4, 192\), but it is"),
    ({"bias": (OF_GATE_UP, OF_DOWN.t().contiguous().t())}, "the bias of down must be contiguous"),
    ({"activation": "gelu"}, "activation must be 'swiglu' or 'swigluoai', but it is 'gelu'"),
    ({"clamp": -1.0}, "clamp must be None or a number from 0 on, but it is -1.0"),
    ({"y": torch.empty(9, 255).bfloat16()}, r"y must be torch.bfloat16 \(9, 256\), but it is"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_said(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        deep_gemm.fp8_fp4_moe(**{**GIVEN, **parts})


def test_too_many_experts_are_not_supported() -> None:
    many = deep_gemm.ops.fp4_weights.empty(2049, 64, 32, "fp8", "cpu")
    with pytest.raises(UnsupportedError, match="gate_up has 2049 experts, but from 1 to 2048 are supported"):
        deep_gemm.fp8_fp4_moe(torch.zeros(1, 32).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1), many, many)
