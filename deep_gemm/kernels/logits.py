"""What the kernels of indexer logits share: their configs, params, and shared memory. See ``logits.cuh``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelConfig, KernelParams
from ..spec import LogitsSpec, PagedLogitsSpec, align, ceil_div
from .base import Kernel

HEADS, DIMS = (32, 64), (32, 64, 128)
OUTPUTS = {"f32": 4, "bf16": 2}
"""Bytes of an element of the result."""

UNIT_KEYS = 64
"""Keys of one product."""

MAX_ROWS = 256
"""Rows of one product: queries times heads."""

MOST_STAGES = 12
"""More were no faster for prompts, and 2% slower for pages (H100)."""


@dataclass(frozen=True)
class LogitsConfig(KernelConfig):
    """Products of 64 keys by ``tokens`` queries with all their heads. ``num_consumers`` warpgroups multiply; one more
    is the producer. With ``turns`` they multiply one after the other."""

    tokens: int
    num_consumers: int
    turns: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one product."""
        return self.tokens, UNIT_KEYS

    @property
    def num_threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.num_consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer. With turns there are few: pairs of bf16 then lie in
        the scores' place, and ptxas cannot put the next product among the sums over heads, which it would slow down."""
        if self.turns:
            return 56, 192
        return {1: (56, 224), 2: (56, 224), 3: (80, 144), 4: (64, 104)}[self.num_consumers]


ConfigT = TypeVar("ConfigT", bound=LogitsConfig)


@dataclass(frozen=True)
class LogitsParams(KernelParams):
    """The params of a kernel for logits of ``heads`` heads of ``dim`` elements."""

    heads: int = 64
    dim: int = 128
    output: str = "f32"


class LogitsKernel(Kernel[ConfigT]):
    """The base class of kernels for logits."""

    archs = (SM90.name,)
    mma_instruction = "QGMMA"
    paged: bool
    source: str
    """``logits_<source>.cuh`` has the struct ``kernel_class``."""
    kernel_class: str

    @property
    def template(self) -> str:
        """The template that they share."""
        return "sm90_fp8_mqa_logits.cu.jinja"

    def refused_sizes(self, spec: LogitsSpec | PagedLogitsSpec) -> str | None:
        """Why there is no kernel for the sizes of ``spec``, or None."""
        if spec.heads not in HEADS or spec.dim not in DIMS:
            return f"it has {HEADS} heads of {DIMS} elements, not {spec.heads} of {spec.dim}"
        if spec.output not in OUTPUTS:
            return f"it writes {' and '.join(OUTPUTS)}, not {spec.output}"
        return None

    def illegal(self, config: ConfigT, arch: ArchSpec) -> str | None:
        """None for configs whose products fit."""
        if not 1 <= config.tokens <= MAX_ROWS // min(HEADS) or not 1 <= config.num_consumers <= 4:
            return f"it multiplies 1 to {MAX_ROWS // min(HEADS)} queries in 1 to 4 consumers"
        return None

    def params(self, spec: Any, config: ConfigT, arch: ArchSpec) -> LogitsParams:
        """See `Kernel.params`."""
        return LogitsParams(self.name, arch.name, config, heads=spec.heads, dim=spec.dim, output=spec.output)

    def of(self, params: KernelParams) -> tuple[LogitsParams, LogitsConfig]:
        """``params`` and their config, with their types."""
        if not isinstance(params, LogitsParams) or not isinstance(params.config, LogitsConfig):
            kind = f"{type(params).__name__} with a {type(params.config).__name__}"
            raise TypeError(f"{self.name} takes LogitsParams with a {self.config_class.__name__}, not {kind}")
        return params, params.config

    def stages(self, params: KernelParams) -> int:
        """As many stages as fit, the same number for each consumer."""
        p, config = self.of(params)
        rest = self._shared(p, config, 0)
        fit = (SM90.shared_per_cta - rest) // (self._shared(p, config, 1) - rest)
        return min(MOST_STAGES, fit) // config.num_consumers * config.num_consumers

    def shared_bytes(self, params: KernelParams) -> int:
        """See ``LogitPlaces``."""
        p, config = self.of(params)
        return self._shared(p, config, self.stages(params))

    def _shared(self, p: LogitsParams, config: LogitsConfig, stages: int) -> int:
        tokens, consumers = config.tokens, config.num_consumers
        visit = align(20 + 8 * tokens, 16) + 4 * tokens * p.heads
        stage = UNIT_KEYS * p.dim + (UNIT_KEYS * 4 if self.paged else 0)
        staging = 2 * consumers * tokens * (UNIT_KEYS + 8) * 4
        return 2 * tokens * p.heads * p.dim + stages * (stage + 16) + staging + 2 * visit + 4 * 8 + 128

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of the template."""
        p, config = self.of(params)
        producer, consumer = config.registers
        return {
            "source": self.source,
            "kernel": self.kernel_class,
            "heads": p.heads,
            "dim": p.dim,
            "tokens": config.tokens,
            "num_consumers": config.num_consumers,
            "num_stages": self.stages(params),
            "num_threads": config.num_threads,
            "shared_bytes": self.shared_bytes(params),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "paged": "true" if self.paged else "false",
            "bf16": "true" if p.output == "bf16" else "false",
            "turns": "true" if config.turns else "false",
            "mma_n": config.tokens * p.heads,
            "mma_steps": p.dim // 32,
            "argument_fields": self.struct_fields(params),
            "arguments": self.struct(params),
        }

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_mqa_logits_h64_d128_f32_q4``."""
        p, config = self.of(params)
        name = self.name.removeprefix("sm90_")
        return f"{name}_h{p.heads}_d{p.dim}_{p.output}_{self.describe(config)}"

    def describe(self, config: LogitsConfig) -> str:
        """Queries of a product, and consumers if there are not two."""
        text = f"q{config.tokens}"
        return text + (f"_w{config.num_consumers}" if config.num_consumers != 2 else "")

    def query_map(self, params: KernelParams, rows: int) -> Map:
        """The tensor map of ``rows`` queries, in boxes of one product's."""
        p, config = self.of(params)
        return self.matrix_map("q", p.dim, rows * p.heads, config.tokens * p.heads)

    def matrix_map(self, operand: str, dim: int, rows: int, box: int) -> Map:
        """The tensor map of a matrix whose rows are ``dim`` contiguous bytes."""
        return Map(TensorMapSpec("u8", (dim, rows), (dim,), (dim, box), dim, 128), operand)


def tokens_of(next_n: int, heads: int) -> int:
    """The queries of one product for ``next_n`` tokens: all, or equal shares."""
    return ceil_div(next_n, ceil_div(next_n, MAX_ROWS // heads))
