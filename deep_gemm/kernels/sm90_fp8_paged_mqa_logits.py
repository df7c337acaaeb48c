"""Indexer logits of decoding: a few tokens of each request over the pages of its keys."""

from __future__ import annotations

from collections.abc import Mapping

from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams
from ..spec import Dtype, PagedLogitsSpec, Spec
from .base import Argument, Numbers, Strides, Value, parse_arguments
from .logits import DIMS, HEADS, MAX_ROWS, LogitsConfig, LogitsFamily, tokens_of


class PagedLogits(LogitsFamily):
    """See ``templates/include/logits_paged.cuh``."""

    name = "sm90_fp8_paged_mqa_logits"
    paged = True
    source = "paged"
    kernel_class = "PagedLogits"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except logits over pages."""
        return self.refused_sizes(spec) if isinstance(spec, PagedLogitsSpec) else "it computes logits over pages"

    def config(self, heads: int, dim: int, tokens: int) -> LogitsConfig:
        """Short products have more consumers, which hide the time between them."""
        return LogitsConfig(self.name, heads, dim, tokens, {1: 4, 2: 3}.get(tokens, 2))

    def configs(self, arch: ArchSpec) -> tuple[LogitsConfig, ...]:
        """One for each kind of heads and number of queries."""
        kinds = [(heads, dim, tokens) for heads in HEADS for dim in DIMS for tokens in range(1, MAX_ROWS // heads + 1)]
        return tuple(self.config(*kind) for kind in kinds)

    def config_of(self, spec: PagedLogitsSpec, arch: ArchSpec) -> LogitsConfig:
        """The config whose queries are all tokens, or equal shares of them."""
        return self.config(spec.heads, spec.dim, tokens_of(spec.next_n, spec.heads))

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements. The length of a request's token is at lengths[request * lengths_stride + token *
        lengths_step]."""
        return parse_arguments(
            "TensorMap map_q=q, TensorMap map_k=cache, TensorMap map_s=cache, const float* weights, "
            "i64 weights_stride, const int* lengths, u32 lengths_stride, u32 lengths_step, const u32* table, "
            "i64 table_stride, u32 table_width, u32 page_keys, const u32* schedule, u32 batch, u32 next_n, u8* out, "
            "i64 out_stride, u32 columns"
        )

    def values(
        self, params: KernelParams, spec: PagedLogitsSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: q, cache, weights, lengths, table, schedule, out. A page's scales are behind its keys."""
        config = self.typed(params)
        page = strides["cache"][0]
        dim, box = config.dim, (config.dim, spec.page_keys, 1)
        keys = TensorMapSpec("u8", (dim, spec.page_keys, spec.pages), (dim, page), box, swizzle=dim)
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
            "map_s": Map(scales, "cache", offset=spec.page_keys * config.dim),
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

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """Each number of tokens, and each kind of heads for one of them."""
        specs = [
            *(self.example(next_n, heads) for heads in HEADS for next_n in range(1, MAX_ROWS // heads + 1)),
            *(self.example(2, heads, dim) for heads in HEADS for dim in DIMS[1:]),
            self.example(1, output="bf16"),
        ]
        arch = arch or self.arch
        return [self.params(spec, self.config_of(spec, arch), arch) for spec in specs]

    @staticmethod
    def example(next_n: int, heads: int = 64, dim: int = 128, output: Dtype = "f32") -> PagedLogitsSpec:
        """A call with these sizes."""
        return PagedLogitsSpec(256, next_n, heads, dim, 64, 65536, 2048, 132, 131072, output)


PAGED_LOGITS = PagedLogits()
