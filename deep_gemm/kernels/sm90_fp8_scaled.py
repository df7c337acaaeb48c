"""Dense FP8 GEMM for Hopper with any scaling: 1x128 scales on both sides (1D1D), 1x128 by 128x128 (1D2D), or one scale
for each row of A and of B (rowwise); 16-bit or float32 output, C added."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams, ScaledConfig, ScaledParams
from ..spec import SCALE_BLOCK, GemmSpec, Spec, ceil_div
from .base import Argument, GemmKernel, Strides, Value
from .features import Features
from .fp8 import turns
from .gemm_features import PROMOTION_CYCLES, Counts
from .gemm_features import features as count
from .loads import early_stages, evict_first, l2_promotion, operand_maps
from .raster import raster
from .scaled_tiles import (
    BYTES,
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
from .tiles import left

SCALINGS = {("1x128", "1x128"): "1d1d", ("1x128", "128x128"): "1d2d", ("row", "row"): "rowwise"}
"""The kernel's scaling, by the scalings of A and of B."""

_KINDS = {"1d1d": "k1D1D", "1d2d": "k1D2D", "rowwise": "kRowwise"}
_ELEMENTS = {"bf16": "kBf16", "f16": "kF16", "f32": "kF32"}
_ACCUMULATE = {"none": "kNothing", "reads": "kReads", "reduces": "kReduces"}

_PROMOTION = {"1d1d": 2 * PROMOTION_CYCLES, "1d2d": PROMOTION_CYCLES, "rowwise": PROMOTION_CYCLES}
"""Cycles for the promotion of one column of an m64 slice. With 1D1D each element's factor is a separate product."""


