"""The machine code of products of MXFP4 weights: their instructions, and main loops as short as the measured ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_builds import Builds, builds_of, each_of, main_loop

from deep_gemm.kernels.sm90_fp4_gemm import FP4, stream
from deep_gemm.params import KernelParams

PRODUCTS = {"e4m3": "QGMMA.64x24x32.F32.E5M2.E4M3", "bf16": "HGMMA.64x24x16.F32.BF16"}
LONGEST = {"e4m3": 262, "bf16": 345}
"""Instructions for two blocks of 24 tokens. Each instruction takes time: see docs/measurements/mxfp4.md."""


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, kernels_root: Path) -> Iterator[Builds]:
    with builds_of(kernels_root, request) as found:
        yield found


CASES = [params for params in FP4.cases() if params.config == stream(24)]


@each_of(CASES, {"nvrtc": CASES, "nvcc": []})
def test_weights_are_multiplied_as_they_are_decoded(builds: Builds, kind: str, params: KernelParams) -> None:
    text = builds(kind, params).sass
    assert set(re.findall(r"\b[QH]GMMA\.\S+", text)) == {PRODUCTS[params.dtype]}
    assert len(main_loop(text)) <= LONGEST[params.dtype]
