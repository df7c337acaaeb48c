"""`fp8_moe`: a mixture of experts as one call, beside float64, and beside its steps as calls of their own."""

import math
from typing import Any

import pytest
import torch
from moe_cases import ERROR, SIZES, exact, problem, relative

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, arch, fused, quantize
from deep_gemm.ops import moe_chain

E4M3, I32 = torch.float8_e4m3fn, torch.int32


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_near_those_in_float64(sizes: tuple[int, ...], clamp: float | None) -> None:
    given = problem(*sizes)
    found, wanted = deep_gemm.fp8_moe(**given, clamp=clamp), exact(**given, clamp=clamp)
    assert relative(found, wanted) < ERROR
    assert not found[5:6].any()
    assert relative(found, exact(**problem(*sizes, seed=1))) > 1, "the bound is not loose"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_is_as_that_of_separate_calls(sizes: tuple[int, ...]) -> None:
    """Bit for bit, with a token at a time, and each expert by dense products."""
    given = problem(*sizes)
    found = deep_gemm.fp8_moe(**given)
    inner = sizes[-1]
    for token in range(0, sizes[0], 9):
        total = torch.zeros(sizes[3])
        for expert, weight in zip(given["topk_idx"][token].tolist(), given["topk_weights"][token], strict=True):
            if not 0 <= expert < sizes[1]:
                continue
            a = quantize.rows(given["x"][token : token + 1])
            gate_up, down = ((pair[0][expert], pair[1][expert]) for pair in (given["gate_up"], given["down"]))
            h: Any = torch.empty(1, inner).to(E4M3), torch.empty(1, -(-inner // 128))
            if inner % 128:
                both = torch.empty(1, 2 * inner).bfloat16()
                deep_gemm.fp8_gemm_nt(a, gate_up, both)
                fused.silu_and_mul(both, h)
            else:
                deep_gemm.fp8_gemm_nt(a, gate_up, h, epilogue=deep_gemm.Epilogue(activation="swiglu"))
            row = torch.empty(1, sizes[3]).bfloat16()
            deep_gemm.fp8_gemm_nt(h, down, row)
            total = total + row[0].float() * weight
        assert torch.equal(found[token], total.bfloat16())


def test_tokens_that_are_fp8_already_give_the_same_bits() -> None:
    for sizes in SIZES:
        given = problem(*sizes)
        assert torch.equal(
            deep_gemm.fp8_moe(**{**given, "x": quantize.rows(given["x"], row_major=True)}), deep_gemm.fp8_moe(**given)
        )


def test_y_may_be_given_and_rows_may_lie_apart() -> None:
    given = problem(*SIZES[2])
    wide, x = torch.full((64, 400), 7.0).bfloat16(), torch.zeros(64, 300).bfloat16()
    x[:, 3:275] = given["x"]
    wanted = deep_gemm.fp8_moe(**given)
    y = wide[:, :272]
    assert deep_gemm.fp8_moe(**{**given, "x": x[:, 3:275]}, y=y) is y
    assert torch.equal(y, wanted)
    assert bool((wide[:, 272:] == 7).all())


def test_no_tokens() -> None:
    """Scratch memory is full of NaN and of the largest numbers: nothing reads counts that nothing wrote."""
    torch.use_deterministic_algorithms(True)
    try:
        assert all(deep_gemm.fp8_moe(**problem(0, 3, 2, 64, inner)).shape == (0, 64) for inner in (64, 128))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("as_deepgemm", [False, True])
def test_counts_of_rows_are_added(as_deepgemm: bool) -> None:
    for sizes in SIZES if not as_deepgemm else [SIZES[0], SIZES[3]]:
        given = problem(*sizes)
        y, stats = torch.empty(sizes[0], sizes[3]).bfloat16(), torch.arange(sizes[1], dtype=I32)
        x, *rest = given.values()
        flat = [part for each in rest for part in (each if isinstance(each, tuple) else (each,))]
        moe_chain.experts(x, *flat, y, None, stats, math.inf, as_deepgemm)
        counts = [int((given["topk_idx"] == expert).sum()) for expert in range(sizes[1])]
        assert stats.tolist() == [expert + count for expert, count in enumerate(counts)]


def test_rows_by_eight_are_of_whole_blocks() -> None:
    given = problem(*SIZES[1])
    x, *rest = given.values()
    flat = [part for each in rest for part in (each if isinstance(each, tuple) else (each,))]
    with pytest.raises(UnsupportedError, match="must be a multiple of 128 if gate and up alternate by 8, but it is 48"):
        moe_chain.experts(x, *flat, torch.empty_like(x), None, None, math.inf, True)


def changed(**parts: Any) -> dict[str, Any]:
    return {**problem(9, 4, 2, 256, 128), **parts}


GIVEN = changed()
VALUES, SCALES = GIVEN["gate_up"]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"x": GIVEN["x"].float()},
        r"x must be torch.bfloat16, or a pair of torch.float8_e4m3fn and its scales, but it is",
    ),
    ({"x": GIVEN["x"].t().contiguous().t()}, "rows of x must be contiguous, but its strides are"),
    ({"topk_idx": GIVEN["topk_idx"].int()}, r"topk_idx must be torch.int64 \(9, 2\), but it is torch.int32 \(9, 2\)"),
    ({"topk_idx": torch.full((9, 2), 5)}, r"topk_idx\[0, 0\] is 5, but experts are from 0 to 3, and -1 or 4 is none"),
    ({"topk_idx": torch.ones(9, 2).long()}, r"topk_idx\[0\] has the expert 1 more than once"),
    ({"topk_idx": torch.empty(9, 0).long(), "topk_weights": torch.empty(9, 0)}, "a choice for each token"),
    ({"topk_weights": torch.rand(2, 9).t()}, "topk_weights must be contiguous, but its strides are"),
    ({"topk_weights": torch.rand(9, 3)}, r"topk_weights must be torch.float32 \(9, 2\), but they are"),
    ({"gate_up": VALUES}, r"gate_up must be a pair \(tensor, scales\)"),
    ({"gate_up": (VALUES[0], SCALES)}, "gate_up must have 3 dimensions"),
    ({"gate_up": (VALUES, SCALES[:, :1])}, r"the scales of gate_up must be torch.float32 \(4, 2, 2\), but they are"),
    ({"gate_up": (VALUES[:, :200], SCALES)}, "half of the rows of gate_up must be a multiple of 16, but it is 100"),
    ({"down": GIVEN["gate_up"]}, r"down must be torch.float8_e4m3fn \(4, 256, 128\), but it is"),
    ({"y": torch.empty(9, 257).bfloat16()[:, :256]}, "the row stride of y must be a multiple of 16 bytes"),
    ({"y": GIVEN["x"]}, "y and x share memory"),
    ({"clamp": -1.0}, "clamp must be None or a number from 0 on, but it is -1.0"),
    ({"clamp": "2"}, "clamp must be None or a number from 0 on, but it is '2'"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_is_wrong_is_said(parts: dict[str, Any], message: str) -> None:
    given = {**GIVEN, **parts}
    if "y and x" in message:
        given["x"] = given["y"] = GIVEN["x"].clone()
    with pytest.raises(InvalidInputError, match=message):
        deep_gemm.fp8_moe(**given)


def test_too_many_experts_are_not_supported() -> None:
    many = torch.zeros(2049, 32, 16).to(E4M3), torch.ones(2049, 1, 1)
    with pytest.raises(UnsupportedError, match="gate_up has 2049 experts, but from 1 to 2048 are supported"):
        deep_gemm.fp8_moe(torch.zeros(1, 16).bfloat16(), torch.zeros(1, 1).long(), torch.ones(1, 1), many, many)


@pytest.mark.parametrize(("capability", "served"), [((9, 0), True), ((8, 9), False), ((7, 5), False)])
def test_layers_ask_whether_a_gpu_has_the_kernels(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nn.MoE` computes with its own launches elsewhere. A GPU of an unknown kind is refused by those."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(arch, "for_device", arch.for_device.__wrapped__)
    assert moe_chain.runs_on(torch.device("cuda", 0)) is served
    assert moe_chain.runs_on(torch.device("cpu"))
