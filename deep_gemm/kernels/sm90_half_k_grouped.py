"""BF16 and FP16 GEMM for Hopper in groups along K: weight gradients of experts. Each group has its own matrix D."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import HalfConfig, HalfGroupedParams, HalfKGroupedConfig, HalfParams, KernelParams
from ..spec import GemmSpec, Spec
from . import groups
from .base import Argument, Strides, Value
from .features import Features
from .gemm_features import Counts
from .half import BLOCK_K, BYTES, box_columns, stages_that_fit
from .loads import l2_promotion
from .sm90_half_gemm import Sm90HalfGemm, config_shared_bytes, make_config

SERVING: tuple[tuple[int, int], ...] = ((128, 128), (128, 256), (256, 128))
"""(block_m, block_n) of the serving set. On an H100 one of the larger two was the best of all in four of five
shapes, and within 4% of it in the other."""

_STAGED = 2
"""Staging buffers of a consumer."""


class Sm90HalfKGrouped(Sm90HalfGemm):
    """The dense kernel with another scheduler; see ``templates/include/groups.cuh``. A (K, M) and B (K, N) are
    MN-major, and K is the sum over all groups."""

    name = "sm90_half_k_grouped"
    config_class = HalfKGroupedConfig

    @property
    def template(self) -> str:
        """The template of the kernel without groups."""
        return "sm90_half_gemm.cu.jinja"

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """It takes MN-major operands."""
        if spec.grouping != "k":
            return "it computes groups along K"
        if (spec.a.major, spec.b.major) != ("mn", "mn"):
            return "A and B must be MN-major"
        return None

    def configs(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """`SERVING`, with as many stages as fit."""
        for block_m, block_n in SERVING:
            config = along_k(make_config(block_m, block_n, arch=arch), arch)
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[HalfConfig]:
        """The tiles of the kernel without groups that are whole boxes, without clusters."""
        for config in super().legal(arch):
            if self.illegal(config, arch) is None:
                yield along_k(config, arch)

    def illegal(self, config: HalfConfig, arch: ArchSpec) -> str | None:
        """Also refuses clusters, two CTAs on an SM, and tiles that are not whole boxes of 64 rows."""
        if config.cluster_size > 1 or config.ctas_per_sm > 1:
            return "it runs one CTA on an SM, without clusters"
        if config.block_n % 64:
            return f"block_n must be a multiple of 64, not {config.block_n}"
        return super().illegal(config, arch)

    def params(self, spec: Spec, config: HalfConfig, arch: ArchSpec) -> HalfGroupedParams:
        """See `Kernel.params`. Adds the size of the table of groups. Stages are as many as fit beside the table."""
        known = super().params(spec, config, arch)
        found = HalfGroupedParams(
            **{field.name: getattr(known, field.name) for field in fields(HalfParams)},
            grouping="k",
            segments=groups.segments("k", groups.as_gemm(spec).groups),
        )
        return fitted(found, arch)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """The constants of the kernel without groups, and the size of the table."""
        return super().constants(params) | {
            "grouping": "kAlongK",
            "segments": self.grouped(params).segments,
            "buffers": _STAGED,
            "late": False,
        }

    def grouped(self, params: KernelParams) -> HalfGroupedParams:
        """``params`` with this family's type. Raises TypeError if they belong to another family."""
        if not isinstance(params, HalfGroupedParams):
            raise TypeError(f"{self.name} takes HalfGroupedParams, not {type(params).__name__}")
        return params

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The parameters of the kernel without groups, with another order of tiles; the groups; and strides from matrix
        to matrix."""
        return groups.along_k_arguments(super().arguments(params), self.grouped(params).accumulate)

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, b, layout (K of each group), d, and c if consumers read it. d and c have three strides."""
        gemm = groups.as_gemm(spec)
        p, config = self.of(params)

        def spread(name: str, size: int) -> Map:
            stride = strides[name][1] * 2
            promotion = l2_promotion(gemm, stride, 2)
            return Map(TensorMapSpec(gemm.a.dtype, (size, gemm.k), (stride,), (64, BLOCK_K), 128, promotion), name)

        map_a, map_b = spread("a", gemm.m), spread("b", gemm.n)
        values = groups.along_k_values(gemm, config, strides, element_bytes=2) | {
            "map_a": map_a,
            "map_b": map_b,
            "map_a_last": map_a,
            "map_b_last": map_b,
        }
        if self.has_output_map(p):
            width = box_columns(config.block_n, p.output)
            values["map_d"] = groups.output_map(gemm, strides, width, BYTES[p.output])
        return groups.along_k_shape(gemm, config, self.shared_bytes(params), pdl), values

    def counts(self, config: HalfConfig, output: str, aligned: bool) -> Counts:
        """Elements of D cost what 16-bit ones do. The kernel without groups has 128x128 tiles in pairs for few blocks
        of K; here they would be alone, and 128x256 tiles take 10% less time."""
        return super().counts(config, output, aligned)._replace(element=1.0, buffered=0)

    def features(self, spec: Spec, config: HalfConfig) -> Features:
        """The features of one product of as many tiles, with a group's part of K."""
        return super().features(groups.one_product(groups.as_gemm(spec), config, BLOCK_K), config)

    def shared_bytes(self, params: KernelParams) -> int:
        """The shared memory of the kernel without groups, and the table of groups."""
        p = self.grouped(params)
        assert isinstance(p.config, HalfConfig)
        return _shared(p, p.config)

    def entry(self, params: KernelParams) -> str:
        """Such as ``k_grouped_bf16_gemm_tn_f32_reduce_128x256_s4_g32_tma``."""
        p = self.grouped(params)
        return "k_grouped_" + groups.form_in_name(super().entry(params), p.store, f"g{p.segments}")

    def cases(self) -> list[KernelParams]:
        """The serving set added to float32; each output, way to add C, and store."""
        tile, tall = make_config(128, 128), make_config(256, 128)
        return [
            *(make_params(config, output="f32", accumulate="reduces") for config in self.configs(SM90)),
            make_params(tall, output="f32", accumulate="reads"),
            make_params(tile, accumulate="reads", segments=256),
            make_params(tile, dtype="f16", output="f16", store="direct"),
        ]


