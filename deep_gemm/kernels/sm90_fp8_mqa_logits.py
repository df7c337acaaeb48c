"""Indexer logits of a prompt: each query attends a range of one matrix of keys."""

from __future__ import annotations

from collections.abc import Mapping

from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams
from ..spec import LogitsSpec, Spec
from .base import Argument, Numbers, Strides, Value, parse_arguments
from .logits import DIMS, HEADS, MAX_ROWS, UNIT_KEYS, LogitsConfig, LogitsFamily

MAX_PAIRS = 1 << 39
"""Pairs of a query and a key whose costs, two for a tile of 128 keys by four queries, add up to less than 2^32."""


class PromptLogits(LogitsFamily):
    """See ``templates/include/logits_prefill.cuh``."""

    name = "sm90_fp8_mqa_logits"
    paged = False
    source = "prefill"
    kernel_class = "PrefillLogits"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except logits over one matrix of keys."""
        if not isinstance(spec, LogitsSpec):
            return "it computes logits of prompts"
        if spec.rows * spec.keys > MAX_PAIRS:
            return f"it shares out {MAX_PAIRS} pairs of a query and a key at most, not {spec.rows} x {spec.keys}"
        return self.refused_sizes(spec)

    def configs(self, arch: ArchSpec) -> tuple[LogitsConfig, ...]:
        """One for each kind of heads."""
        return tuple(
            LogitsConfig(self.name, heads, dim, MAX_ROWS // heads, 2, turns=True) for heads in HEADS for dim in DIMS
        )

    def config_of(self, spec: LogitsSpec, arch: ArchSpec) -> LogitsConfig:
        """That of the heads."""
        return next(config for config in self.configs(arch) if (config.heads, config.dim) == (spec.heads, spec.dim))

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements. Columns below ``filled`` are minus infinity where a key is not attended."""
        return parse_arguments(
            "TensorMap map_q=q, TensorMap map_k=keys, const float* scales, const float* weights, i64 weights_stride, "
            "const int* starts, const int* ends, u8* out, i64 out_stride, u32 rows, u32 keys, u32 columns, u32 filled, "
            "u32 compressed"
        )

    def values(
        self, params: KernelParams, spec: LogitsSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: q, keys, scales, weights, starts, ends, out."""
        config = self.typed(params)
        shape = LaunchShape(
            grid=(spec.num_sms, 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            pdl=pdl and spec.whole_gpu,
        )
        return shape, {
            "map_q": self.query_map(params, spec.rows),
            "map_k": self.matrix_map("keys", config.dim, spec.keys, UNIT_KEYS),
            "weights_stride": strides["weights"][0],
            "out_stride": strides["out"][0],
            "rows": spec.rows,
            "keys": spec.keys,
            "columns": spec.columns,
            "filled": spec.columns if spec.clean else 0,
            "compressed": int(spec.compressed),
        }

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """Each kind of heads, and each type of result."""
        specs = [
            *(LogitsSpec(2048, 65536, heads, dim, 65536) for heads in HEADS for dim in DIMS),
            LogitsSpec(2048, 65536, 64, 128, 65536, output="bf16"),
        ]
        arch = arch or self.arch
        return [self.params(spec, self.config_of(spec, arch), arch) for spec in specs]


PROMPT_LOGITS = PromptLogits()