class Sm90Fp8Scaled(GemmKernel[ScaledConfig]):
    """See ``templates/include/fp8_scaled.cuh`` for the algorithm."""

    name = "sm90_fp8_scaled"
    archs = (SM90.name,)
    config_class = ScaledConfig
    mma_instruction = "QGMMA"
    label = "any "

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except a single product of scaled E4M3. Also refuses 1D2D with bf16 output and no C, for
        which there are other families."""
        if not isinstance(spec, GemmSpec):
            return "it multiplies matrices"
        for name, operand in (("A", spec.a), ("B", spec.b)):
            if (operand.dtype, operand.major) != ("e4m3", "k"):
                return f"{name} must be K-major e4m3, not {operand.major}-major {operand.dtype}"
            if not operand.aligned:
                return f"{name} must begin and step by 16 bytes, as TMA reads it"
        if (spec.a.scaling, spec.b.scaling) not in SCALINGS:
            known = ", ".join(" and ".join(pair) for pair in SCALINGS)
            return f"scales of A and B must be {known}, not {spec.a.scaling} and {spec.b.scaling}"
        if spec.d.dtype not in _ELEMENTS or (spec.d.major, spec.d.scaling) != ("mn", "none"):
            return f"D must be row-major bf16, f16 or f32, not {spec.d.major}-major {spec.d.dtype}"
        if spec.batch != 1 or spec.grouping != "none":
            return "it computes one product, without batch or groups"
        if spec.epilogue != "none":
            return "it writes the product as it is, or with C added"
        if scaling_of(spec) == "1d2d" and spec.d.dtype == "bf16" and spec.accumulate == "none":
            return "1D2D with bf16 output and without C has kernels of its own"
        return None

    def configs(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """`SERVING`, with as many stages as fit."""
        for chosen in SERVING:
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """Tiles from 64x32 to 256x128 and 128x256, without clusters or in clusters of two."""
        for chosen in itertools.product(CONSUMERS, range(32, 257, 32), CLUSTERS):
            config = make_config(*chosen, arch=arch)
            if self.illegal(config, arch) is None:
                yield config

    def illegal(self, config: ScaledConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, or None."""
        c = config
        if c.block_k != SCALE_BLOCK:
            return f"block_k must be {SCALE_BLOCK}, not {c.block_k}"
        if CONSUMERS.get(c.block_m) != c.num_consumers:
            return f"block_m {c.block_m} with {c.num_consumers} consumer warpgroups is not one of {CONSUMERS}"
        if c.block_n % 32 or not 32 <= c.block_n <= 256:
            return f"block_n must be a multiple of 32 from 32 to 256, not {c.block_n}"
        if (c.cluster_m, c.cluster_n) not in CLUSTERS or c.cluster_k != 1:
            return f"a cluster of {c.cluster_m} x {c.cluster_n} x {c.cluster_k} CTAs is not one of {CLUSTERS}"
        if c.cluster_size > 1 and (c.block_m < 128 or c.block_n < 128):
            return "a cluster of small tiles waits for itself longer than sharing loads saves"
        if c.buffers not in (1, 2):
            return f"parts are staged in one buffer or in two, not in {c.buffers}"
        mma_n = instruction_columns(c)
        units = c.slices * c.block_n // mma_n
        if c.num_partials not in (1, 2) or (c.num_partials == 2 and units > 2):
            return f"there is no schedule for {c.num_partials} sets of partial sums and {units} products a block of K"
        if c.num_consumers == 1 and mma_n < c.block_n:
            return f"a lone consumer would multiply {c.block_n} columns in two parts"
        if mma_n % 32:
            return f"instructions of {mma_n} columns do not end on a part of 32 columns"
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
        return fits(config, instruction_columns(config), more_registers(scaling, adds(spec), spec.d.aligned))

    def worthwhile(self, spec: Spec, config: ScaledConfig) -> bool:
        """Whether less than half of the tile is padding. Otherwise a config with half the height is better."""
        return isinstance(spec, GemmSpec) and config.block_m <= max(64, 2 * spec.m)

    def params(self, spec: Spec, config: ScaledConfig, arch: ArchSpec) -> ScaledParams:
        """See `Kernel.params`. Adds the scaling and the output, and takes as many stages as fit beside the staging
        buffers."""
        known = super().params(spec, config, arch)
        assert isinstance(spec, GemmSpec)  # checked above
        scaling = scaling_of(spec)
        return ScaledParams(
            **{field.name: getattr(known, field.name) for field in fields(KernelParams) if field.name != "config"},
            config=fitted(config, scaling, spec.d.dtype, arch),
            scaling=scaling,
            output=spec.d.dtype,
            accumulate=adds(spec),
        )

    def of(self, params: KernelParams) -> tuple[ScaledParams, ScaledConfig]:
        """``params`` and their config with this family's types. Raises TypeError if they belong to another family."""
        if not isinstance(params, ScaledParams) or not isinstance(params.config, ScaledConfig):
            got = f"{type(params).__name__} with a {type(params.config).__name__}"
            raise TypeError(f"{self.name} takes ScaledParams with a ScaledConfig, not {got}")
        return params, params.config

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Like those of the other FP8 kernels (see ``fp8.py``). TMA loads 1 x 128 scales. Other scales are read from
        global memory; the stride is zero where all rows share one scale."""
        p, _ = self.of(params)
        reads = [Argument("c", "const u8*"), Argument("c_stride", "i64")] if p.accumulate == "reads" else []
        scales = {
            "1d1d": [Argument("map_scale_a", "TensorMap"), Argument("map_scale_b", "TensorMap")],
            "1d2d": [
                Argument("scale_b", "const float*", operand="sfb"),
                Argument("scale_b_stride_n", "i64"),
                Argument("scale_b_stride_k", "i64"),
                Argument("map_scale_a", "TensorMap"),
            ],
            "rowwise": [
                Argument("scale_a", "const float*", operand="sfa"),
                Argument("scale_a_stride", "i64"),
                Argument("scale_b", "const float*", operand="sfb"),
                Argument("scale_b_stride", "i64"),
            ],
        }[p.scaling]
        return (
            *(Argument(name, "u32") for name in ("m", "n", "k", "last_rows", "last_columns", "early_stages")),
            Argument("raster", "Raster"),
            Argument("evict_first", "u32"),
            Argument("d", "u8*"),
            Argument("d_stride", "i64"),
            *reads,
            *scales,
            Argument("map_a", "TensorMap"),
            Argument("map_b", "TensorMap"),
            *([Argument("map_d", "TensorMap")] if p.store == "tma" else []),
            Argument("map_a_last", "TensorMap"),
            Argument("map_b_last", "TensorMap"),
        )

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """Constants of ``sm90_fp8_scaled.cu.jinja``."""
        p, c = self.of(params)
        producer, consumer = REGISTERS[c.num_consumers]
        return {
            "block_m": c.block_m,
            "block_n": c.block_n,
            "num_stages": c.num_stages,
            "num_consumers": c.num_consumers,
            "num_threads": c.num_threads,
            "min_ctas": 1 if c.num_consumers > 1 else 2,
            "cluster_m": c.cluster_m,
            "cluster_n": c.cluster_n,
            "num_partials": c.num_partials,
            "turns": turns(c),
            "buffers": c.buffers,
            "producer_registers": producer,
            "consumer_registers": consumer,
            **{f"shape_{letter}": size for letter, size in zip("mnk", p.shape, strict=True)},
            "scaling": _KINDS[p.scaling],
            "element": _ELEMENTS[p.output],
            "accumulate": _ACCUMULATE[p.accumulate],
            "tma_store": p.store == "tma",
            "mma_n": instruction_columns(c),
            "mma_types": "k32.f32.e4m3.e4m3",
            "mma_majors": "",
            "step_a": "kStepKMajor",
            "step_b": "kStepKMajor",
            "shared_bytes": self.shared_bytes(params),
            "arguments": self.struct(params),
            "argument_fields": self.struct_fields(params),
        }

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Grid, order of tiles, and tensor maps. Operands: a, sfa, b, sfb, d, and c if consumers read it. Scales of
        1 x 128 are (rows, blocks) and contiguous along rows; scales of whole rows have one stride."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        p, config = self.of(params)
        m, n, k = spec.m, spec.n, spec.k
        rows, columns = left(m, config.block_m), left(n, config.block_n)
        order = raster(config, m, n, k, spec.num_sms)

        def operand(name: str, size: int, box: int) -> TensorMapSpec:
            stride = strides[name][0]
            return TensorMapSpec("u8", (k, size), (stride,), (SCALE_BLOCK, box), 128, l2_promotion(spec, stride))

        map_a, map_a_last = operand_maps(
            functools.partial(operand, "a", m), "a", m, config.block_m // config.cluster_n, rows
        )
        map_b, map_b_last = operand_maps(
            functools.partial(operand, "b", n), "b", n, config.block_n // config.cluster_m, columns
        )
        stride_d = strides["d"][0]
        values: dict[str, Any] = {
            "m": m,
            "n": n,
            "k": k,
            "last_rows": rows,
            "last_columns": columns,
            "early_stages": early_stages(config, m, k) if constant and pdl else 0,
            "raster": list(order.arguments),
            "evict_first": evict_first(spec, order, k, large_d=p.store == "tma"),
            "d_stride": stride_d,
            "map_a": map_a,
            "map_b": map_b,
            "map_a_last": map_a_last,
            "map_b_last": map_b_last,
        }
        if p.accumulate == "reads":
            values["c_stride"] = strides["c"][0]
        if p.scaling != "rowwise":
            values["map_scale_a"] = _scales_map("sfa", m, k, config.block_m, strides)
        if p.scaling == "1d1d":
            values["map_scale_b"] = _scales_map("sfb", n, k, config.block_n, strides)
        elif p.scaling == "1d2d":
            values["scale_b_stride_n"], values["scale_b_stride_k"] = strides["sfb"]
        else:
            values["scale_a_stride"], values["scale_b_stride"] = strides["sfa"][0], strides["sfb"][0]
        if p.store == "tma":
            width, size = box_columns(config, p.output), BYTES[p.output]
            values["map_d"] = Map(TensorMapSpec(p.output, (n, m), (stride_d * size,), (width, 64), width * size), "d")
        tiles = ceil_div(m, config.block_m * config.cluster_m) * ceil_div(n, config.block_n * config.cluster_n)
        shape = LaunchShape(
            grid=(min(tiles, max(1, spec.num_sms // config.cluster_size)) * config.cluster_size, 1, 1),
            block=config.num_threads,
            dynamic_shared=self.shared_bytes(params),
            cluster=(config.cluster_size, 1, 1),
            pdl=pdl,
        )
        return shape, values

    def features(self, spec: Spec, config: ScaledConfig) -> Features:
        """See ``gemm_features.py``."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        return count(_counts(config, spec.d.aligned, scaling_of(spec)), spec, config)

    def shared_bytes(self, params: KernelParams) -> int:
        """Stages, scales, staging buffers and barriers, in the layout of ``Fp8ScaledLayout``, which asserts the same
        number."""
        p, config = self.of(params)
        return config_shared_bytes(config, p.store == "tma", p.scaling, p.output)

    def entry(self, params: KernelParams) -> str:
        """Such as ``fp8_gemm_1d1d_f32_reduce_128x256_s3_p1_tma``."""
        p, c = self.of(params)
        parts = [
            f"fp8_gemm_{p.scaling}_{p.output}",
            {"none": "", "reads": "add", "reduces": "reduce"}[p.accumulate],
            f"{c.block_m}x{c.block_n}_s{c.num_stages}_p{c.num_partials}",
            f"c{c.cluster_m}x{c.cluster_n}" if c.cluster_size > 1 else "",
            p.store,
            *(f"{letter}{size}" for letter, size in zip("mnk", p.shape, strict=True) if size),
        ]
        return "_".join(filter(None, parts))

    def cases(self) -> list[KernelParams]:
        """The serving set with 1D1D and float32; each scaling, output, way to add C, and store; compile-time sizes."""
        tile, tall, lone = make_config(128, 128), make_config(256, 128), make_config(64, 64)
        wide, pair = make_config(128, 256), make_config(128, 256, (2, 1))
        square = make_config(128, 128, (1, 2))
        return [
            *(make_params(config) for config in self.configs(SM90)),
            make_params(wide, accumulate="reduces"),
            make_params(tall, output="bf16"),
            make_params(make_config(128, 160), accumulate="reads"),
            make_params(tile, output="bf16", accumulate="reads"),
            make_params(lone, output="f16"),
            make_params(make_config(128, 96), store="direct"),
            make_params(wide, scaling="1d2d"),
            make_params(pair, scaling="1d2d", accumulate="reduces"),
            make_params(tall, scaling="1d2d"),
            make_params(tile, scaling="1d2d", output="bf16", accumulate="reads"),
            make_params(square, scaling="1d2d", accumulate="reduces"),
            make_params(lone, scaling="1d2d", store="direct", accumulate="reads"),
            make_params(wide, scaling="rowwise", output="bf16"),
            make_params(make_config(256, 128, (2, 1)), scaling="1d2d"),
            make_params(make_config(128, 192), scaling="rowwise", output="bf16"),
            make_params(lone, scaling="rowwise", output="bf16", store="direct"),
            make_params(tile, scaling="rowwise", output="bf16", accumulate="reads"),
            make_params(tile, shape=(0, 2112, 7168)),
        ]


