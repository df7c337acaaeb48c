"""Kernels with headers for racecheck compile, and those with late loaders. Other tests of them need a GPU."""

from pathlib import Path

import logit_runs
import pytest
import sanitize
from chosen import kernel_name
from forced import compiled, nvrtc
from kernel_builds import open_compiler
from late_loaders import KERNELS, late_headers
from racecheck_headers import RACES, Race, racecheck_headers

from deep_gemm.jit import Builder
from deep_gemm.runtime import engine

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    [
        *("swapped_8x64_s24_p2_k1x2_direct", "64x64_s13_p2_k4x1_direct", "128x192_s4_p1_c2x1_tma"),
        *(kernel_name(params) for params in logit_runs.RUNS),
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


def test_kernels_with_late_loaders_compile(tmp_path: Path) -> None:
    builder = Builder(tmp_path / "cache", nvrtc(), late_headers(tmp_path / "include"))
    with compiled((name, builder, params) for name, params in KERNELS.items()) as binaries:
        for name, binary in binaries.items():
            assert binary.result().cubin, name
