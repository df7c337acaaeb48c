"""FP8 GEMM for Hopper in groups along K: weight gradients of experts, with 1x128 scales on both sides. Each group has
K-major operands and a matrix D of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from ..arch import SM90, ArchSpec
from ..jit.binary import PostPass
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams, ScaledConfig, ScaledGroupedParams, ScaledKGroupedConfig, ScaledParams
from ..spec import SCALE_BLOCK, GemmSpec, Spec
from . import groups
from .base import Argument, Strides, Value
from .features import Features
from .k_group_maps import BOX_ROWS
from .scaled import BYTES, scaling_of
from .scaled_tiles import box_columns, make_config
from .sm90_fp8_scaled import Sm90Fp8Scaled

SERVING: tuple[tuple[int, int, int], ...] = ((128, 64, 2), (128, 128, 1))
"""(block_m, block_n, sets of partial sums) of the serving set. On an H100 128 x 128 tiles with one set were the fastest
of all in single calls of five shapes; two sets took 2 to 8% longer."""

_ONE_MAP = ("map_a", "map_b", "map_a_last", "map_b_last")


class Sm90Fp8KGrouped(Sm90Fp8Scaled):
    """The dense kernel with another scheduler, and with tensor maps that `KGroupMaps` made. See
    ``templates/include/groups.cuh``."""

    name = "sm90_fp8_k_grouped"
    config_class = ScaledKGroupedConfig

    @property
    def template(self) -> str:
        """The template of the kernel without groups."""
        return "sm90_fp8_scaled.cu.jinja"

    def post_pass(self, params: KernelParams | None = None) -> PostPass | None:
        """None: 1D1D has no runs of one factor."""
        return None

    def refuses_groups(self, spec: GemmSpec) -> str | None:
        """It scales 1x128 on both sides."""
        if spec.grouping != "k":
            return "it computes groups along K"
        if scaling_of(spec) != "1d1d":
            return f"scales must be 1x128 on both sides, not {spec.a.scaling} and {spec.b.scaling}"
        return None

    def configs(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """`SERVING`, with as many stages as fit."""
        for block_m, block_n, partials in SERVING:
            config = along_k(make_config(block_m, block_n, partials=partials, arch=arch))
            if self.illegal(config, arch) is None:
                yield config

    def legal(self, arch: ArchSpec) -> Iterator[ScaledConfig]:
        """The tiles of the kernel without groups that are whole boxes, without clusters."""
        for config in super().legal(arch):
            if self.illegal(config, arch) is None:
                yield along_k(config)

    def illegal(self, config: ScaledConfig, arch: ArchSpec) -> str | None:
        """Also refuses clusters, and tiles that are not whole boxes."""
        if config.cluster_size > 1:
            return "it runs without clusters"
        if config.block_n % BOX_ROWS:
            return f"block_n must be a multiple of {BOX_ROWS}, not {config.block_n}"
        return super().illegal(config, arch)

    def params(self, spec: Spec, config: ScaledConfig, arch: ArchSpec) -> ScaledGroupedParams:
        """See `Kernel.params`. Adds the size of the table of groups. Stages are as many as fit beside the table."""
        known = super().params(spec, config, arch)
        found = ScaledGroupedParams(
            **{field.name: getattr(known, field.name) for field in fields(ScaledParams)},
            grouping="k",
            segments=groups.segments("k", groups.as_gemm(spec).groups),
        )
        return groups.fitted(found, arch)

    def constants(self, params: KernelParams) -> dict[str, str | int | bool]:
        """The constants of the kernel without groups, and the size of the table."""
        return super().constants(params) | {
            "grouping": "kAlongK",
            "segments": self.grouped(params).segments,
            "a_rows": 64,
        }

    def grouped(self, params: KernelParams) -> ScaledGroupedParams:
        """``params`` with this family's type. Raises TypeError if they belong to another family."""
        if not isinstance(params, ScaledGroupedParams):
            raise TypeError(f"{self.name} takes ScaledGroupedParams, not {type(params).__name__}")
        return params

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The parameters of the kernel without groups, with another order of tiles. A's and B's maps are in memory.
        Further parameters are the groups, and strides from matrix to matrix."""
        known = (x for x in super().arguments(params) if x.name not in _ONE_MAP)
        maps = Argument("maps", "const TensorMap*")
        return groups.along_k_arguments(known, self.grouped(params).accumulate, maps)

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: maps, sfa, sfb, layout (K of each group), d, and c if consumers read it. Scales are (rows, blocks
        of K of all groups) with contiguous rows; the strides of "blocks" are how many blocks they have. d and c have
        three strides."""
        gemm = groups.as_gemm(spec)
        p, config = self.of(params)

        def scales(name: str, size: int, box: int, blocks: int) -> Map:
            return Map(TensorMapSpec("f32", (size, blocks), (strides[name][1] * 4,), (box, 1)), name)

        values = groups.along_k_values(gemm, config, strides, element_bytes=1) | {
            "map_scale_a": scales("sfa", gemm.m, config.block_m, strides["blocks"][0]),
            "map_scale_b": scales("sfb", gemm.n, config.block_n, strides["blocks"][1]),
        }
        if self.has_output_map(p):
            values["map_d"] = groups.output_map(gemm, strides, box_columns(config, p.output), BYTES[p.output])
        return groups.along_k_shape(gemm, config, self.shared_bytes(params), pdl), values

    def features(self, spec: Spec, config: ScaledConfig) -> Features:
        """The features of one product of as many tiles, with a group's part of K."""
        return super().features(groups.one_product(groups.as_gemm(spec), config, SCALE_BLOCK), config)

    def shared_bytes(self, params: KernelParams) -> int:
        """The shared memory of the kernel without groups, and the table of groups."""
        return super().shared_bytes(params) + groups.table_bytes("k", self.grouped(params).segments)

    def entry(self, params: KernelParams) -> str:
        """Such as ``k_grouped_fp8_gemm_1d1d_f32_reduce_128x128_s5_p1_g32_tma``."""
        p = self.grouped(params)
        return "k_grouped_" + groups.form_in_name(super().entry(params), p.store, f"g{p.segments}")

    def cases(self) -> list[KernelParams]:
        """The serving set added to float32; each output, way to add C, and store."""
        tile = make_config(128, 128, partials=1)
        return [
            *(make_params(config, accumulate="reduces") for config in self.configs(SM90)),
            make_params(tile, output="bf16", accumulate="reads", segments=256),
            make_params(tile, accumulate="reads", store="direct"),
        ]


def along_k(config: ScaledConfig) -> ScaledKGroupedConfig:
    """The same config of this family."""
    return ScaledKGroupedConfig(**vars(config))


def make_params(config: ScaledConfig, **options: object) -> ScaledGroupedParams:
    """The identity of this kernel with ``config``. Defaults of ``options``: float32 out, nothing added, TMA stores."""
    known = {"store": "tma", "scaling": "1d1d", "output": "f32", "grouping": "k", **options}
    return groups.fitted(ScaledGroupedParams(kernel=KERNEL.name, arch=SM90.name, config=along_k(config), **known))  # type: ignore[arg-type]


KERNEL = Sm90Fp8KGrouped()
