"""What the kernels of indexer logits share: their config, and shared memory. See ``logits.cuh``."""

from __future__ import annotations

from collections.abc import Mapping

from .. import arch as archs
from ..arch import ArchSpec
from ..jit.driver.launch import Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import Config, KernelParams
from ..records import record
from ..spec import LogitsSpec, PagedLogitsSpec, align, ceil_div
from .base import KernelFamily

HEADS, DIMS = (64, 32), (128, 64, 32)
OUTPUTS = ("f32", "bf16")

UNIT_KEYS = 64
"""Keys of one product."""

MAX_ROWS = 256
"""Rows of one product: queries times heads."""

MAX_STAGES = 12
"""More were no faster for prompts, and 2% slower for pages (H100)."""


@record(frozen=True)
class LogitsConfig(Config):
    """Products of 64 keys by ``tokens`` queries with ``heads`` heads of ``dim`` elements. ``num_consumers`` warpgroups
    multiply; one more is the producer. With ``turns`` they multiply one after the other."""

    heads: int
    dim: int
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
        return {2: (56, 224), 3: (80, 144), 4: (64, 104)}[self.num_consumers]


class LogitsFamily(KernelFamily):
    """The base class of kernels for logits."""

    template_file = "sm90_fp8_mqa_logits.cu.jinja"
    mma_instruction = "QGMMA"
    paged: bool
    source: str
    """``logits_<source>.cuh`` has the struct ``kernel_class``."""
    kernel_class: str

    def refused_sizes(self, spec: LogitsSpec | PagedLogitsSpec) -> str | None:
        """Why there is no kernel for the sizes of ``spec``, or None."""
        if spec.heads not in HEADS or spec.dim not in DIMS:
            return f"it has {HEADS} heads of {DIMS} elements, not {spec.heads} of {spec.dim}"
        return None if spec.output in OUTPUTS else f"it writes {' and '.join(OUTPUTS)}, not {spec.output}"

    def params(self, spec: LogitsSpec | PagedLogitsSpec, config: LogitsConfig, arch: ArchSpec) -> KernelParams:
        """The identity of the binary that computes ``spec`` with ``config``."""
        return KernelParams(self.name, arch.name, config, output=spec.output)

    def typed(self, params: KernelParams) -> LogitsConfig:
        """The config of ``params``, with its type."""
        if not isinstance(params.config, LogitsConfig):
            raise TypeError(f"{self.name} takes a LogitsConfig, not a {type(params.config).__name__}")
        return params.config

    def stages(self, params: KernelParams) -> int:
        """As many stages as fit, the same number for each consumer."""
        config = self.typed(params)
        rest = self._shared(config, 0)
        fit = (archs.get(params.arch).shared_per_cta - rest) // (self._shared(config, 1) - rest)
        return min(MAX_STAGES, fit) // config.num_consumers * config.num_consumers

    def shared_bytes(self, params: KernelParams) -> int:
        """See ``LogitPlaces``."""
        return self._shared(self.typed(params), self.stages(params))

    def _shared(self, c: LogitsConfig, stages: int) -> int:
        visit = align(16 + 8 * c.tokens, 16) + 4 * c.tokens * c.heads
        stage = UNIT_KEYS * c.dim + (UNIT_KEYS * 4 if self.paged else 0)
        staging = 2 * c.num_consumers * c.tokens * (UNIT_KEYS + 8) * 4
        return 2 * c.tokens * c.heads * c.dim + stages * (stage + 16) + staging + 2 * visit + 4 * 8 + 128

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of the template."""
        config = self.typed(params)
        producer, consumer = config.registers
        return {
            "source": self.source,
            "kernel": self.kernel_class,
            "heads": config.heads,
            "dim": config.dim,
            "tokens": config.tokens,
            "num_consumers": config.num_consumers,
            "num_stages": self.stages(params),
            "num_threads": config.num_threads,
            "shared_bytes": self.shared_bytes(params),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "paged": "true" if self.paged else "false",
            "bf16": "true" if params.output == "bf16" else "false",
            "turns": "true" if config.turns else "false",
            "mma_n": config.tokens * config.heads,
            "mma_steps": config.dim // 32,
            "argument_fields": self.struct_fields(params),
            "arguments": self.struct(params),
        }

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``fp8_mqa_logits_h64_d128_f32_q4``."""
        config = self.typed(params)
        return f"{self.name.removeprefix('sm90_')}_h{config.heads}_d{config.dim}_{params.output}_q{config.tokens}"

    def describe(self, config: Config) -> str:
        """Queries of a product."""
        return f"q{config.tile[0]}"

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Every config, with float32 results; with bf16 those of 128 elements, as public models have."""
        every = [
            KernelParams(self.name, arch.name, config, output=output)
            for config in self.configs(arch)
            for output in OUTPUTS
        ]
        return [params for params in every if params.output == OUTPUTS[0] or self.typed(params).dim == DIMS[0]]

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """None: no GEMM calls it."""
        return []

    def query_map(self, params: KernelParams, rows: int) -> Map:
        """The tensor map of ``rows`` queries, in boxes of one product's."""
        config = self.typed(params)
        return self.matrix_map("q", config.dim, rows * config.heads, config.tokens * config.heads)

    def matrix_map(self, operand: str, dim: int, rows: int, box: int) -> Map:
        """The tensor map of a matrix whose rows are ``dim`` contiguous bytes."""
        return Map(TensorMapSpec("u8", (dim, rows), (dim,), (dim, box), dim, 128), operand)


def tokens_of(next_n: int, heads: int) -> int:
    """The queries of one product for ``next_n`` tokens: all, or equal shares."""
    return ceil_div(next_n, ceil_div(next_n, MAX_ROWS // heads))
