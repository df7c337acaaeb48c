"""What `tests/sanitize.py` runs, and what it changes in device headers, which must still be there to be changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sanitize
from cover import FAMILIES

from deep_gemm.arch import SM90
from deep_gemm.jit.generator import include_dir
from deep_gemm.params import FP8Config


def test_lanes_arrive_for_themselves_in_headers_for_racecheck(tmp_path: Path) -> None:
    folder = sanitize.lane_by_lane(tmp_path / "include")
    differ = {
        path.name: path.read_text()
        for path in sorted(folder.iterdir())
        if path.read_text() != (include_dir() / path.name).read_text()
    }
    assert set(differ) == {"pipeline.cuh", "reduction.cuh"}
    assert "kLocal ? (kShares - 1) * 128 : 1" in differ["reduction.cuh"]
    assert "if (thread % 32 == 0)" not in differ["reduction.cuh"]
    assert "barrier_init(empty(consumer), (to > 0 ? to : 1) * 128)" in differ["reduction.cuh"]
    assert "if (thread < kShares" not in differ["reduction.cuh"]
    assert not re.search(r"\bthread [%/] kConsumersK", differ["reduction.cuh"])  # whom a lane arrives for
    assert "if (lane == 0)" not in differ["pipeline.cuh"]
    # As many are waited for as arrive, or a kernel hangs.
    assert "kConsumerWarps * (kClusterSize == 1 ? 32 : +kClusterSize));" in differ["pipeline.cuh"]


@pytest.mark.parametrize("racecheck", [False, True], ids=["memcheck", "racecheck"])
def test_every_way_to_share_a_tile_is_run(racecheck: bool) -> None:
    """By CTAs along m, n and k, and by consumers along K, all four together: sums go other ways where CTAs alone share
    K, where consumers alone do, and where both do."""
    found = {sanitize._config(params) for params in sanitize.chosen(0, racecheck)}
    for kernel in FAMILIES:
        every = list(kernel.configs(SM90))
        assert {split(config) for config in found.intersection(every)} == {split(config) for config in every}


def test_kernels_can_be_named() -> None:
    (found,) = sanitize.named(sanitize.chosen(0, racecheck=True), "64x96_s8_p2_k1x2_direct")
    assert split(sanitize._config(found)) == (1, 1, 1, 2)
    assert found.store == "direct"


def split(config: FP8Config) -> tuple[int, int, int, int]:
    return config.cluster_m, config.cluster_n, config.cluster_k, config.consumers_k
