"""Triton's kernels, run in its interpreter: every config's tile gives the right product, edges included."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deep_gemm import backends
from deep_gemm.errors import DeepGemmError

if why := backends.absent().get("triton"):  # asked so, since an import would choose against the interpreter
    pytest.skip(why, allow_module_level=True)
CPU = torch.device("cpu")
WHY_NOT = backends.get_backend("triton").why_not(CPU)
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


def of_allowed(op: str, dims: tuple[int, ...]) -> float:
    """The largest error of Triton's kernel as a fraction of what is allowed."""
    operation = backends.get_operation(op)
    operands = operation.make(dims, CPU, seed=3)
    output = operation.output(operands)
    output.fill_(float("nan"))
    backends.get_kernel("triton", op)(*operands)
    exact = operation.exact(*operands)
    return float(((output.double() - exact).abs() / operation.allowed(exact, *operands)).nan_to_num(torch.inf).max())


@pytest.mark.parametrize(
    ("op", "dims"),
    [
        ("bf16_gemm_nt", (70, 72, 136)),
        ("fp16_gemm_nt", (1, 200, 64)),
        ("fp8_gemm_nt", (70, 136, 272)),
        ("fp8_gemm_nt", (1, 200, 16)),
    ],
)
def test_the_kernels_are_right(op: str, dims: tuple[int, ...]) -> None:
    assert of_allowed(op, dims) <= 1


def tiles() -> Iterator[tuple[str, tuple[int, int, int]]]:
    from deep_gemm.backends import triton_gemm

    yield from (("bf16_gemm_nt", tile) for tile in triton_gemm.HALF_TILES)
    yield from (("fp8_gemm_nt", tile) for tile in triton_gemm.FP8_TILES)


@pytest.mark.parametrize(("op", "tile"), list(tiles()), ids=str)
def test_every_tile_of_the_autotuner_is_right(
    op: str, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deep_gemm.backends import triton_gemm

    tuned: Any = triton_gemm.fp8 if op == "fp8_gemm_nt" else triton_gemm.half
    monkeypatch.setattr(tuned, "configs", triton_gemm.configs([tile], (3,)))
    m, n, k = tile
    assert of_allowed(op, (m + 3, n + 8, k + 16)) <= 1


def test_operands_that_tma_cannot_read_are_refused_in_words() -> None:
    x, d = torch.zeros(8, 70, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    with pytest.raises(
        DeepGemmError, match=re.escape("a must be K-major with rows at multiples of 16 bytes for TMA, but it")
    ):
        backends.get_kernel("triton", "bf16_gemm_nt")(x, x, d)


def test_compare_runs_it_and_says_what_is_too_large() -> None:
    small, large = backends.compare("bf16_gemm_nt", [(16, 32, 64), (4096, 4096, 4096)], ["triton"]).results
    assert small.status == "ok"
    assert large.why == "137 GFLOP on 101 MB take its interpreter too long: name a smaller shape"
