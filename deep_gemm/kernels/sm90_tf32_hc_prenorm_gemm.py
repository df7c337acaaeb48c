"""TF32 products of bf16 rows with a few float32 rows, and the rows' sums of squares."""

from __future__ import annotations

from collections.abc import Mapping

from .. import arch as archs
from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import Config, KernelParams
from ..records import record
from ..spec import PrenormSpec, Spec, ceil_div
from .base import Argument, KernelFamily, Numbers, Strides, Value, parse_arguments

BLOCK_K = PrenormSpec.BLOCK_K
MAX_STAGES = 12

PARTS = 8
"""Of K under batch invariance: their sums are added in one order, whichever CTAs have them."""

FIT = {1: 100, 2: 100, 4: 85, 8: 60}
"""Percent of the SMs that clusters of a size can fill: the SMs of a cluster are neighbours. On an H100, 32 clusters
of 4 and 16 of 8 took two rounds."""


@record(frozen=True)
class PrenormConfig(Config):
    """A CTA has ``rows`` rows of A, and all of B's ``columns`` rows. The CTAs of a cluster split K, and each sums
    ``in_turn`` parts of it, one after the other."""

    rows: int
    cluster: int
    columns: int = 24
    in_turn: int = 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that a cluster writes."""
        return self.rows, PrenormSpec.MOST_N

    @property
    def warps(self) -> int:
        """Warps that multiply, each 16 rows. On an H100, 137 x 28672 took 15 us with 8 and 18 us with 16; 8192 x 28672
        took 187 us and 181 us in tiles of 128 rows."""
        return 8 if self.rows < 64 else 16

    @property
    def groups(self) -> int:
        """Groups of warps in a CTA that split K."""
        return self.warps * 16 // self.rows


class PrenormFamily(KernelFamily):
    """See ``templates/include/prenorm.cuh``."""

    name = "sm90_tf32_hc_prenorm_gemm"
    template_file = f"{name}.cu.jinja"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except these products."""
        if not isinstance(spec, PrenormSpec):
            return "it multiplies bf16 rows with a few float32 rows by TF32 products"
        if spec.n % 8 or spec.n > PrenormSpec.MOST_N or spec.k % BLOCK_K:
            return f"N must be 8, 16, 24 or 32, and K a multiple of {BLOCK_K}"
        return None

    def configs(self, arch: ArchSpec, columns: int = 24) -> tuple[PrenormConfig, ...]:
        """A tile for each SM without a cluster comes first; then tall tiles, which read B less often.

        On an H100 4096 x 7168 took 28.8 us in 32x1 and 31.3 us in 64x2, of which the clusters took 1.5.
        """
        tiles = ((32, 1), (128, 2), (64, 2), (64, 4), (32, 8), (64, 8))
        return tuple(PrenormConfig(self.name, rows, cluster, columns) for rows, cluster in tiles)

    def config_of(self, spec: PrenormSpec, arch: ArchSpec) -> PrenormConfig:
        """The config that keeps the most SMs busy, the first of several. Under batch invariance K has as many parts in
        each."""

        def busy(config: PrenormConfig) -> float:
            ctas = ceil_div(spec.m, config.rows) * config.cluster * spec.splits
            rounds = ceil_div(ctas, max(1, spec.num_sms * FIT[config.cluster] // 100))
            few = config.in_turn > 1 and 4 * ctas < 3 * spec.num_sms  # 64x2 has more warps for as many rows
            if config.rows == 32 and (rounds > 1 or few):
                return 0
            return 0 if rounds > 1 and config.cluster > 2 else ctas / rounds

        return max(self.ordered(spec.n) if spec.batch_invariant else self.configs(arch, spec.n), key=busy)

    def ordered(self, columns: int = 24) -> tuple[PrenormConfig, ...]:
        """Those of batch invariance: four groups of warps, and eight parts of K. On an H200 2048 x 7168 took 22.7 us in
        64x2 and 24.4 us in 32x1, 4096 x 7168 26.6 and 25.8, and 8192 x 7168 39.8 us in 64x1 and 46.5 us in 64x2."""
        tiles = ((32, 1), (64, 1), (64, 2), (64, 4), (32, 8), (64, 8))
        return tuple(PrenormConfig(self.name, *tile, columns, PARTS // tile[1]) for tile in tiles)

    def params(self, spec: PrenormSpec, config: PrenormConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`."""
        return KernelParams(self.name, arch.name, config)

    def typed(self, params: KernelParams) -> PrenormConfig:
        """The config of ``params``, with its type."""
        if not isinstance(params.config, PrenormConfig):
            raise TypeError(f"{self.name} takes a PrenormConfig, not a {type(params.config).__name__}")
        return params.config

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements; ``blocks`` of K."""
        return parse_arguments(
            "TensorMap map_a=a, TensorMap map_b=b, float* d, i64 d_split, i64 d_stride, float* sqr_sum, i64 sqr_split, "
            "u32 m, u32 n, u32 blocks"
        )

    def values(
        self, params: KernelParams, spec: PrenormSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, b, d (splits, M, N), sqr_sum (splits, M)."""
        config = self.typed(params)
        a = TensorMapSpec("bf16", (spec.k, spec.m), (2 * strides["a"][0],), (BLOCK_K, config.rows), 128, 256)
        b = TensorMapSpec("f32", (spec.k, spec.n), (4 * strides["b"][0],), (BLOCK_K // 2, config.columns), 128, 256)
        shape = LaunchShape(
            grid=(ceil_div(spec.m, config.rows) * config.cluster, spec.splits, 1),
            block=32 * (config.warps + 1),
            dynamic_shared=self.shared_bytes(params),
            cluster=(config.cluster, 1, 1),
            pdl=pdl and spec.whole_gpu,
        )
        return shape, {
            "map_a": Map(a, "a"),
            "map_b": Map(b, "b"),
            "d_split": strides["d"][0],
            "d_stride": strides["d"][1],
            "sqr_split": strides["sqr_sum"][0],
            "m": spec.m,
            "n": spec.n,
            "blocks": spec.k // BLOCK_K,
        }

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of the template."""
        config = self.typed(params)
        return {
            "rows": config.rows,
            "columns": config.columns,
            "num_stages": self.stages(params),
            "cluster": config.cluster,
            "in_turn": config.in_turn,
            "warps": config.warps,
            "num_threads": 32 * (config.warps + 1),
            "shared_bytes": self.shared_bytes(params),
            "argument_fields": self.struct_fields(params),
            "arguments": self.struct(params),
        }

    def stages(self, params: KernelParams) -> int:
        """As many stages as fit, the same number for each group."""
        config = self.typed(params)
        rest = self._shared(params, 0)
        fit = min(MAX_STAGES, (archs.get(params.arch).shared_per_cta - rest) // (self._shared(params, 1) - rest))
        return fit // config.groups * config.groups

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, partial sums, and barriers."""
        return self._shared(params, self.stages(params))

    def _shared(self, params: KernelParams, stages: int) -> int:
        config = self.typed(params)
        stage = 128 * config.rows + 256 * config.columns
        kept = 1 if config.cluster == 1 else config.in_turn
        return stages * (stage + 16) + kept * config.warps * 16 * (config.columns + 1) * 4

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``tf32_hc_prenorm_gemm_n24_128x4``."""
        config = self.typed(params)
        return f"tf32_hc_prenorm_gemm_n{config.columns}_{self.describe(config)}"

    def describe(self, config: Config) -> str:
        """Rows, cluster, and parts in turn if there are several."""
        if not isinstance(config, PrenormConfig):
            return super().describe(config)
        return f"{config.rows}x{config.cluster}" + (f"_t{config.in_turn}" if config.in_turn > 1 else "")

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """Each config for 24 columns, and each number of columns."""
        ordered = [config for config in self.ordered() if config.in_turn > 1]
        others = [PrenormConfig(self.name, 128, 2, columns) for columns in (8, 16, 32)]
        arch = arch or self.arch
        return [KernelParams(self.name, arch.name, config) for config in (*self.configs(arch), *ordered, *others)]

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Every config for each number of columns."""
        columns = range(8, PrenormSpec.MOST_N + 1, 8)
        return [KernelParams(self.name, arch.name, config) for n in columns for config in self.configs(arch, n)]

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """None: no GEMM calls it."""
        return []


PRENORM = PrenormFamily()