def along_k(config: HalfConfig, arch: ArchSpec = SM90) -> HalfKGroupedConfig:
    """The same config of this family, with no more stages than fit beside float32 output and the smallest table."""
    rest = _shared(_WIDE, replace(config, num_stages=0))
    stages = stages_that_fit(arch, config, rest, config.num_stages)
    return HalfKGroupedConfig(**{**vars(config), "num_stages": stages})


def _shared(params: HalfGroupedParams, config: HalfConfig) -> int:
    """Stages, two staging buffers of each consumer, the table of groups, and barriers."""
    total = config_shared_bytes(config, False) + groups.table_bytes("k", params.segments)
    if params.store == "tma":
        width = box_columns(config.block_n, params.output)
        total += config.num_consumers * _STAGED * 64 * width * BYTES[params.output]
    return total


_WIDE = HalfGroupedParams("", "", HalfKGroupedConfig(128, 128, BLOCK_K, 0, 2), "tma", output="f32", grouping="k")


def fitted(params: HalfGroupedParams, arch: ArchSpec = SM90) -> HalfGroupedParams:
    """``params`` with no more stages than fit beside the table of groups and the staging buffers."""
    config = params.config
    if not isinstance(config, HalfConfig):
        raise TypeError(f"it takes a HalfConfig, not a {type(config).__name__}")
    rest = _shared(params, replace(config, num_stages=0))
    return replace(params, config=replace(config, num_stages=stages_that_fit(arch, config, rest, config.num_stages)))


def make_params(config: HalfConfig, **options: object) -> HalfGroupedParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: bf16 out, nothing added, TMA stores."""
    known = {"store": "tma", "majors": "mm", "grouping": "k", **options}
    return fitted(HalfGroupedParams(kernel=KERNEL.name, arch=SM90.name, config=along_k(config), **known))  # type: ignore[arg-type]


KERNEL = Sm90HalfKGrouped()
