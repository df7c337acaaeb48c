"""What is counted when casts are timed."""

from __future__ import annotations

import casts
import pytest
import torch


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("rows", 256 * 384 + 4 * 256 * 3),
        ("columns", 256 * 384 + 4 * 384 * 2),
        ("blocks", 256 * 384 + 4 * 2 * 3),
        ("blocks transposed", 256 * 384 + 4 * 2 * 3),
        ("rows and columns", 2 * 256 * 384 + 4 * (256 * 3 + 384 * 2)),
        ("blocks and transpose", 2 * (256 * 384 + 4 * 2 * 3)),
    ],
)
def test_the_bytes_of_a_cast_are_its_input_and_its_outputs(name: str, written: int) -> None:
    x = torch.randn(256, 384).bfloat16()
    assert casts.moved(x, casts.CASTS[name](x)) == 2 * 256 * 384 + written
