"""Layers of `deep_gemm.nn` over two ranks with gloo: tensor parallelism, FSDP2 and expert parallelism."""

from __future__ import annotations

from typing import Any

import parallel_cases as cases
import pytest
import spawned
import torch

pytestmark = pytest.mark.limit(100)


@pytest.mark.parametrize("kind", ["fp8", "stored", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
def test_tensor_parallel_layers_compute_what_one_process_does(kind: str, sequence: bool) -> None:
    for errors in spawned.run(cases.tensor_parallel, kind, sequence):
        assert len(errors) == (4 if kind == "stored" else 6)
        assert all(error < 0.01 for error in errors.values()), errors


def test_one_rank_computes_the_same_bits() -> None:
    (errors,) = spawned.run(cases.tensor_parallel, "fp8", False, size=1)
    assert not any(errors.values()), errors


def test_what_cannot_be_divided_is_said() -> None:
    for said in spawned.run(cases.tensor_parallel_refusals):
        assert said == [
            "out_features of a shard must be a multiple of 128, the size of a block of scales, but it is 1152 / 2 = 576. "
            "Legal numbers of ranks are 1, 3, 9.",
            "in_features of a shard must be a multiple of 128, the size of a block of scales, but it is 144 / 2 = 72. "
            "Legal numbers of ranks are 1.",
            "out_features of a shard must be a whole number, but it is 9 / 2. Legal numbers of ranks are 1, 3, 9.",
            "The number of experts of a shard must be a whole number, but it is 3 / 2. Legal numbers of ranks are 1, 3.",
            "ExpertParallel divides a deep_gemm.nn.MoE, but it got of type ReLU.",
            "weight of the layer is a DTensor already: divide it once.",
        ]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["plain", "kept", "fp8"])
def test_fsdp_trains_as_one_process_does(way: str, weights: Any) -> None:
    for errors, seen in spawned.run(cases.fully_sharded, way, weights):
        assert seen["local rows"] == cases.HIDDEN // 2
        assert seen.get("converted", ("up", "down")) == ("up", "down")
        assert seen["gathered"] == ("Gathered" if way == "fp8" else "Parameter")
        assert seen["casts kept"] == 0, "backward would find whole weights of all layers in memory"
        assert all(error < (1e-5 if weights == torch.float32 else 0.01) for error in errors.values()), errors
        assert errors["y 0"] == errors["x 0"] == 0


@pytest.mark.parametrize("chosen", ["by the router", "one rank", "no tokens"])
def test_divided_experts_have_the_bits_of_one_process(chosen: str) -> None:
    for errors in spawned.run(cases.expert_parallel, chosen):
        assert errors.pop("router.weight") < 1e-5
        assert len(errors) == 5
        assert not any(errors.values()), errors


def test_tensor_parallel_layers_are_sharded_by_fsdp_too() -> None:
    for errors in spawned.run(cases.both_ways, size=4):
        assert len(errors) == 6
        assert all(error < 0.01 for error in errors.values()), errors
