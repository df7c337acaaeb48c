"""FP8 GEMM for Hopper in groups along M: each group of rows of A has a matrix B of its own. Scales: 1x128, 128x128."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams, ScaledConfig, ScaledGroupedConfig, ScaledGroupedParams, ScaledParams
from ..spec import SCALE_BLOCK, GemmSpec, Spec, ceil_div
from . import groups
from .base import Argument, Strides, Value
from .features import Features
from .loads import l2_promotion
from .scaled import BYTES, scaling_of
from .scaled_tiles import box_columns, make_config
from .sm90_fp8_scaled import Sm90Fp8Scaled

_NARROW = 32
"""Columns of tiles for few rows. On an H100, in single calls of 14 shapes with 4 to 20 expected rows in 3 to 64 groups,
they took 0.96 of the time of 128 columns and 0.98 of that of 64, and were slower in none by more than 1%."""

SERVING: tuple[tuple[int, int, int], ...] = ((64, _NARROW, 2), (64, 128, 2), (128, 128, 1), (128, 256, 1))
"""(block_m, block_n, staging buffers) of the serving set. On an H100, in single calls of 28 shapes, the best of these
was within 3% of the best of all, but for two shapes. The narrow tiles had 64 columns then."""


class Sm90Fp8Grouped(Sm90Fp8Scaled):
    """The kernel without groups with another scheduler; see ``templates/include/groups.cuh``."""

    name = "sm90_fp8_grouped"
    config_class = ScaledGroupedConfig

    @property
    def template(self) -> str:
        """The template of the kernel without groups."""
        return "sm90_fp8_scaled.cu.jinja"

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """It scales 1x128 by 128x128 blocks, and writes bf16 without C."""
        if spec.grouping not in groups.GROUPINGS:
            return "it computes groups along M"
        if scaling_of(spec) != "1d2d":
            return f"scales must be 1x128 and 128x128, not {spec.a.scaling} and {spec.b.scaling}"
        if spec.d.dtype != "bf16" or spec.accumulate != "none":
            return "it writes bf16 and adds no C"
        return None

    def configs(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """`SERVING`, with as many stages as fit."""
        for block_m, block_n, buffers in SERVING:
            partials = 2 if block_m == 64 and block_n < 128 else 1
            config = grouped(make_config(block_m, block_n, buffers=buffers, partials=partials, arch=arch))
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """The tiles of the kernel without groups that are not shared by clusters and that hold whole blocks of B's
        scales."""
        for config in super().legal(arch):
            narrow = config.num_consumers == 1 or config.num_partials == 1
            if config.cluster_size == 1 and narrow and config.block_n & (config.block_n - 1) == 0:
                yield grouped(config)

    def illegal(self, config: ScaledConfig, arch: ArchSpec) -> str | None:
        """Also refuses clusters, whose CTAs must stay in one group, and two sets of sums with two consumers."""
        if config.cluster_size > 1:
            return "it runs without clusters"
        if config.num_consumers > 1 and config.num_partials > 1:
            return "two consumers have one set of partial sums"
        return super().illegal(config, arch)

    def runs(self, spec: Spec, config: ScaledConfig) -> bool:
        """Also refuses tiles that would reach from one group into the next."""
        if not super().runs(spec, config) or not isinstance(spec, GemmSpec):
            return False
        return spec.grouping == "masked" or spec.alignment % config.block_m == 0

    def worthwhile(self, spec: Spec, config: ScaledConfig) -> bool:
        """Whether the rows that are expected in a group fill more than half of the tile. For few rows only narrow tiles
        are worthwhile."""
        if not isinstance(spec, GemmSpec) or not super().worthwhile(groups.one_group(spec), config):
            return False
        return config.block_n == _NARROW or not groups.is_low(spec, config)

    def params(self, spec: Spec, config: ScaledConfig, arch: ArchSpec) -> ScaledGroupedParams:
        """See `Kernel.params`. Adds the form of the groups and the size of their table, and takes as many stages as fit
        beside it."""
        known = super().params(spec, config, arch)
        grouping = groups.as_gemm(spec).grouping
        found = ScaledGroupedParams(
            **{field.name: getattr(known, field.name) for field in fields(ScaledParams)},
            grouping=grouping,
            segments=groups.segments(grouping, groups.as_gemm(spec).groups),
        )
        return groups.fitted(found, arch)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """The constants of the kernel without groups, and the form of the groups."""
        p = self.grouped(params)
        return {
            **super().constants(params),
            "grouping": groups.GROUPINGS[p.grouping],
            "segments": p.segments,
            "a_rows": groups.a_rows(p.grouping, self.of(params)[1]),
        }

    def grouped(self, params: KernelParams) -> ScaledGroupedParams:
        """``params`` as this family's; TypeError if they are another's."""
        if not isinstance(params, ScaledGroupedParams):
            raise TypeError(f"{self.name} takes ScaledGroupedParams, not {type(params).__name__}")
        return params

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The arguments of the kernel without groups, another order of tiles, the groups, and the stride of B's scales
        from group to group."""
        return (*groups.with_groups(super().arguments(params)), Argument("scale_b_stride_g", "i64"))

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, sfa, b, sfb, layout, d. Matrices of all groups lie one after the other in one tensor map. With
        "masked", A's scales of all groups are the rows of one matrix of (groups x blocks of K, rows of a group)."""
        gemm = groups.as_gemm(spec)
        p, config = self.of(params)
        masked = gemm.grouping == "masked"
        rows, blocks = gemm.m * (gemm.groups if masked else 1), ceil_div(gemm.k, SCALE_BLOCK)

        def operand(name: str, size: int, box: int) -> Map:
            stride = strides[name][0]
            promotion = l2_promotion(gemm, stride)
            return Map(TensorMapSpec("u8", (gemm.k, size), (stride,), (SCALE_BLOCK, box), 128, promotion), name)

        map_a = operand("a", rows, groups.a_rows(gemm.grouping, config))
        map_b = operand("b", gemm.groups * gemm.n, config.block_n)
        scales = (gemm.m, blocks * (gemm.groups if masked else 1))
        values: dict[str, Any] = groups.launch_values(gemm, config, strides) | {
            "map_a": map_a,
            "map_b": map_b,
            "map_a_last": map_a,
            "map_b_last": map_b,
            "map_scale_a": Map(TensorMapSpec("f32", scales, (strides["sfa"][1] * 4,), (config.block_m, 1)), "sfa"),
            "scale_b_stride_g": strides["sfb"][0],
            "scale_b_stride_n": strides["sfb"][1],
            "scale_b_stride_k": strides["sfb"][2],
        }
        if self.has_output_map(p):
            width, size = box_columns(config, p.output), BYTES[p.output]
            stride_d = strides["d"][0] * size
            values["map_d"] = Map(TensorMapSpec(p.output, (gemm.n, rows), (stride_d,), (width, 64), width * size), "d")
        return groups.launch_shape(gemm, config, self.shared_bytes(params), pdl), values

    def features(self, spec: Spec, config: ScaledConfig) -> Features:
        """The features of about as much work without groups."""
        gemm = groups.as_gemm(spec)
        return groups.with_weights(super().features(groups.expected(gemm, config), config), gemm, 1)

    def shared_bytes(self, params: KernelParams) -> int:
        """The bytes of the kernel without groups, and those of the table of groups."""
        p = self.grouped(params)
        return super().shared_bytes(params) + groups.table_bytes(p.grouping, p.segments)

    def entry(self, params: KernelParams) -> str:
        """Such as ``m_grouped_fp8_gemm_1d2d_bf16_128x256_s3_p1_masked_g32_tma``."""
        p = self.grouped(params)
        form = f"{p.grouping}_g{p.segments}"
        return "m_grouped_" + groups.form_in_name(super().entry(params), p.store, form)

    def cases(self) -> list[KernelParams]:
        """The serving set; each form and store."""
        tile, lone = make_config(128, 128, partials=1), make_config(64, 64)
        return [
            *(make_params(config) for config in self.configs(SM90)),
            make_params(tile, grouping="psum"),
            make_params(make_config(128, 256, buffers=1), grouping="masked"),
            make_params(lone, grouping="masked", segments=512, store="direct"),
        ]


def grouped(config: ScaledConfig) -> ScaledGroupedConfig:
    """The same config of this family."""
    return ScaledGroupedConfig(**vars(config))


def make_params(config: ScaledConfig, **options: object) -> ScaledGroupedParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: labels, TMA stores."""
    known = {"store": "tma", "scaling": "1d2d", "output": "bf16", **options}
    return groups.fitted(ScaledGroupedParams(kernel=KERNEL.name, arch=SM90.name, config=grouped(config), **known))  # type: ignore[arg-type]


KERNEL = Sm90Fp8Grouped()
