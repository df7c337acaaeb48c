"""Checks that operations share: whether TMA can address a tensor, and whether tensors overlap."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import InvalidInputError
from deep_gemm.ops import checks, layouts
from deep_gemm.testing import guarded


@pytest.mark.parametrize(
    ("columns", "stride", "offset", "ready"),
    [
        (200, 200, 0, True),
        (200, 208, 0, True),
        (200, 204, 0, False),
        (200, 200, 2, False),
        (200, 200, 16, True),
        (156, 160, 0, False),  # TMA does not write rows that end inside a unit of 16 bytes
    ],
)
def test_whether_tma_can_write(columns: int, stride: int, offset: int, ready: bool) -> None:
    d = guarded((20, columns), torch.bfloat16, "cpu", (stride, 1), offset).tensor
    assert layouts.tma_writable(d) is ready


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "ready"),
    [
        ((20, 3), (1, 20), 0, True), ((20, 3), (1, 24), 0, True), ((18, 3), (1, 20), 0, True),
        ((20, 3), (1, 22), 0, False), ((20, 3), (1, 20), 8, False), ((20, 3), (1, 20), 16, True),
        ((20, 3), (3, 1), 0, False), ((20, 3), (2, 40), 0, False), ((20, 3), (1, 16), 0, False),
        ((20, 3), (1, 0), 0, False), ((20, 3), (0, 0), 0, False), ((20, 1), (1, 1), 0, True),
        ((20, 1), (3, 1), 0, False), ((1, 3), (3, 1), 0, False), ((1, 3), (77, 4), 0, True), ((1, 1), (9, 9), 0, True),
        ((0, 3), (3, 1), 0, True), ((20, 0), (1, 1), 0, True),
    ],
)  # fmt: skip
def test_whether_tma_can_read(shape: tuple[int, int], strides: tuple[int, int], offset: int, ready: bool) -> None:
    sf = guarded(shape, torch.float32, "cpu", strides, offset).tensor
    assert (layouts.scales_stride(sf) is not None) is ready


BYTES = 512
BUFFER = torch.zeros(BYTES, dtype=torch.uint8)


def addresses(x: torch.Tensor) -> set[int]:
    """The addresses of all bytes of all elements."""
    size = x.element_size()
    found = set()
    for index in itertools.product(*map(range, x.shape)):
        at = x.data_ptr() + size * sum(i * stride for i, stride in zip(index, x.stride(), strict=True))
        found.update(range(at, at + size))
    return found


@st.composite
def strided(draw: st.DrawFn, dtypes: list[torch.dtype], row_major: bool) -> torch.Tensor:
    """A two-dimensional tensor anywhere in the buffer."""
    memory = BUFFER.view(draw(st.sampled_from(dtypes)))
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    if row_major:
        stride = draw(st.integers(columns, columns + 9)), 1
    else:
        stride = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    span = max(0, (rows - 1) * stride[0]) + max(0, (columns - 1) * stride[1]) + 1
    return memory.as_strided((rows, columns), stride, draw(st.integers(0, min(30, memory.numel() - span))))


@settings(max_examples=250, deadline=None)
@given(
    strided([torch.bfloat16, torch.float32], row_major=True),
    strided([torch.uint8, torch.bfloat16, torch.float32], row_major=False),
)
def test_an_output_overlaps_an_input_where_a_byte_of_an_element_is_both(d: torch.Tensor, x: torch.Tensor) -> None:
    """Interleaved columns of one buffer do not overlap."""
    if addresses(d) & addresses(x):
        with pytest.raises(InvalidInputError, match=r"d and x share memory.*pass a d of its own"):
            checks.check_no_overlap("d", d, {"other": torch.zeros(3), "x": x})
    else:
        checks.check_no_overlap("d", d, {"other": torch.zeros(3), "x": x})


def test_looking_for_an_overlap_takes_no_time_that_is_felt() -> None:
    """Many rows with their scales beside them: the check takes one step a row, not one an element."""
    buffer = torch.zeros(20000, 256, dtype=torch.float32)
    checks.check_no_overlap("d", buffer.view(torch.bfloat16)[:, :400], {"x": buffer[:, 200:]})
