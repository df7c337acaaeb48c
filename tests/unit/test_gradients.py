"""Where gradients end: an operand that was computed with gradients is told of once a process, a leaf never."""

from __future__ import annotations

import logging

import pytest
import torch
from call_kinds import BF16, KINDS
from gpu_fakes import FakeGpu
from public_calls import CALLS

import deep_gemm
from deep_gemm import InvalidInputError, log

OURS = [
    name
    for name, made in CALLS.items()
    if not (made.by_torch or name.startswith(("testing.", "tensor_map", "get_paged")))
]


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    log.reset_warnings()
    caplog.set_level(logging.WARNING, "deep_gemm")
    return caplog


@pytest.mark.parametrize("name", OURS)
def test_an_operand_that_was_computed_with_gradients_is_told_of_once(name: str, told: pytest.LogCaptureFixture) -> None:
    made, seen = CALLS[name], 0
    for operand in made.tensors():
        tensors = made.tensors()
        if not tensors[operand].is_floating_point():
            continue
        log.reset_warnings()
        told.clear()
        leaf = tensors[operand].detach().requires_grad_()
        try:
            made.call(tensors | {operand: leaf})
        except InvalidInputError as error:
            assert "requires grad" in str(error)  # noqa: PT017 an output
            continue
        with torch.no_grad():
            made.call(tensors | {operand: leaf.view_as(leaf)})
        assert not told.records
        computed = tensors | {operand: leaf.view_as(leaf)}
        for _ in range(2):
            made.call(computed)
        (record,) = told.records
        assert "was computed with gradients" in record.getMessage()
        assert "torch.autograd.Function" in record.getMessage()
        seen += 1
    assert seen


def test_the_lost_part_of_a_sum_is_told_of(told: pytest.LogCaptureFixture) -> None:
    x, p = torch.ones(16, 64, dtype=BF16, requires_grad=True), torch.ones(64, 64, dtype=BF16)
    w, d = torch.ones(32, 64, dtype=BF16, requires_grad=True), torch.zeros(16, 32, dtype=BF16)
    deep_gemm.bf16_gemm_nt(x, w, d)
    assert not told.records
    deep_gemm.bf16_gemm_nt(x @ p, w, d)
    (record,) = told.records
    assert "bf16_gemm_nt: a was computed with gradients (MmBackward0)" in record.getMessage()
    (x.sum() + d.sum()).backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all()), "the product has no part in it"


@pytest.mark.parametrize("name", ["bf16", "fp8", "index bf16", "k bf16", "rows"])
def test_a_call_that_was_warmed_without_gradients_is_told_of(
    gpu: FakeGpu, name: str, told: pytest.LogCaptureFixture
) -> None:
    """An evaluation comes before training, with the same sizes and addresses."""
    kind = KINDS[name]
    tensors = kind.tensors()
    inputs = [each for each in tensors if each not in kind.written]
    operand = next(each for each in inputs if tensors[each].dtype in (BF16, torch.float32))
    source = tensors[operand].requires_grad_()
    tensors[operand] = source.view_as(source)
    with torch.no_grad():
        for _ in range(3):
            kind(tensors)
    assert not told.records
    kind(tensors)
    assert len(told.records) == 1
    kind(tensors)
    before = gpu.prepared
    for _ in range(2):  # both are remembered
        kind(tensors)
        with torch.no_grad():
            kind(tensors)
    assert gpu.prepared == before
