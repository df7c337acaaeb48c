"""Layers over two GPUs with NCCL beside the same layers on one, and the examples of several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import divided_cases
import parallel_cases as cases
import pytest
import spawned
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.limit(300),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there is {GPUS}" if GPUS == 1 else "needs two GPUs"),
]
BOUND = 0.01
"""Above what rounding of sums to bfloat16 costs. Both sides round to FP8 alike."""


def check(errors: cases.Errors) -> None:
    assert errors
    assert all(error < BOUND for error in errors.values()), errors


@pytest.mark.parametrize("kind", ["fp8", "stored", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
def test_tensor_parallel_layers_compute_what_one_gpu_does(kind: str, sequence: bool) -> None:
    for errors in spawned.run(cases.tensor_parallel, kind, sequence, device="cuda"):
        check(errors)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["plain", "kept", "fp8"])
def test_fsdp_trains_as_one_gpu_does(way: str, weights: Any) -> None:
    for errors, seen in spawned.run(cases.fully_sharded, way, weights, device="cuda"):
        check(errors)
        assert seen["gathered"] == ("Gathered" if way == "fp8" else "Parameter")
        assert seen["casts kept"] == 0


@pytest.mark.parametrize("chosen", ["by the router", "one rank", "no tokens"])
def test_divided_experts_compute_what_one_gpu_does(chosen: str) -> None:
    for errors in spawned.run(cases.expert_parallel, chosen, device="cuda"):
        check(errors)


@pytest.mark.parametrize("way", ["plain", "fp8"])
def test_fsdp_shards_experts(way: str) -> None:
    for errors, casts in spawned.run(cases.sharded_experts, way, device="cuda"):
        assert casts == 0
        check(errors)


def test_a_checkpoint_of_shards_loads(tmp_path: Path) -> None:
    for _, equal, in_fp8 in spawned.run(cases.checkpoint, str(tmp_path / "state"), device="cuda"):
        assert in_fp8
        assert all(equal.values()), equal


def test_products_of_dtensors_are_those_of_one_gpu() -> None:
    for errors in spawned.run(divided_cases.products, device="cuda"):
        check(errors)


@pytest.mark.parametrize("script", ["tensor_parallel.py", "fsdp.py"])
def test_examples_agree_with_one_gpu(script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, EXAMPLES / script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, nccl" in done.stdout
    print(done.stdout)
