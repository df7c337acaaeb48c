"""Operators of torch whose operands are DTensors, over two ranks with gloo."""

from __future__ import annotations

import subprocess
import sys

import divided_cases as cases
import pytest
import spawned

pytestmark = pytest.mark.limit(100)


def test_divided_products_are_those_of_one_process() -> None:
    for found in spawned.run(cases.products):
        assert len(found) == sum(len(make()[1]) for make in cases.CASES)
        assert all(error < 0.01 for error in found.values()), found


def test_other_placements_are_refused() -> None:
    given = "a Replicate(), b Shard(0), d Replicate()"
    ways = (
        "a Replicate(), b Replicate(), d Replicate(); a Shard(0), b Replicate(), d Shard(0); "
        "a Shard(1), b Shard(1), d Partial(); a Replicate(), b Shard(0), d Shard(1)"
    )
    gate = "a Replicate(), b Shard(0), d Shard(1)"
    gates = "a Replicate(), b Replicate(), d Replicate(); a Shard(0), b Replicate(), d Shard(0)"
    block = "b[0].shape[0] of a shard must be a multiple of 128, the size of a block of scales, but it is 384 / 2 = 192"
    for said in spawned.run(cases.refusals):
        assert said == [
            f"Operands of bf16_gemm_nt cannot be divided so: {given}. Redistribute them to one of: {ways}.",
            "b must be a DTensor, as other operands are. Call DTensor.from_local first.",
            f"{block}. Legal numbers of ranks are 1, 3.",
            f"Operands of bf16_gemm_nt_epilogue cannot be divided so: {gate}. Redistribute them to one of: {gates}.",
            "tf32_hc_prenorm_gemm has no rule for DTensors. Call it with local tensors.",
        ]


WITHOUT = {
    *("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "tf32_hc_prenorm_gemm"),
    *("fp8_linear", "fp8_linear_backward", "k_grouped_fp8_gemm_contiguous"),
    *(f"{kind}_fp4_gemm" for kind in ("fp8", "bf16")),  # transformed weights have no axis of N or K
    *(f"m_grouped_{kind}_fp4_gemm_{form}" for kind in ("fp8", "bf16") for form in ("contiguous", "masked")),
}
"""Operators without a rule."""


def test_each_operator_has_a_rule_or_says_that_it_has_none() -> None:
    (found,) = spawned.run(cases.every_operator, size=1)
    index = "quantize plain has no rule for rows as a DTensor. Call it with local tensors."
    assert found.pop("quantize_plain") == index
    assert {name for name, said in found.items() if said} == WITHOUT
    for name in WITHOUT:
        assert found[name].endswith(" has no rule for DTensors. Call it with local tensors."), found[name]


def test_neither_import_nor_calls_load_dtensors() -> None:
    code = (
        "import sys, torch, deep_gemm; x = torch.ones(16, 16).bfloat16(); deep_gemm.bf16_gemm_nt(x, x, x.clone());"
        "deep_gemm.register_operators(); deep_gemm.nn.FP8Linear(16, 16)(x);"
        "print('torch.distributed.tensor' in sys.modules, 'deep_gemm.nn.parallel' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
    assert done.stdout.split() == ["False", "False"]
