"""Mixtures of experts over several ranks on one GPU, where a rank is a stream with a part of the SMs, and over GPUs."""

import random
import re
from pathlib import Path

import pytest
import spawned
import torch
from gpu_cases import DEVICE
from headers import edited_headers
from rank_cases import CASES, IMPATIENT, Layer, compare, over_gpus, without_the_other

pytestmark = [pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU"), pytest.mark.limit(300)]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, experts, top_k, counts, late, hot = CASES[name]
    layer = Layer(monkeypatch, ranks, experts, top_k)
    for seed in range(4):
        compare(layer, counts[seed % ranks :] + counts[: seed % ranks], seed, late, hot)


def test_counts_change_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random rank is late in each."""
    rng, layer = random.Random(1), Layer(monkeypatch, 4, 16, 4)
    for seed in range(50):
        counts = tuple(rng.choice((0, 1, rng.randint(1, 100))) for _ in range(4))
        compare(layer, (*counts[:3], max(1, counts[3])), seed, {rng.randrange(4): 0.002})


def test_a_wait_traps_in_the_end(tmp_path: Path) -> None:
    """In a process of its own, whose context is of no use then."""
    file, old, new = IMPATIENT
    headers = edited_headers(tmp_path / "include", file, (old, new))
    (said,) = spawned.run(without_the_other, headers, size=1, device="cuda")
    assert re.search("launch.fail", said, re.IGNORECASE), said


@pytest.mark.parametrize("size", [2, 4, 8])
def test_gpus_compute_what_one_does(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for found in spawned.run(over_gpus, 1000, size=size, device="cuda", late=(None, 1)):
        assert len(found) == 1000
        assert all(found)
