"""Indexer logits of decoding: a few tokens of each request over the pages of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams
from ..spec import PagedLogitsSpec, Spec
from .base import Argument, Strides, Value
from .logits import DIMS, HEADS, MAX_ROWS, LogitsConfig, LogitsKernel, tokens_of


@dataclass(frozen=True)
class PagedLogitsConfig(LogitsConfig):
    """The config of this family."""


class Sm90Fp8PagedMqaLogits(LogitsKernel[PagedLogitsConfig]):
    """See ``templates/include/logits_paged.cuh``."""

    name = "sm90_fp8_paged_mqa_logits"
    config_class = PagedLogitsConfig
    paged = True
    source = "paged"
    kernel_class = "PagedLogits"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except logits over pages."""
        return self.refused_sizes(spec) if isinstance(spec, PagedLogitsSpec) else "it computes logits over pages"

    def configs(self, arch: ArchSpec) -> Iterator[PagedLogitsConfig]:
        """One for each number of queries. Short products have more consumers, which hide the time between them."""
        for tokens in range(1, MAX_ROWS // min(HEADS) + 1):
            yield PagedLogitsConfig(tokens, {1: 4, 2: 3}.get(tokens, 2))

    def runs(self, spec: Spec, config: PagedLogitsConfig) -> bool:
        """Whether a product has no more rows than it may."""
        return isinstance(spec, PagedLogitsSpec) and config.tokens * spec.heads <= MAX_ROWS

    def worthwhile(self, spec: Spec, config: PagedLogitsConfig) -> bool:
        """The config whose queries are all tokens, or equal shares of them."""
        return isinstance(spec, PagedLogitsSpec) and config.tokens == tokens_of(spec.next_n, spec.heads)

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements. The length of a request's token is at lengths[request * lengths_stride + token *
        lengths_step]."""
        return (
            Argument("map_q", "TensorMap", operand="q"),
            Argument("map_k", "TensorMap", operand="cache"),
            Argument("map_s", "TensorMap", operand="cache"),
            Argument("weights", "const float*"),
            Argument("weights_stride", "i64"),
            Argument("lengths", "const int*"),
            Argument("lengths_stride", "u32"),
            Argument("lengths_step", "u32"),
            Argument("table", "const u32*"),
            Argument("table_stride", "i64"),
            Argument("table_width", "u32"),
            Argument("page_keys", "u32"),
            Argument("schedule", "const u32*"),
            Argument("batch", "u32"),
            Argument("next_n", "u32"),
            Argument("out", "u8*"),
            Argument("out_stride", "i64"),
            Argument("columns", "u32"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: q, cache, weights, lengths, table, schedule, out. A page's scales are behind its keys."""
        if not isinstance(spec, PagedLogitsSpec):
            raise TypeError(f"{self.name} computes logits, but it was asked for {spec}")
        p, config = self.of(params)
        page = strides["cache"][0]
        keys = TensorMapSpec(
            "u8", (p.dim, spec.page_keys, spec.pages), (p.dim, page), (p.dim, spec.page_keys, 1), p.dim
        )
        scales = TensorMapSpec("f32", (spec.page_keys, spec.pages), (page,), (spec.page_keys, 1))
        shape = LaunchShape(
            grid=(spec.slots, 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            pdl=pdl,
        )
        return shape, {
            "map_q": self.query_map(params, spec.batch * spec.next_n),
            "map_k": Map(keys, "cache"),
            "map_s": Map(scales, "cache", offset=spec.page_keys * p.dim),
            "weights_stride": strides["weights"][0],
            "lengths_stride": spec.next_n if spec.lengths_per_token else 1,
            "lengths_step": int(spec.lengths_per_token),
            "table_stride": strides["table"][0],
            "table_width": spec.table_width,
            "page_keys": spec.page_keys,
            "batch": spec.batch,
            "next_n": spec.next_n,
            "out_stride": strides["out"][0],
            "columns": spec.columns,
        }

    def cases(self) -> list[KernelParams]:
        """Each number of tokens of 64 heads, and of 32 heads those with other sizes."""
        specs = [
            *(self.example(next_n) for next_n in (1, 2, 3, 4)),
            *(self.example(next_n, heads=32) for next_n in (1, 5, 6, 7, 8)),
            *(self.example(2, dim=dim) for dim in DIMS if dim != 128),
            self.example(1, output="bf16"),
        ]
        return [self.params(spec, self.chosen(spec), SM90) for spec in specs]

    def ahead(self) -> list[KernelParams]:
        """None: no GEMM calls it."""
        return []

    @staticmethod
    def example(next_n: int, heads: int = 64, dim: int = 128, output: str = "f32") -> PagedLogitsSpec:
        """A call with these sizes."""
        return PagedLogitsSpec(256, next_n, heads, dim, 64, 65536, 2048, 132, 131072, output)  # type: ignore[arg-type]

    def chosen(self, spec: PagedLogitsSpec) -> PagedLogitsConfig:
        """The config that calls use."""
        found = (config for config in self.configs(SM90) if self.runs(spec, config))
        return next(config for config in found if self.worthwhile(spec, config))


KERNEL = Sm90Fp8PagedMqaLogits()
