"""What `tests/sanitize.py` changes in device headers must still be there to be changed."""

from __future__ import annotations

from pathlib import Path

import sanitize

from deep_gemm.jit.generator import include_dir


def test_each_lane_arrives_in_headers_for_racecheck(tmp_path: Path) -> None:
    folder = sanitize.lane_by_lane(tmp_path / "include")
    differ = [
        path.name for path in sorted(folder.iterdir()) if path.read_text() != (include_dir() / path.name).read_text()
    ]
    assert differ == ["reduction.cuh"]
    text = (folder / "reduction.cuh").read_text()
    assert "kLocal ? (kShares - 1) * 128 : 1" in text
    assert "if (thread % 32 == 0) barrier_arrive(barrier);" not in text
