"""Headers for racecheck (see `tests/racecheck_headers.py`) suit the kernels: without a GPU, nobody else would tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import sanitize
from kernel_builds import open_compiler
from racecheck_headers import RACES, Race, racecheck_headers

from deep_gemm import engine
from deep_gemm.jit import Builder


@pytest.mark.parametrize(
    "name", ["swapped_8x64_s22_p2_k2x2_direct", "128x64_s8_p2_k2x1_tma", "128x128_s5_p2_c1x2_direct"]
)
def test_kernels_compile_with_headers_for_racecheck(tmp_path: Path, name: str) -> None:
    compiles(racecheck_headers(tmp_path / "include"), name, tmp_path / "cache")


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_kernels_compile_with_a_race_in_them(tmp_path: Path, race: Race) -> None:
    compiles(race.put_into(racecheck_headers(tmp_path / "include")), race.kernel, tmp_path / "cache")


def compiles(include: Path, name: str, cache: Path) -> None:
    (params,) = sanitize.named(sanitize.chosen(0), name)
    binary = Builder(cache, open_compiler("nvrtc"), include).build(engine.build_request(params))
    assert binary.name.endswith(name)
    assert binary.resources.spill_stores == 0
