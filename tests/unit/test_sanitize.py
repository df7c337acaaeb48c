"""What `tests/sanitize.py` runs, and what of device headers is changed for it: that must still be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sanitize
from cover import FAMILIES, everything
from racecheck_headers import RACES, Race, racecheck_headers

from deep_gemm.arch import SM90
from deep_gemm.jit.generator import include_dir
from deep_gemm.params import FP8Config


def test_headers_for_racecheck(tmp_path: Path) -> None:
    differ = changed(racecheck_headers(tmp_path / "include"), include_dir())
    assert set(differ) == {"pipeline.cuh", "reduction.cuh"}
    # Lanes arrive for themselves,
    assert "if (thread % 32 == 0)" not in differ["reduction.cuh"]
    assert "if (thread < kShares" not in differ["reduction.cuh"]
    assert not re.search(r"\bthread [%/] kConsumersK", differ["reduction.cuh"])  # whom a lane arrives for
    assert "if (lane == 0)" not in differ["pipeline.cuh"]
    # and as many are waited for as arrive, or a kernel hangs.
    assert "kLocal ? (kShares - 1) * 128 : 1" in differ["reduction.cuh"]
    assert "barrier_init(empty(consumer), (to > 0 ? to : 1) * 128)" in differ["reduction.cuh"]
    assert "if (other == share) continue;" in differ["reduction.cuh"]  # as `to` leaves out the share itself
    assert "kConsumerWarps * (kClusterSize == 1 ? 32 : +kClusterSize));" in differ["pipeline.cuh"]


def test_sums_come_through_no_ring_that_a_cluster_fills() -> None:
    """There one lane arrives for a warp in those headers too."""
    for params in everything():
        config = sanitize._config(params)
        assert not config.stream_k or config.cluster_size == 1


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_a_race_is_in_one_header_and_a_kernel_shows_it(tmp_path: Path, race: Race) -> None:
    sound = racecheck_headers(tmp_path / "sound")
    assert set(changed(race.put_into(racecheck_headers(tmp_path / "racy")), sound)) == {race.file}
    assert len(sanitize.named(sanitize.chosen(0), race.kernel)) == 1


def test_every_way_to_share_a_tile_is_run() -> None:
    """By CTAs along m, n and k, and by consumers along K, all four together: sums go other ways where CTAs alone share
    K, where consumers alone do, and where both do."""
    found = {sanitize._config(params) for params in sanitize.chosen(0)}
    for kernel in FAMILIES:
        every = list(kernel.configs(SM90))
        assert {split(config) for config in found.intersection(every)} == {split(config) for config in every}


def test_kernels_can_be_named() -> None:
    (found,) = sanitize.named(sanitize.chosen(0), "64x96_s8_p2_k1x2_direct")
    assert split(sanitize._config(found)) == (1, 1, 1, 2)
    assert found.store == "direct"


def changed(folder: Path, base: Path) -> dict[str, str]:
    """The headers in ``folder`` that differ from those in ``base``."""
    texts = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    return {name: text for name, text in texts.items() if text != (base / name).read_text()}


def split(config: FP8Config) -> tuple[int, int, int, int]:
    return config.cluster_m, config.cluster_n, config.cluster_k, config.consumers_k
