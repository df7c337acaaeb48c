"""The kernels of `tests/sanitize.py`, and its edits of device headers, which must still apply."""

from __future__ import annotations

from pathlib import Path

import pytest
import sanitize
from racecheck_headers import RACES, Race, racecheck_headers

from deep_gemm.jit.generator import include_dir


def test_headers_for_racecheck(tmp_path: Path) -> None:
    assert changed(racecheck_headers(tmp_path / "include"), include_dir()) == {"pipeline.cuh", "split_k_exchange.cuh"}


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_a_race_is_in_one_header_and_a_kernel_shows_it(tmp_path: Path, race: Race) -> None:
    sound = racecheck_headers(tmp_path / "sound")
    assert changed(race.put_into(racecheck_headers(tmp_path / "racy")), sound) == {race.file}
    assert len(sanitize.named(sanitize.chosen(1), race.kernel)) == 1


def test_kernels_can_be_named() -> None:
    (found,) = sanitize.named(sanitize.chosen(1), "64x64_s13_p2_k4x1_direct")
    assert (found.config.tile, found.gemm.cluster_k, found.store) == ((64, 64), 4, "direct")


def changed(folder: Path, base: Path) -> set[str]:
    """The headers in ``folder`` that differ from those in ``base``."""
    return {path.name for path in folder.iterdir() if path.read_text() != (base / path.name).read_text()}
