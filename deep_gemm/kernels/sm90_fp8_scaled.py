"""Dense FP8 GEMM for Hopper with any scaling: 1x128 scales on both sides (1D1D), 1x128 by 128x128 (1D2D), or one scale
for each row of A and of B (rowwise); 16-bit or float32 output, C added."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams, ScaledConfig, ScaledParams
from ..spec import SCALE_BLOCK, GemmSpec, Spec, ceil_div
from .fp8 import turns
from .gemm_features import Counts
from .groups import LEAST_SEGMENTS
from .scaled import BUSY, BYTES, PROMOTION, ScaledKernel, scaling_of
from .scaled_tiles import (
    CLUSTERS,
    CONSUMERS,
    REGISTERS,
    SERVING,
    accumulators,
    box_columns,
    config_shared_bytes,
    fits,
    fitted,
    instruction_columns,
    make_config,
    more_registers,
)


class Sm90Fp8Scaled(ScaledKernel[ScaledConfig]):
    """See ``templates/include/fp8_scaled.cuh`` for the algorithm."""

    name = "sm90_fp8_scaled"
    archs = (SM90.name,)
    config_class = ScaledConfig
    label = "any "

    def configs(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """`SERVING`, with as many stages as fit."""
        for chosen in SERVING:
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """Tiles from 64x32 to 256x128 and 128x256, without clusters or in clusters of two, with one set of partial sums
        or two; with one staging buffer where that leaves room for another stage."""
        for tile in itertools.product(CONSUMERS, range(32, 257, 16), CLUSTERS):
            for partials in (1, 2):
                one, two = (make_config(*tile, buffers=x, partials=partials, arch=arch) for x in (1, 2))
                yield from (
                    config
                    for config in ((two, one) if one.num_stages > two.num_stages else (two,))
                    if self.illegal(config, arch) is None
                )

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """Also refuses scales of rows with aligned bf16 output and without C, which `sm90_fp8_rows` computes."""
        plain = spec.d.dtype == "bf16" and spec.d.aligned and spec.accumulate == "none"
        if plain and scaling_of(spec) == "rowwise":
            return "scales of rows with bf16 output and without C have a kernel of their own"
        return super().refuses_groups(spec)

    def illegal(self, config: ScaledConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if c.block_k != SCALE_BLOCK:
            return f"block_k must be {SCALE_BLOCK}, not {c.block_k}"
        if CONSUMERS.get(c.block_m) != c.num_consumers:
            return f"block_m {c.block_m} with {c.num_consumers} consumer warpgroups is not one of {CONSUMERS}"
        if c.block_n % 16 or not 32 <= c.block_n <= 256:
            return f"block_n must be a multiple of 16 from 32 to 256, not {c.block_n}"
        if (c.cluster_m, c.cluster_n) not in CLUSTERS or c.cluster_k != 1:
            return f"a cluster of {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {CLUSTERS}"
        if c.cluster_size > 1 and (c.block_m < 128 or c.block_n < 128):
            return "with small tiles, waiting for the cluster costs more time than sharing loads saves"
        if c.buffers not in (1, 2):
            return f"parts are staged in one buffer or in two, not in {c.buffers}"
        mma_n = instruction_columns(c)
        units = c.slices * c.block_n // mma_n
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if c.num_consumers == 1 and mma_n < c.block_n:
            return f"a lone consumer would multiply {c.block_n} columns in two parts"
        if mma_n % 16:
            return f"instructions of {mma_n} columns do not end on a part of 16 columns"
        if not fits(c, mma_n):
            return f"{accumulators(c, mma_n)} accumulators leave a consumer thread too few registers"
        if c.num_stages < 2:
            return f"{c.num_stages} stages are not two or more"
        if c.ctas_per_sm != 1:
            return f"{c.ctas_per_sm} CTAs on an SM are not one"
        shared = config_shared_bytes(c, True, "1d1d", "f32")
        if not arch.ctas_fit(shared, 1):
            return f"{shared} bytes of shared memory do not fit on one SM"
        return None

    def runs(self, spec: Spec, config: ScaledConfig) -> bool:
        """Also refuses tiles in which a block of B's scales ends, except those of 256 columns, and configs without
        enough registers for the spec."""
        if not super().runs(spec, config) or not isinstance(spec, GemmSpec):
            return False
        scaling = scaling_of(spec)
        if scaling == "1d2d" and config.block_n & (config.block_n - 1):
            return False
        return fits(config, instruction_columns(config), more_registers(scaling, self.adds(spec), spec.d.aligned))

    def worthwhile(self, spec: Spec, config: ScaledConfig) -> bool:
        """Whether less than half of the tile is padding. Otherwise a config with half the height is better."""
        return isinstance(spec, GemmSpec) and config.block_m <= max(64, 2 * spec.m)

    def adds(self, spec: GemmSpec) -> str:
        """Where C is D and float32, TMA adds to it."""
        if spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.d.aligned:
            return "reduces"
        return super().adds(spec)

    def params(self, spec: Spec, config: ScaledConfig, arch: ArchSpec) -> ScaledParams:
        """See `Kernel.params`. Takes as many stages as fit beside the output's staging buffers."""
        found = super().params(spec, config, arch)
        return replace(found, config=fitted(config, found.scaling, found.output, arch))

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_fp8_scaled.cu.jinja``."""
        _, c = self.of(params)
        return {
            **super().constants(params),
            "block_n": c.block_n,
            "min_ctas": 1 if c.num_consumers > 1 else 2,
            "cluster_m": c.cluster_m,
            "cluster_n": c.cluster_n,
            "num_partials": c.num_partials,
            "turns": turns(c),
            "buffers": c.buffers,
            "grouping": "kUngrouped",
            "segments": LEAST_SEGMENTS,
            "a_rows": 0,
        }

    def registers(self, config: ScaledConfig) -> tuple[int, int]:
        """Depends on the number of consumers."""
        return REGISTERS[config.num_consumers]

    def mma_n(self, config: ScaledConfig) -> int:
        """See `instruction_columns`."""
        return instruction_columns(config)

    def num_ctas(self, config: ScaledConfig, m: int, n: int, num_sms: int) -> int:
        """One CTA for each SM, or fewer if there are fewer tiles, in whole clusters."""
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        return min(tiles, max(1, num_sms // config.cluster_size)) * config.cluster_size

    def counts(self, config: ScaledConfig, aligned: bool, scaling: str) -> Counts:
        """Rows of A are the rows of wgmma; the store warp stores tiles."""
        return Counts(
            groups=config.num_consumers,
            slices=config.slices,
            width=config.block_n,
            mma_n=instruction_columns(config),
            direct=not aligned,
            store_warp=aligned,
            promotion=PROMOTION[scaling],
            busy=BUSY[config.num_partials] if scaling == "1d1d" else 0.0,
        )

    def has_output_map(self, params: ScaledParams) -> bool:
        """Yes, unless elements are stored one by one."""
        return params.store == "tma"

    def output_map(self, params: ScaledParams, spec: GemmSpec, stride_d: int) -> Map:
        """Boxes of 64 rows, swizzled over their own length."""
        _, config = self.of(params)
        width, size = box_columns(config, params.output), BYTES[params.output]
        shape = (spec.n, spec.m)
        return Map(TensorMapSpec(params.output, shape, (stride_d * size,), (width, 64), width * size), "d")

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, scales, staging buffers and barriers, in the layout of ``Fp8ScaledLayout``, which asserts the same
        number."""
        p, config = self.of(params)
        return config_shared_bytes(config, p.store == "tma", p.scaling, p.output)

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_1d1d_f32_reduce_128x256_s3_p1_tma``."""
        p, c = self.of(params)
        return self.entry_name(
            p,
            f"{c.block_m}x{c.block_n}_s{c.num_stages}_p{c.num_partials}",
            f"c{c.cluster_m}x{c.cluster_n}" if c.cluster_size > 1 else "",
            "b1" if c.buffers == 1 else "",
        )

    def cases(self) -> list[KernelParams]:
        """The serving set with 1D1D and float32, or with scales of rows where registers do not suffice; each scaling,
        output, way to add C, and store; compile-time sizes."""
        tile, tall, lone = make_config(128, 128), make_config(256, 64, buffers=1, partials=2), make_config(64, 64)
        wide, pair = make_config(128, 256, buffers=1), make_config(128, 256, (2, 1), buffers=1)
        most, square = make_config(128, 160), make_config(128, 128, (1, 2))
        rows = {"scaling": "rowwise"}
        return [
            *(make_params(config, **{} if _multiplies(config) else rows) for config in self.configs(SM90)),
            make_params(most, accumulate="reduces"),
            make_params(tall, output="bf16"),
            make_params(most, accumulate="reads"),
            make_params(tile, output="bf16", accumulate="reads"),
            make_params(lone, output="f16"),
            make_params(make_config(128, 96), store="direct"),
            make_params(wide, scaling="1d2d"),
            make_params(pair, scaling="1d2d", accumulate="reduces"),
            make_params(tall, scaling="1d2d"),
            make_params(tile, scaling="1d2d", output="bf16", accumulate="reads"),
            make_params(square, scaling="1d2d", accumulate="reduces"),
            make_params(lone, scaling="1d2d", store="direct", accumulate="reads"),
            make_params(make_config(128, 112), **rows),
            make_params(lone, **rows, output="bf16", store="direct"),
            make_params(tile, **rows, output="bf16", accumulate="reads"),
            make_params(tile, shape=(0, 2112, 7168)),
        ]


def _multiplies(config: ScaledConfig) -> bool:
    """Whether a consumer has enough registers for 1D1D."""
    return fits(config, instruction_columns(config), more_registers("1d1d", "none", True))


def make_params(config: ScaledConfig, **options: object) -> ScaledParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: 1D1D, float32 output, TMA stores."""
    known = {"store": "tma", "scaling": "1d1d", "output": "f32", **options}
    config = fitted(config, str(known["scaling"]), str(known["output"]))
    return ScaledParams(kernel=KERNEL.name, arch=SM90.name, config=config, **known)  # type: ignore[arg-type]


KERNEL = Sm90Fp8Scaled()
