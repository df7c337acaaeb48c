"""The public functions on CPU tensors: what surrounds a kernel, with the reference in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.reference import exact_product
from deep_gemm.testing import Operand, integer_operands

M, N, K = 20, 200, 272


@pytest.fixture
def operands() -> tuple[Operand, Operand]:
    return integer_operands(M, N, K, "cpu")


def output(m: int = M, n: int = N) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16)


def transposed(x: Operand) -> Operand:
    return x[0].t(), x[1].t()


FORMS: dict[str, tuple[Callable[..., None], bool, bool]] = {
    "nt": (deep_gemm.fp8_gemm_nt, False, False),
    "nn": (deep_gemm.fp8_gemm_nn, False, True),
    "tn": (deep_gemm.fp8_gemm_tn, True, True),
    "tt": (deep_gemm.fp8_gemm_tt, True, False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"recipe": (1, 128, 128), "compiled_dims": "n", "disable_ue8m0_cast": True}])
def test_every_form_gives_the_same_product(
    operands: tuple[Operand, Operand], form: str, options: dict[str, Any]
) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = operands
    d = output()
    assert function(transposed(a) if transpose_a else a, transposed(b) if transpose_b else b, d, **options) is None
    assert torch.equal(d, exact_product(*a, *b).bfloat16())


@pytest.mark.parametrize("form", ["nn", "tn", "tt"])
def test_hopper_needs_k_contiguous(operands: tuple[Operand, Operand], form: str) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = operands
    k_outer = [(x[0].t().contiguous(), x[1].t()) if flip else x for x, flip in ((a, transpose_a), (b, transpose_b))]
    with pytest.raises(UnsupportedError, match=r"[ab] is stored with K.*contiguous"):
        function(*k_outer, output())


@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("wrong", [None, 3, torch.zeros(2, 2), (torch.zeros(2, 2),), (1, 2)])
def test_mistakes_are_told_by_every_form(operands: tuple[Operand, Operand], form: str, wrong: Any) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = (transposed(x) if flip else x for x, flip in zip(operands, (transpose_a, transpose_b), strict=True))
    with pytest.raises(InvalidInputError, match="a must be a"):
        function(wrong, b, output())
    with pytest.raises(InvalidInputError, match="b must be a"):
        function(a, wrong, output())


def test_the_fp4_names_are_the_same_functions() -> None:
    for form in FORMS:
        assert getattr(deep_gemm, f"fp8_fp4_gemm_{form}") is getattr(deep_gemm, f"fp8_gemm_{form}")


def test_lists_and_compiled_dims_of_none(operands: tuple[Operand, Operand]) -> None:
    a, b = operands
    d = output()
    deep_gemm.fp8_gemm_nt(list(a), list(b), d, compiled_dims=None)
    assert torch.equal(d, exact_product(*a, *b).bfloat16())


def test_repeated_calls_see_new_data(operands: tuple[Operand, Operand]) -> None:
    (a, sfa), b = operands
    d = output()
    for factor in (1.0, 2.0, 0.5):
        scaled = sfa * factor
        deep_gemm.fp8_gemm_nt((a, scaled), b, d)
        assert torch.equal(d, exact_product(a, scaled, *b).bfloat16())


def test_no_rows_and_no_k() -> None:
    a, b = integer_operands(0, N, K, "cpu")
    deep_gemm.fp8_gemm_nt(a, b, output(0))
    a, b = integer_operands(M, N, 0, "cpu")
    d = output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert not d.any()


def test_an_error_leaves_the_output_alone_and_the_next_call_works(operands: tuple[Operand, Operand]) -> None:
    a, b = operands
    d = torch.full((M, N), 7.0, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError):
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 128))
    assert bool((d == 7).all())
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert torch.equal(d, exact_product(*a, *b).bfloat16())
