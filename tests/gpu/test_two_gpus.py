"""Layers over two GPUs with NCCL beside the same layers on one, the examples of several ranks, and two GPUs with one
cache. Layers are run three times: once as they are, and once with each of two ranks late."""

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
LATE = (None, 0, 1)
BOUND = 0.01
"""Above what rounding of sums to bfloat16 costs. Both sides round to FP8 alike."""


def check(errors: cases.Errors) -> None:
    assert errors
    assert all(error < BOUND for error in errors.values()), errors


@pytest.mark.parametrize("kind", ["fp8", "stored", "bf16"])
@pytest.mark.parametrize("sequence", [False, True], ids=["replicated", "sequence"])
def test_tensor_parallel_layers_compute_what_one_gpu_does(kind: str, sequence: bool) -> None:
    for errors in spawned.run(cases.tensor_parallel, kind, sequence, device="cuda", late=LATE):
        check(errors)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["plain", "kept", "fp8"])
def test_fsdp_trains_as_one_gpu_does(way: str, weights: Any) -> None:
    for errors, seen in spawned.run(cases.fully_sharded, way, weights, device="cuda", late=LATE):
        check(errors)
        assert seen["gathered"] == ("Gathered" if way == "fp8" else "Parameter")
        assert seen["casts kept"] == 0


@pytest.mark.parametrize("chosen", ["by the router", "one rank", "no tokens", "some are dropped"])
def test_divided_experts_compute_what_one_gpu_does(chosen: str) -> None:
    for errors in spawned.run(cases.expert_parallel, chosen, device="cuda", late=LATE):
        check(errors)


@pytest.mark.parametrize("way", ["plain", "fp8"])
def test_fsdp_shards_experts(way: str) -> None:
    for errors, casts in spawned.run(cases.sharded_experts, way, device="cuda", late=LATE):
        assert casts == 0
        check(errors)


def test_a_checkpoint_of_shards_loads(tmp_path: Path) -> None:
    for _, equal, in_fp8 in spawned.run(cases.checkpoint, str(tmp_path / "state"), device="cuda", late=LATE):
        assert in_fp8
        assert all(equal.values()), equal


def test_products_of_dtensors_are_those_of_one_gpu() -> None:
    for errors in spawned.run(divided_cases.products, device="cuda", late=LATE):
        check(errors)


def test_a_compiled_tensor_parallel_model_computes_the_same() -> None:
    for errors in spawned.run(cases.compiled, device="cuda", late=LATE):
        check(errors)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_tensor_parallel_layers_are_sharded_by_fsdp_too() -> None:
    for errors in spawned.run(cases.both_ways, size=4, device="cuda", late=LATE):
        check(errors)


def test_ranks_share_the_kernels_that_they_compile_ahead(tmp_path: Path) -> None:
    ranks = spawned.run(cases.precompiled, str(tmp_path), device="cuda")
    count = ranks[0]["kernels"]
    assert count >= 2
    for found in ranks:
        assert found["kernels"] == found["compiled"] + found["adopted"] == count
        assert found["failed"] == 0
    assert sum(found["compiled"] for found in ranks) == count


def test_two_gpus_of_one_process(tmp_path: Path) -> None:
    (found,) = spawned.run(cases.one_process, str(tmp_path), [0, 1], size=1, device="cuda")
    assert found == {"compiled 0": found["compiled 0"], "compiled 1": 0, "measured 0": 1, "measured 1": 0}
    assert found["compiled 0"] >= 1


def test_two_processes_with_a_gpu_each_share_a_cache(tmp_path: Path) -> None:
    for rank, found in enumerate(spawned.run(cases.one_gpu, str(tmp_path), device="cuda")):
        assert found[f"measured {rank}"] <= 1
    (found,) = spawned.run(cases.one_process, str(tmp_path), [1, 0], size=1, device="cuda")
    assert not any(found.values()), found


@pytest.mark.parametrize("script", ["tensor_parallel.py", "fsdp.py"])
def test_examples_agree_with_one_gpu(script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, EXAMPLES / script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, nccl" in done.stdout
    print(done.stdout)
