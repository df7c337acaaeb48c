"""BF16 and FP16 GEMM for Hopper in groups along M: each group of rows of A has a matrix B of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import HalfConfig, HalfGroupedConfig, HalfGroupedParams, HalfParams, KernelParams
from ..spec import GemmSpec, Spec
from . import groups
from .base import Argument, Strides, Value
from .features import Features
from .half import BLOCK_K, box_columns, stages_that_fit
from .half_choice import padded
from .loads import l2_promotion
from .sm90_half_gemm import Sm90HalfGemm, config_shared_bytes, make_config

SERVING: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (128, 256))
"""(block_m, block_n) of the serving set. On an H100, in single calls of 28 shapes, the best of these was within 3% of
the best of all, but for one shape (8%)."""


class Sm90HalfGrouped(Sm90HalfGemm):
    """The kernel without groups with another scheduler; see ``templates/include/groups.cuh``."""

    name = "sm90_half_grouped"
    config_class = HalfGroupedConfig

    @property
    def template(self) -> str:
        """The template of the kernel without groups."""
        return "sm90_half_gemm.cu.jinja"

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """It takes K-major A, and writes bf16 or fp16 without C."""
        if spec.grouping not in groups.GROUPINGS:
            return "it computes groups along M"
        if spec.a.major != "k":
            return "A must be K-major"
        if spec.b.major != "k" and spec.k % BLOCK_K:
            return f"K of an MN-major B must be a multiple of {BLOCK_K}, not {spec.k}"
        if spec.d.dtype != spec.a.dtype or spec.accumulate != "none":
            return "it writes the operands' dtype and adds no C"
        return None

    def configs(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """`SERVING`, with as many stages as fit."""
        for block_m, block_n in SERVING:
            config = grouped(make_config(block_m, block_n, arch=arch))
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """The tiles of the kernel without groups that are not shared by clusters."""
        for config in super().legal(arch):
            if config.cluster_size == 1 and config.ctas_per_sm == 1:
                yield grouped(config)

    def illegal(self, config: HalfConfig, arch: ArchSpec) -> str | None:
        """Also refuses clusters, whose CTAs would have to stay in one group, and two CTAs on an SM."""
        if config.cluster_size > 1 or config.ctas_per_sm > 1:
            return "it runs one CTA on an SM, without clusters"
        return super().illegal(config, arch)

    def runs(self, spec: Spec, config: HalfConfig) -> bool:
        """Also refuses tiles that would reach from one group into the next."""
        if not super().runs(spec, config) or not isinstance(spec, GemmSpec):
            return False
        return spec.grouping == "masked" or spec.alignment % config.block_m == 0

    def worthwhile(self, spec: Spec, config: HalfConfig) -> bool:
        """Whether the rows that are expected in a group fill more than half of the tile."""
        return isinstance(spec, GemmSpec) and not padded(groups.one_group(spec).m, config)

    def params(self, spec: Spec, config: HalfConfig, arch: ArchSpec) -> HalfGroupedParams:
        """See `Kernel.params`. Adds the form of the groups and the size of their table. As many stages as fit beside
        the table."""
        known = super().params(spec, config, arch)
        assert isinstance(spec, GemmSpec)  # checked above
        grouping = spec.grouping
        found = HalfGroupedParams(
            **{field.name: getattr(known, field.name) for field in fields(HalfParams)},
            grouping=grouping,
            segments=groups.segments(grouping, spec.groups),
        )
        return fitted(found, arch)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """The constants of the kernel without groups, and the form of the groups."""
        p = self.grouped(params)
        return {
            **super().constants(params),
            "grouping": groups.GROUPINGS[p.grouping],
            "segments": p.segments,
            "a_rows": groups.a_rows(p.grouping, self.of(params)[1]),
        }

    def grouped(self, params: KernelParams) -> HalfGroupedParams:
        """``params`` with this family's type. Raises TypeError if they belong to another family."""
        if not isinstance(params, HalfGroupedParams):
            raise TypeError(f"{self.name} takes HalfGroupedParams, not {type(params).__name__}")
        return params

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The parameters of the kernel without groups, with another order of tiles, and the groups."""
        return groups.with_groups(super().arguments(params))

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, b, layout, d. Matrices of all groups lie one after the other in one tensor map."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        p, config = self.of(params)
        rows = spec.m * (spec.groups if spec.grouping == "masked" else 1)

        def k_major(name: str, size: int, box: int) -> Map:
            stride = strides[name][0] * 2
            promotion = l2_promotion(spec, stride, 2)
            return Map(TensorMapSpec(spec.a.dtype, (spec.k, size), (stride,), (BLOCK_K, box), 128, promotion), name)

        map_a = k_major("a", rows, groups.a_rows(spec.grouping, config))
        if spec.b.major == "k":
            map_b = k_major("b", spec.groups * spec.n, config.block_n)
        else:
            stride = strides["b"][1] * 2
            shape = (spec.n, spec.groups * spec.k)
            promotion = l2_promotion(spec, stride, 2)
            map_b = Map(TensorMapSpec(spec.b.dtype, shape, (stride,), (64, BLOCK_K), 128, promotion), "b")
        values: dict[str, Any] = groups.launch_values(spec, config, strides) | {
            "map_a": map_a,
            "map_b": map_b,
            "map_a_last": map_a,
            "map_b_last": map_b,
        }
        if self.has_output_map(p):
            columns = box_columns(config.block_n, p.output)
            stride_d = strides["d"][0] * 2
            values["map_d"] = Map(TensorMapSpec(p.output, (spec.n, rows), (stride_d,), (columns, 64), columns * 2), "d")
        return groups.launch_shape(spec, config, self.shared_bytes(params), pdl), values

    def features(self, spec: Spec, config: HalfConfig) -> Features:
        """The features of about as much work without groups."""
        return groups.with_weights(
            super().features(groups.expected(groups.as_gemm(spec), config), config), groups.as_gemm(spec), 2
        )

    def shared_bytes(self, params: KernelParams) -> int:
        """The shared memory of the kernel without groups, and the table of groups."""
        p = self.grouped(params)
        return super().shared_bytes(params) + groups.table_bytes(p.grouping, p.segments)

    def entry(self, params: KernelParams) -> str:
        """Such as ``m_grouped_bf16_gemm_nt_128x256_s4_masked_g32_tma``."""
        p = self.grouped(params)
        form = f"{p.grouping}_g{p.segments}"
        return "m_grouped_" + groups.form_in_name(super().entry(params), p.store, form)

    def cases(self) -> list[KernelParams]:
        """The serving set; each form, layout, dtype and store."""
        tile, lone = make_config(128, 128), make_config(64, 64)
        return [
            *(make_params(config) for config in self.configs(SM90)),
            make_params(make_config(128, 256), grouping="masked", majors="km"),
            make_params(lone, grouping="masked", segments=512, store="direct"),
            make_params(tile, dtype="f16", output="f16", grouping="psum", segments=256),
        ]


def grouped(config: HalfConfig) -> HalfGroupedConfig:
    """The same config of this family."""
    return HalfGroupedConfig(**vars(config))


def fitted(params: HalfGroupedParams, arch: ArchSpec = SM90) -> HalfGroupedParams:
    """``params`` with no more stages than fit beside the table of groups."""
    config = params.config
    assert isinstance(config, HalfConfig)
    rest = config_shared_bytes(replace(config, num_stages=0), params.store == "tma", params.output)
    rest += groups.table_bytes(params.grouping, params.segments)
    return replace(params, config=replace(config, num_stages=stages_that_fit(arch, config, rest, config.num_stages)))


def make_params(config: HalfConfig, **options: object) -> HalfGroupedParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: bf16, K-major B, labels, TMA stores."""
    known = {"store": "tma", **options}
    return fitted(HalfGroupedParams(kernel=KERNEL.name, arch=SM90.name, config=grouped(config), **known))  # type: ignore[arg-type]


KERNEL = Sm90HalfGrouped()
