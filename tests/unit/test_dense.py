"""The public functions on CPU tensors: what surrounds a kernel, with the reference in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, constant, dense, engine
from deep_gemm.params import GemmProblem
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


@pytest.mark.parametrize("ready", [True, False])
def test_both_tensors_of_b_must_be_constant(gpu: FakeGpu, operands: tuple[Operand, Operand], ready: bool) -> None:
    (a, sfa), (b, sfb) = operands
    if ready:
        sfa = sfa.t().contiguous().t()
    d = output()

    def call() -> bool:
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
        first, second = gpu.launched[-2:]
        assert first is second
        return first

    assert not call()
    deep_gemm.declare_constant(b)
    assert not call()
    deep_gemm.declare_constant(a, sfa, d)
    assert not call()
    deep_gemm.declare_constant(sfb)
    assert call()
    deep_gemm.retract_constant(sfb)
    assert not call()
    deep_gemm.declare_constant(sfb)
    deep_gemm.retract_constant(b)
    assert not call()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_knows_constant_weights(gpu: FakeGpu, operands: tuple[Operand, Operand], form: str) -> None:
    function, transpose_a, transpose_b = FORMS[form]
    a, b = operands
    deep_gemm.declare_constant(*b)
    function(transposed(a) if transpose_a else a, transposed(b) if transpose_b else b, output())
    assert gpu.launched == [True]


def weights_at(buffer: bytearray) -> torch.Tensor:
    """New weights at an old address."""
    return torch.frombuffer(buffer, dtype=torch.float8_e4m3fn).view(N, K)


@pytest.mark.parametrize("told", [True, False])
def test_a_warm_call_at_a_reused_address_inherits_no_promise(
    gpu: FakeGpu, operands: tuple[Operand, Operand], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm dictionary goes by addresses: it is what tells of a storage's end that keeps it true."""
    if not told:  # broken on purpose
        monkeypatch.setattr(constant, "_freed", lambda promise: None)
    (a, sfa), (_, sfb) = operands
    d = output()
    buffer = bytearray(N * K)
    b = weights_at(buffer)
    address = b.data_ptr()
    deep_gemm.declare_constant(b, sfb)
    for _ in range(3):
        deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
    assert gpu.launched == [True] * 3
    del b
    b = weights_at(buffer)
    assert b.data_ptr() == address
    deep_gemm.fp8_gemm_nt((a, sfa), (b, sfb), d)
    assert gpu.launched[3:] == [not told]


def test_a_promise_that_ends_during_a_first_call_is_not_remembered(
    gpu: FakeGpu, operands: tuple[Operand, Operand], monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, scales), b = operands
    a = x, scales.t().contiguous().t()
    d = output()
    deep_gemm.declare_constant(*b)
    launch = gpu.launch

    def interrupted(*args: Any, constant_b: bool = False) -> Callable[[], None]:
        deep_gemm.retract_constant(*b)  # as another thread might, after the call has looked
        return launch(*args, constant_b=constant_b)

    monkeypatch.setattr(dense.engine, "fp8_gemm_launch", interrupted)
    deep_gemm.fp8_gemm_nt(a, b, d)
    monkeypatch.setattr(dense.engine, "fp8_gemm_launch", launch)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert gpu.launched == [True, False]


def test_warm_calls_are_prepared_once_and_again_after_a_change(gpu: FakeGpu, operands: tuple[Operand, Operand]) -> None:
    (a, sfa), b = operands
    sfa = sfa.t().contiguous().t()
    d = output()
    for change in (lambda: None, lambda: deep_gemm.set_pdl(True), lambda: deep_gemm.declare_constant(*b)):
        change()
        before = gpu.prepared
        for _ in range(3):
            deep_gemm.fp8_gemm_nt((a, sfa), b, d)
        assert gpu.prepared == before + 1


@pytest.mark.parametrize(("ready", "launches"), [(True, ["gemm"]), (False, ["transpose", "gemm"])])
def test_a_warm_call_launches_one_kernel_more_where_scales_must_be_transposed(
    gpu: FakeGpu,
    operands: tuple[Operand, Operand],
    monkeypatch: pytest.MonkeyPatch,
    ready: bool,
    launches: list[str],
) -> None:
    """And nothing else, neither the first time nor later."""
    launched: list[str] = []

    def noted(name: str) -> Callable[..., Callable[..., None]]:
        return lambda *args, **kwargs: lambda *addresses: launched.append(name)

    # Whichever way a call is made ready: for its own addresses, or for any.
    for kind, name in (("transpose", "transpose"), ("fp8_gemm", "gemm")):
        monkeypatch.setattr(dense.engine, f"{kind}_launch", noted(name))
        monkeypatch.setattr(dense.engine, f"{kind}_moving", noted(name))
    (a, sfa), b = operands
    if ready:
        sfa = sfa.t().contiguous().t()
    d = output()
    for _ in range(4):
        launched.clear()
        deep_gemm.fp8_gemm_nt((a, sfa), b, d)
        assert launched == launches
    assert dense._warm


def test_dependent_launch_is_on_at_first() -> None:
    assert deep_gemm.get_pdl() is True
    deep_gemm.set_pdl(False)
    assert deep_gemm.get_pdl() is False
    deep_gemm.set_pdl(True)
    with pytest.raises(InvalidInputError, match="enabled must be True or False"):
        deep_gemm.set_pdl(1)  # type: ignore[arg-type]


def test_part_of_a_gpu_has_no_dependent_launches() -> None:
    """A kernel that waits for its predecessor would hold SMs that set_num_sms leaves to others."""
    whole = GemmProblem(m=1, n=128, k=128, num_sms=132)
    assert engine.dependent_launch(whole)
    assert not engine.dependent_launch(replace(whole, num_sms=66, whole_gpu=False))
    deep_gemm.set_pdl(False)
    try:
        assert not engine.dependent_launch(whole)
    finally:
        deep_gemm.set_pdl(True)
