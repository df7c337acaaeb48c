"""The read-floor kernel, which only reads."""

from pathlib import Path

from kernel_builds import open_compiler

from deep_gemm.bench import floor
from deep_gemm.jit import Builder, sass


def test_it_reads_by_bulk_copies_and_spills_nothing(tmp_path: Path) -> None:
    binary = Builder(tmp_path, open_compiler("nvrtc")).build(floor.request("sm_90a"))
    assert (binary.resources.spill_stores, binary.resources.spill_loads, binary.resources.stack) == (0, 0, 0)
    text = sass(binary.cubin)
    assert "UBLKCP" in text
    # Loaded data is read from shared memory. Whether the sum is stored depends on the sum, so reads are not removed.
    assert "LDS" in text
    assert "STG" in text
    # It lets the next kernel start before it waits for the previous one.
    assert text.index("PREEXIT") < text.index("ACQBULK")
