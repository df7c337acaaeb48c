"""The shapes that are measured: those of public models' linear layers, and random ones that nobody tuned for."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from deep_gemm.aot.layers import FP8, FP8_OPS, OPS
from deep_gemm.aot.workload import GemmShape
from deep_gemm.errors import InvalidInputError

TIMED_OPS = (*FP8_OPS, *(op[:-2] + form for op in dict.fromkeys(OPS.values()) for form in ("nt", "nn", "tn", "tt")))
"""Operations that can be timed."""
OUTPUTS = ("f32",)
"""The dtypes of D other than the operation's default."""


@dataclass(frozen=True, order=True)
class Problem(GemmShape):
    """A shape with the dtype of D, one of `OUTPUTS`, and whether the product is added to D."""

    output: str = ""
    accumulate: bool = False

    @classmethod
    def of(cls, shape: GemmShape) -> Problem:
        """The problem of a shape; a plain GemmShape has a D of the operands' dtype and does not accumulate."""
        return shape if isinstance(shape, cls) else cls(**vars(shape))

    def bytes_moved(self) -> int:
        """With D in its dtype; D is read too if the product is added to it."""
        size = self.m * self.n * (4 if self.output else 2)
        return super().bytes_moved() - 2 * self.m * self.n + size * (2 if self.accumulate else 1)

    def __str__(self) -> str:
        return super().__str__() + (f" to {self.output}" if self.output else "") + (", added" * self.accumulate)


def posed(shapes: Iterable[GemmShape], op: str = FP8, output: str = "", accumulate: bool = False) -> list[GemmShape]:
    """The same shapes for an operation. Raises InvalidInputError if it has no such output or does not accumulate."""
    if op not in TIMED_OPS or output not in ("", *OUTPUTS) or not isinstance(accumulate, bool):
        given = (op, output, accumulate)
        known = f"{', '.join(TIMED_OPS)}, outputs {', '.join(OUTPUTS)}"
        raise InvalidInputError(f"op, output and accumulate must be of {known}, True and False, but are {given!r}.")
    if op in FP8_OPS:
        if output or accumulate:
            raise InvalidInputError(f"the output of {op} is part of its name: leave output and accumulate out.")
        return [replace(x, op=op) for x in shapes]
    return [Problem(x.m, x.n, x.k, x.source, op, output=output, accumulate=accumulate) for x in shapes]


REFERENCE_NK = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
"""The seven N x K that results are summarised over: the linear layers of DeepSeek-V3 on one GPU."""

REFERENCE_M = (1, 64, 128, 4096)

PUBLIC_M = (1, 16, 32, 64, 96, 128, 256, 512, 1000, 2048, 4096, 8192)

READ_FLOOR_US: dict[tuple[int, int], float] = {
    (576, 7168): 1.6,
    (2112, 7168): 3.8,
    (7168, 2048): 3.7,
    (32768, 512): 4.1,
    (4096, 7168): 7.0,
    (24576, 1536): 8.9,
    (7168, 16384): 26.8,
}
"""The read floor by N x K: us a launch in graph mode for merely reading the weights, as `floor` does. Measured once on
an NVIDIA H200 (driver 580, CUDA 13.0) on 2026-11-21, in two repeats that agree within 1%. H200s differ by a few
percent."""

DEEPSEEK_V3: dict[str, int] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""The sizes in the published `config.json` of DeepSeek-V3, as `workload.plan` reads them."""

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

STEPS = (16, 64, 128)
"""N and K of random shapes are multiples of one of these."""

STEADY_MIN_M = 1000
"""Steady mode is for prefill and training, and for any shape that reaches the power limit."""

STEADY = ((4096, 7168, 16384), (8192, 8192, 8192), (4096, 4096, 7168), (4096, 24576, 1536), (4096, 7168, 2048))
"""M, N, K for power-limited runs: large enough to keep all SMs busy for the whole time."""


def reference() -> list[GemmShape]:
    """The seven N x K at four sizes of M: a quick look."""
    return [GemmShape(m, n, k, "DeepSeek-V3") for m in REFERENCE_M for n, k in REFERENCE_NK]


def public() -> list[GemmShape]:
    """The list that results are published for: the seven N x K from one token to a large prefill."""
    return [GemmShape(m, n, k, "DeepSeek-V3") for m in PUBLIC_M for n, k in REFERENCE_NK]


def models() -> list[GemmShape]:
    """Every public model's layers, at one decode, one middle and one prefill size."""
    return [GemmShape(m, n, k, name) for name, pairs in MODEL_NK.items() for n, k in pairs for m in (16, 128, 4096)]


def steady() -> list[GemmShape]:
    """The shapes of steady mode: large products, and the shapes of the public list with as many tokens."""
    large = [GemmShape(m, n, k, "steady") for m, n, k in STEADY]
    others = [shape for shape in public() if shape.m >= STEADY_MIN_M and (shape.m, shape.n, shape.k) not in STEADY]
    return large + others


def log_uniform(count: int, seed: int) -> list[GemmShape]:
    """`count` shapes with M in 1..8192, N in 64..32768 and K in 128..16384, each log-uniform: the same for one seed. N,
    and independently K, is a multiple of 16 (the least that cuBLASLt's FP8 takes), 64 or 128, chosen at random."""
    generator = random.Random(seed)

    def draw(low: int, high: int, step: int) -> int:
        value = math.exp(generator.uniform(math.log(low), math.log(high)))
        return max(1, -(-low // step), round(value / step)) * step

    shapes = []
    for _ in range(count):
        m = draw(1, 8192, 1)
        n, k = (draw(low, high, generator.choice(STEPS)) for low, high in ((64, 32768), (128, 16384)))
        shapes.append(GemmShape(m, n, k, f"random, seed {seed}"))
    return shapes


def demo() -> list[GemmShape]:
    """The down projection of DeepSeek-V3's shared expert, at prefill and at decode."""
    return [GemmShape(m, 7168, 2048, source) for m, source in ((4096, "prefill"), (64, "decode"), (1, "one token"))]


SETS = {"demo": demo, "reference": reference, "public": public, "models": models, "steady": steady}
