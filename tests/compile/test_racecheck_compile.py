"""Kernels compile with the headers for racecheck (see `tests/racecheck_headers.py`). Other tests of them need a GPU."""

from __future__ import annotations

from pathlib import Path

import logit_runs
import pytest
import sanitize
from chosen import entry
from kernel_builds import open_compiler
from racecheck_headers import RACES, Race, racecheck_headers

from deep_gemm.jit import Builder
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    [
        *("swapped_8x64_s24_p2_k1x2_direct", "64x64_s13_p2_k4x1_direct", "128x192_s4_p1_c2x1_tma"),
        *(entry(params) for params in logit_runs.RUNS),
    ],
)
def test_kernels_compile_with_headers_for_racecheck(tmp_path: Path, name: str) -> None:
    compiles(racecheck_headers(tmp_path / "include"), name, tmp_path / "cache")


@pytest.mark.parametrize("race", RACES.values(), ids=list(RACES))
def test_kernels_compile_with_a_race_in_them(tmp_path: Path, race: Race) -> None:
    compiles(race.put_into(racecheck_headers(tmp_path / "include")), race.kernel, tmp_path / "cache")


def compiles(include: Path, name: str, cache: Path) -> None:
    (params,) = sanitize.named(sanitize.everyone(1), name)
    binary = Builder(cache, open_compiler("nvrtc"), include).build(engine.build_request(params))
    assert binary.name.endswith(name)
    assert binary.resources.spill_stores == 0
