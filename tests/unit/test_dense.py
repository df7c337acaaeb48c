"""The public functions on CPU tensors, where the reference takes the kernel's place."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, ops
from deep_gemm.ops.reference import exact_product
from deep_gemm.runtime import engine
from deep_gemm.settings import settings
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


@pytest.mark.parametrize("form", FORMS)
def test_every_form_names_its_arguments(form: str) -> None:
    """In DeepGEMM's order, so that callers may pass them by position, and help() shows them."""
    parameters = inspect.signature(FORMS[form][0]).parameters.values()
    names = ["a", "b", "d", "c", "recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast"]
    later = ["epilogue", "alpha"]
    assert [parameter.name for parameter in parameters] == names + later
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [parameter.name for parameter in parameters if parameter.kind is positional] == names
    assert [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty] == names[:3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keyword", ["epilogue", "alpha"])
def test_keywords_of_later_versions_must_be_none(operands: tuple[Operand, Operand], form: str, keyword: str) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = (transposed(x) if flip else x for x, flip in zip(operands, (transpose_a, transpose_b), strict=True))
    function(a, b, output(), epilogue=None, alpha=None)
    with pytest.raises(UnsupportedError, match=f"{keyword} must be None"):
        function(a, b, output(), **{keyword: 1.0})


@pytest.mark.parametrize("form", ["nn", "tn", "tt"])
def test_values_whose_k_is_not_contiguous_give_the_same_or_are_refused(
    operands: tuple[Operand, Operand], form: str
) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = operands
    d, wanted = output(), output()
    deep_gemm.fp8_gemm_nt(a, b, wanted)
    k_outer = [(x[0].t().contiguous(), x[1].t()) if flip else x for x, flip in ((a, transpose_a), (b, transpose_b))]
    function(*k_outer, d)
    assert torch.equal(d, wanted)
    with (
        settings.override(forbid_transpose=True),
        pytest.raises(UnsupportedError, match=r"[ab] .* K is not contiguous.*DG_FORBID_TRANSPOSE=1"),
    ):
        function(*k_outer, d)


@pytest.mark.parametrize("form", FORMS)
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


def test_repeated_calls_see_new_data(operands: tuple[Operand, Operand]) -> None:
    (a, sfa), b = operands
    d = output()
    for factor in (1.0, 2.0, 0.5):
        scaled = sfa * factor
        deep_gemm.fp8_gemm_nt((a, scaled), b, d)
        assert torch.equal(d, exact_product(a, scaled, *b).bfloat16())


def test_an_error_leaves_the_output_alone_and_the_next_call_works(operands: tuple[Operand, Operand]) -> None:
    a, b = operands
    d = torch.full((M, N), 7.0, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError):
        deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 1, 32))
    assert bool((d == 7).all())
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert torch.equal(d, exact_product(*a, *b).bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_knows_constant_weights(gpu: FakeGpu, operands: tuple[Operand, Operand], form: str) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = operands
    deep_gemm.declare_constant(*b)
    function(transposed(a) if transpose_a else a, transposed(b) if transpose_b else b, output())
    assert gpu.constants == [True]


def test_weights_of_a_module_are_multiplied_inside_of_an_autograd_function(operands: tuple[Operand, Operand]) -> None:
    """torch calls forward without grad mode, and the code around it with grad mode."""
    a, (b, sfb) = operands
    weights = torch.nn.Parameter(b), torch.nn.Parameter(sfb)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            d = output()
            deep_gemm.fp8_gemm_nt((x, a[1]), (w, scales), d)
            return d

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
            return None, None, None

    d = output()
    deep_gemm.fp8_gemm_nt(a, weights, d)
    assert d.grad_fn is None
    expected = exact_product(*a, b, sfb).bfloat16()
    assert torch.equal(d, expected)
    assert torch.equal(Linear.apply(a[0], *weights), expected)  # type: ignore[no-untyped-call]


def test_dependent_launch_is_on_at_first_and_never_on_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for its predecessor would hold SMs that set_num_sms leaves to others."""
    asked: list[bool] = []

    def launched(strides: Any, pdl: bool, constant: bool) -> Any:
        asked.append(pdl)
        return SimpleNamespace(shape=None, parameters=())

    monkeypatch.setattr(engine, "primary_context", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(engine, "Launch", lambda *args: None)

    def launch(whole_gpu: bool) -> bool:
        spec = ops.spec(1, 128, 128, 132, whole_gpu=whole_gpu)
        plan: Any = SimpleNamespace(launch=launched, spec=spec, device=0, function=None)
        engine.launch(plan, {}, {}, 0)
        return asked[-1]

    assert deep_gemm.get_pdl() is True
    assert launch(whole_gpu=True)
    assert not launch(whole_gpu=False)
    try:
        deep_gemm.set_pdl(False)
        assert deep_gemm.get_pdl() is False
        assert not launch(whole_gpu=True)
    finally:
        deep_gemm.set_pdl(True)
    with pytest.raises(InvalidInputError, match="enabled must be True or False"):
        deep_gemm.set_pdl(1)  # type: ignore[arg-type]
