"""GEMMs in TileLang, written like its examples: pipelined copies into shared memory. TileLang's autotuner chooses
tiles, stages and threads for each shape, on the operands of the first call."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, valid-type"
# No `from __future__ import annotations`: TileLang evaluates the annotations of its kernels, and does not find local
# names in text.
import functools
import itertools
from collections.abc import Callable
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.autotuner import set_autotune_inputs
from torch import Tensor

from deep_gemm.backends import kernel
from deep_gemm.backends.registry import Call

Pair = tuple[Tensor, Tensor]
SCALE_BLOCK = 128


def configs(tiles: list[tuple[int, int, int]], stages: tuple[int, ...]) -> list[dict[str, int]]:
    """Configs for tiles (M, N, K), with two warpgroups if a tile is large."""
    return [
        {"block_m": m, "block_n": n, "block_k": k, "stages": depth, "threads": 256 if m * n >= 128 * 128 else 128}
        for (m, n, k), depth in itertools.product(tiles, stages)
    ]


HALF_TILES = [(128, 128, 64), (128, 256, 64), (64, 256, 64), (64, 128, 64), (64, 64, 128), (64, 32, 128)]
FP8_TILES = [(128, 128, 128), (128, 64, 128), (64, 128, 128), (64, 64, 128), (64, 32, 128)]


@tilelang.autotune(configs=configs(HALF_TILES, (3, 4)), skip_check=True)
@tilelang.jit
def half(
    m: int,
    n: int,
    k: int,
    dtype: str,
    block_m: int = 128,
    block_n: int = 128,
    block_k: int = 64,
    stages: int = 3,
    threads: int = 256,
) -> Any:
    """``d = a @ b^T``, sums in float32."""

    @T.prim_func
    def bmm(a: T.Tensor((m, k), dtype), b: T.Tensor((n, k), dtype), d: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=threads) as (column, row):
            a_tile = T.alloc_shared((block_m, block_k), dtype)
            b_tile = T.alloc_shared((block_n, block_k), dtype)
            d_tile = T.alloc_shared((block_m, block_n), dtype)
            acc = T.alloc_fragment((block_m, block_n), "float32")
            T.use_swizzle(panel_size=10)
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(a[row * block_m, step * block_k], a_tile)
                T.copy(b[column * block_n, step * block_k], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
            T.copy(acc, d_tile)
            T.copy(d_tile, d[row * block_m, column * block_n])

    return bmm


@tilelang.autotune(configs=configs(FP8_TILES, (3, 4)), skip_check=True)
@tilelang.jit
def fp8(
    m: int,
    n: int,
    k: int,
    block_m: int = 128,
    block_n: int = 128,
    block_k: int = SCALE_BLOCK,
    stages: int = 3,
    threads: int = 256,
) -> Any:
    """Sums over 128 of K are scaled and accumulated in float32. sfa is (ceil(K / 128), M), contiguous."""
    blocks = -(-k // SCALE_BLOCK)

    @T.prim_func
    def scaled(
        a: T.Tensor((m, k), "float8_e4m3fn"),
        sfa: T.Tensor((blocks, m), "float32"),
        b: T.Tensor((n, k), "float8_e4m3fn"),
        sfb: T.Tensor((-(-n // SCALE_BLOCK), blocks), "float32"),
        d: T.Tensor((m, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=threads) as (column, row):
            a_tile = T.alloc_shared((block_m, block_k), "float8_e4m3fn")
            b_tile = T.alloc_shared((block_n, block_k), "float8_e4m3fn")
            d_tile = T.alloc_shared((block_m, block_n), "bfloat16")
            scale = T.alloc_fragment((block_m,), "float32")
            part = T.alloc_fragment((block_m, block_n), "float32")
            acc = T.alloc_fragment((block_m, block_n), "float32")
            T.use_swizzle(panel_size=10)
            T.clear(acc)
            T.clear(part)
            for step in T.Pipelined(blocks, num_stages=stages):
                T.copy(a[row * block_m, step * block_k], a_tile)
                T.copy(b[column * block_n, step * block_k], b_tile)
                for i in T.Parallel(block_m):
                    inside = T.if_then_else(row * block_m + i < m, sfa[step, row * block_m + i], 0.0)
                    scale[i] = inside * sfb[column * block_n // SCALE_BLOCK, step]
                T.gemm(a_tile, b_tile, part, transpose_B=True)
                for i, j in T.Parallel(block_m, block_n):
                    acc[i, j] += part[i, j] * scale[i]
                T.clear(part)
            T.copy(acc, d_tile)
            T.copy(d_tile, d[row * block_m, column * block_n])

    return scaled


_compiled: dict[Any, Callable[..., None]] = {}


def compiled(factory: Any, *sizes: Any, operands: tuple[Tensor, ...]) -> Callable[..., None]:
    """The kernel for these sizes. It is tuned on the operands at the first call."""
    key = (id(factory), sizes)  # factories are of modules, so they stay; they cannot be hashed
    if key not in _compiled:
        with set_autotune_inputs(*operands):
            made = factory(*sizes)

        def run(*operands: Tensor) -> None:
            made(*operands)  # returns a list of no outputs

        _compiled[key] = run
    return _compiled[key]


@kernel("tilelang", "bf16_gemm_nt", prepares=True)
@kernel("tilelang", "fp16_gemm_nt", prepares=True)
def b16_gemm_nt(a: Tensor, b: Tensor, d: Tensor) -> Call:
    sizes = (*a.shape, b.shape[0])
    run = compiled(half, sizes[0], sizes[2], sizes[1], str(a.dtype).removeprefix("torch."), operands=(a, b, d))
    return functools.partial(run, a, b, d)


@kernel("tilelang", "fp8_gemm_nt", prepares=True)
def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor) -> Call:
    """The scales of A are converted once, before the timed calls."""
    (x, sfa), (y, sfb) = a, b
    operands = (x, sfa.t().contiguous(), y, sfb.contiguous(), d)
    return functools.partial(compiled(fp8, x.shape[0], y.shape[0], x.shape[1], operands=operands), *operands)
