"""What is measured: N x K of public models' linear layers, sizes of M, and random shapes that nobody tuned to."""

from __future__ import annotations

import math
import random

from deep_gemm.workload import GemmShape

REFERENCE_NK = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
"""The seven N x K that results are summarised over: the linear layers of DeepSeek-V3 on one GPU."""

REFERENCE_M = (1, 64, 128, 4096)

SWEEP_M = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1000, 1024, 2048, 4096, 8192)

MODEL_NK: dict[str, tuple[tuple[int, int], ...]] = {
    "DeepSeek-V3": REFERENCE_NK,
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-3.1-70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "Llama-3.1-70B, 8 GPUs": ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Qwen3-32B": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "Qwen3-235B-A22B": ((9216, 4096), (4096, 8192), (3072, 4096), (4096, 1536)),
    "GLM-4.5": ((14336, 5120), (5120, 12288), (24576, 5120), (5120, 12288)),
    "Kimi-K2": ((2112, 7168), (12288, 1536), (16384, 512), (7168, 8192), (36864, 7168), (7168, 18432)),
}
"""N x K of the dense FP8 layers of public models, from their published configurations, gate and up fused."""

STEADY = ((4096, 7168, 16384), (8192, 8192, 8192), (4096, 4096, 7168), (4096, 24576, 1536), (4096, 7168, 2048))
"""M, N, K for power-limited runs: large enough to keep all SMs busy for the whole time."""


def reference() -> list[GemmShape]:
    """The seven N x K at decode and prefill sizes."""
    return [GemmShape(m, n, k, "DeepSeek-V3") for m in REFERENCE_M for n, k in REFERENCE_NK]


def sweep() -> list[GemmShape]:
    """The seven N x K over many M, for charts."""
    return [GemmShape(m, n, k, "DeepSeek-V3") for n, k in REFERENCE_NK for m in SWEEP_M]


def models() -> list[GemmShape]:
    """Every public model's layers, at one decode, one middle and one prefill size."""
    return [GemmShape(m, n, k, name) for name, pairs in MODEL_NK.items() for n, k in pairs for m in (16, 128, 4096)]


def steady() -> list[GemmShape]:
    """Large products for the power-limited mode."""
    return [GemmShape(m, n, k, "steady") for m, n, k in STEADY]


def log_uniform(count: int, seed: int) -> list[GemmShape]:
    """`count` shapes with M in 1..8192, N in 64..32768 and K in 128..16384, each log-uniform: the same for one seed.

    N and K are multiples of 16, which every backend beside ours needs; K is a multiple of 128 half the time.
    """
    generator = random.Random(seed)

    def draw(low: int, high: int, step: int) -> int:
        value = math.exp(generator.uniform(math.log(low), math.log(high)))
        return max(low, round(value / step) * step)

    shapes = []
    for _ in range(count):
        step_k = generator.choice((16, 128))
        shapes.append(
            GemmShape(draw(1, 8192, 1), draw(64, 32768, 16), draw(128, 16384, step_k), f"random, seed {seed}")
        )
    return shapes


def demo() -> list[GemmShape]:
    """The down projection of DeepSeek-V3's shared expert, at prefill and at decode."""
    return [GemmShape(m, 7168, 2048, source) for m, source in ((4096, "prefill"), (64, "decode"), (1, "one token"))]


SETS = {"demo": demo, "reference": reference, "sweep": sweep, "models": models, "steady": steady}
