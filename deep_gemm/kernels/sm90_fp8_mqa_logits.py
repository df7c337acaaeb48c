"""Indexer logits of a prompt: each query attends a range of one matrix of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams
from ..spec import LogitsSpec, Spec
from .base import Argument, Strides, Value
from .logits import DIMS, HEADS, MAX_ROWS, UNIT_KEYS, LogitsConfig, LogitsKernel


@dataclass(frozen=True)
class PrefillLogitsConfig(LogitsConfig):
    """The config of this family."""


class Sm90Fp8MqaLogits(LogitsKernel[PrefillLogitsConfig]):
    """See ``templates/include/logits_prefill.cuh``."""

    name = "sm90_fp8_mqa_logits"
    config_class = PrefillLogitsConfig
    paged = False
    source = "prefill"
    kernel_class = "PrefillLogits"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except logits over one matrix of keys."""
        return self.refused_sizes(spec) if isinstance(spec, LogitsSpec) else "it computes logits of prompts"

    def configs(self, arch: ArchSpec) -> Iterator[PrefillLogitsConfig]:
        """One config for each number of heads."""
        for heads in HEADS:
            yield PrefillLogitsConfig(MAX_ROWS // heads, 2, turns=True)

    def runs(self, spec: Spec, config: PrefillLogitsConfig) -> bool:
        """Whether the product has as many rows as it may."""
        return isinstance(spec, LogitsSpec) and config.tokens * spec.heads == MAX_ROWS

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements. Columns below ``filled`` are minus infinity where a key is not attended."""
        return (
            Argument("map_q", "TensorMap", operand="q"),
            Argument("map_k", "TensorMap", operand="keys"),
            Argument("scales", "const float*"),
            Argument("weights", "const float*"),
            Argument("weights_stride", "i64"),
            Argument("starts", "const int*"),
            Argument("ends", "const int*"),
            Argument("out", "u8*"),
            Argument("out_stride", "i64"),
            Argument("rows", "u32"),
            Argument("keys", "u32", operand=""),
            Argument("columns", "u32"),
            Argument("filled", "u32"),
            Argument("compressed", "u32"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: q, keys, scales, weights, starts, ends, out."""
        if not isinstance(spec, LogitsSpec):
            raise TypeError(f"{self.name} computes logits, but it was asked for {spec}")
        p, config = self.of(params)
        shape = LaunchShape(
            grid=(spec.num_sms, 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            pdl=pdl and spec.whole_gpu,
        )
        return shape, {
            "map_q": self.query_map(params, spec.rows),
            "map_k": self.matrix_map("keys", p.dim, spec.keys, UNIT_KEYS),
            "weights_stride": strides["weights"][0],
            "out_stride": strides["out"][0],
            "rows": spec.rows,
            "keys": spec.keys,
            "columns": spec.columns,
            "filled": spec.columns if spec.clean else 0,
            "compressed": int(spec.compressed),
        }

    def cases(self) -> list[KernelParams]:
        """Each number of heads, each size of heads, and each type of result."""
        specs = [
            *(
                LogitsSpec(2048, 65536, heads, dim, 65536)
                for heads in HEADS
                for dim in DIMS
                if heads == 64 or dim == 128
            ),
            LogitsSpec(2048, 65536, 64, 128, 65536, output="bf16"),
        ]
        return [self.params(spec, self.chosen(spec), SM90) for spec in specs]

    def ahead(self) -> list[KernelParams]:
        """None: no GEMM calls it."""
        return []

    def chosen(self, spec: LogitsSpec) -> PrefillLogitsConfig:
        """The config that calls use."""
        return next(config for config in self.configs(SM90) if self.runs(spec, config))


KERNEL = Sm90Fp8MqaLogits()
