"""The kernel that reads and does nothing else."""

from __future__ import annotations

from pathlib import Path

from kernel_builds import open_compiler

from deep_gemm.benchmarks import floor
from deep_gemm.jit import Builder, sass


def test_it_reads_by_bulk_copies_and_spills_nothing(tmp_path: Path) -> None:
    binary = Builder(tmp_path, open_compiler("nvrtc")).build(floor.request("sm_90a"))
    assert (binary.resources.spill_stores, binary.resources.spill_loads, binary.resources.stack) == (0, 0, 0)
    text = sass(binary.cubin)
    assert "UBLKCP" in text
    # What arrives is read, and whether the sum is stored only the sum tells.
    assert "LDS" in text
    assert "STG" in text
    # It lets its successor start before it waits for its predecessor.
    assert text.index("PREEXIT") < text.index("ACQBULK")
