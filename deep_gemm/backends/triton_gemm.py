"""GEMMs in Triton, written like its tutorials, with TMA descriptors. Triton's autotuner chooses tiles, stages and warps
for each M, N and K."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from .registry import kernel
from .triton_mode import dot_nt, rounded, tl, triton, tuned

Pair = tuple[Tensor, Tensor]
SCALE_BLOCK = 128


def _set_boxes(given: dict[str, Any]) -> None:
    """Set the descriptors' boxes to the tiles of the current config."""
    given["a"].block_shape = [given["BLOCK_M"], given["BLOCK_K"]]
    given["b"].block_shape = [given["BLOCK_N"], given["BLOCK_K"]]


def configs(tiles: list[tuple[int, int, int]], stages: tuple[int, ...]) -> list[Any]:
    """Configs for tiles (M, N, K), with eight warps if a tile is large."""
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8},
            num_stages=depth,
            num_warps=8 if m * n >= 128 * 128 else 4,
            pre_hook=_set_boxes,
        )
        for (m, n, k), depth in itertools.product(tiles, stages)
    ]


HALF_TILES = [
    (128, 128, 64),
    (128, 256, 64),
    (256, 128, 64),
    (64, 256, 64),
    (64, 128, 64),
    (64, 64, 128),
    (64, 32, 128),
]
FP8_TILES = [(128, 128, 128), (128, 64, 128), (64, 128, 128), (64, 64, 128), (64, 32, 128)]


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The tile of this program. GROUP_M rows of tiles share reads of B through L2."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    height = min(tiles_m - group * GROUP_M, GROUP_M)
    inside = program % (GROUP_M * tiles_n)
    return group * GROUP_M + inside % height, inside // height


@triton.jit
def _store(d, stride_d, m, n, M, N, acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, columns = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    at = d + rows.to(tl.int64)[:, None] * stride_d + columns[None, :]
    tl.store(at, rounded(acc, d.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def _half(
    a,
    b,
    d,
    stride_d,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = _tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = dot_nt(a.load([m, k]), b.load([n, k]), acc)
    _store(d, stride_d, m, n, M, N, acc, BLOCK_M, BLOCK_N)


@triton.jit
def _fp8(
    a,
    b,
    d,
    sfa,
    sfb,
    stride_d,
    sfa_m,
    sfa_k,
    sfb_n,
    sfb_k,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """BLOCK_K is a block of scales, and BLOCK_N divides one."""
    tile_m, tile_n = _tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
    rows = m + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    zeros = acc
    at_a, at_b = sfa + rows * sfa_m, sfb + (n // BLOCK_K) * sfb_n
    for k in range(tl.cdiv(K, BLOCK_K)):
        scale = tl.load(at_a + k * sfa_k, mask=rows < M, other=0.0) * tl.load(at_b + k * sfb_k)
        acc += dot_nt(a.load([m, k * BLOCK_K]), b.load([n, k * BLOCK_K]), zeros) * scale[:, None]
    _store(d, stride_d, m, n, M, N, acc, BLOCK_M, BLOCK_N)


half = tuned(_half, configs(HALF_TILES, (3, 4)), ["M", "N", "K"])
fp8 = tuned(_fp8, configs(FP8_TILES, (3, 4, 5)), ["M", "N", "K"])


def _grid(given: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(given["M"], given["BLOCK_M"]) * triton.cdiv(given["N"], given["BLOCK_N"]),)


def _descriptor(name: str, x: Tensor) -> Any:
    """A tensor map of a K-major matrix; its box is set for each config."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        raise UnsupportedError(
            f"{name} must be K-major with rows at multiples of 16 bytes for TMA, but it has strides {x.stride()}."
        )
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1])


@kernel("triton", "bf16_gemm_nt")
@kernel("triton", "fp16_gemm_nt")
def b16_gemm_nt(a: Tensor, b: Tensor, d: Tensor) -> None:
    (m, k), n = a.shape, b.shape[0]
    half[_grid](_descriptor("a", a), _descriptor("b", b), d, d.stride(0), m, n, k)


@kernel("triton", "fp8_gemm_nt")
def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor) -> None:
    (x, sfa), (y, sfb) = a, b
    (m, k), n = x.shape, y.shape[0]
    maps = _descriptor("a", x), _descriptor("b", y)
    fp8[_grid](*maps, d, sfa, sfb, d.stride(0), *sfa.stride(), *sfb.stride(), m, n, k)