def scaling_of(spec: GemmSpec) -> str:
    """The value of `ScaledParams.scaling`."""
    return SCALINGS[spec.a.scaling, spec.b.scaling]


def adds(spec: GemmSpec) -> str:
    """How C is added. TMA adds to D if C is D and float32; otherwise consumers read C."""
    if spec.accumulate == "none":
        return "none"
    return "reduces" if spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.d.aligned else "reads"


def make_params(config: ScaledConfig, **options: object) -> ScaledParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: 1D1D, float32 output, TMA stores."""
    known = {"store": "tma", "scaling": "1d1d", "output": "f32", **options}
    config = fitted(config, str(known["scaling"]), str(known["output"]))
    return ScaledParams(kernel=KERNEL.name, arch=SM90.name, config=config, **known)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _counts(config: ScaledConfig, aligned: bool, scaling: str) -> Counts:
    """The performance model's counts."""
    return Counts(
        groups=config.num_consumers,
        slices=config.slices,
        width=config.block_n,
        mma_n=instruction_columns(config),
        direct=not aligned,
        store_warp=aligned,
        promotion=_PROMOTION[scaling],
    )


def _scales_map(name: str, size: int, k: int, box: int, strides: Strides) -> Map:
    """The map of scales (size, blocks of K) that are contiguous along rows. A box has a tile's rows in one block."""
    shape = (size, ceil_div(k, SCALE_BLOCK))
    return Map(TensorMapSpec("f32", shape, (strides[name][1] * 4,), (box, 1)), name)


KERNEL = Sm90Fp8Scaled()
