"""Headers for racecheck (see `tests/sanitize.py`) suit the kernels: without a GPU, nobody else would tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import sanitize
from kernel_builds import open_compiler

from deep_gemm import engine
from deep_gemm.jit import Builder


@pytest.mark.parametrize(
    "name", ["64x96_s8_p2_k1x2_direct", "64x64_s12_p2_k2x2_tma", "64x128_s8_p2_stream_tma", "128x112_s6_p2_c1x2_tma"]
)
def test_kernels_compile_with_lanes_that_arrive_for_themselves(tmp_path: Path, name: str) -> None:
    builder = Builder(tmp_path / "cache", open_compiler("nvrtc"), sanitize.lane_by_lane(tmp_path / "include"))
    (params,) = sanitize.named(sanitize.chosen(0, racecheck=True), name)
    binary = builder.build(engine.build_request(params))
    assert binary.name.endswith(name)
    assert binary.resources.spill_stores == 0
