"""Dense FP8 GEMM for Hopper with one scale for each row of A and of B, promotion after every 128 of K, bf16 output."""

from __future__ import annotations

from collections.abc import Iterator

from ..arch import SM90, ArchSpec
from ..params import KernelParams, RowsConfig, UprightConfig
from ..spec import GemmSpec, Spec
from .base import Argument, Strides, Value
from .sm90_fp8_gemm import Sm90Fp8Gemm, make_config


class Sm90Fp8Rows(Sm90Fp8Gemm):
    """The kernel for 1x128 and 128x128 scales, but A's scales are those of a tile, and the epilogue multiplies by B's.
    Each stage keeps the room for scales, which is unused: so both kernels have the same configs."""

    name = "sm90_fp8_rows"
    config_class = RowsConfig
    label = "rows "
    scaling = "kRowwise"
    prefix = "fp8_gemm_rowwise_bf16"
    scalings = ("row", "row")
    scale_arguments = (
        Argument("scale_a", "const float*", operand="sfa"),
        Argument("scale_a_stride", "i64"),
        Argument("scale_b", "const float*", operand="sfb"),
        Argument("scale_b_stride", "i64"),
    )
    scale_maps = ()

    @property
    def template(self) -> str:
        """The template of the kernel for 1x128 and 128x128 scales."""
        return "sm90_fp8_gemm.cu.jinja"

    def refuses(self, spec: Spec) -> str | None:
        """Also refuses a D whose rows do not begin on 16-byte boundaries: a kernel for any scaling writes it."""
        reason = super().refuses(spec)
        if reason is None and isinstance(spec, GemmSpec) and not spec.d.aligned:
            return "rows of D must begin on 16-byte boundaries"
        return reason

    def configs(self, arch: ArchSpec) -> Iterator[UprightConfig]:
        """Those of the other kernel that do not split K."""
        yield from map(rows, super().configs(arch))

    def legal(self, arch: ArchSpec) -> Iterator[UprightConfig]:
        """Those of the other kernel that do not split K."""
        yield from map(rows, super().legal(arch))

    def illegal(self, config: UprightConfig, arch: ArchSpec) -> str | None:
        """Also refuses to split K, since the epilogue multiplies whole sums, and what has too few registers."""
        if config.cluster_k > 1:
            return f"K cannot be split over {config.cluster_k} CTAs"
        if config.cluster_size > 1 and self.mma_n(config) < config.block_n:
            return "clusters whose consumers multiply in two parts have too few registers for scales of rows"
        return super().illegal(config, arch)

    def scale_values(self, config: UprightConfig, spec: GemmSpec, strides: Strides) -> dict[str, Value]:
        """Strides of scales: zero where all rows share one."""
        return {"scale_a_stride": strides["sfa"][0], "scale_b_stride": strides["sfb"][0]}

    def cases(self) -> list[KernelParams]:
        """The serving set, and compile-time sizes."""
        sizes = make_params(rows(make_config(128, 128)), (0, 2112, 7168))
        return [*(make_params(config) for config in self.configs(SM90)), sizes]


def rows(config: UprightConfig) -> RowsConfig:
    """The same tile for this kernel."""
    return RowsConfig(**vars(config))


def make_params(config: UprightConfig, shape: tuple[int, int, int] = (0, 0, 0)) -> KernelParams:
    """The identity of this kernel with ``config``."""
    return KernelParams(kernel=KERNEL.name, arch=SM90.name, config=config, store="tma", shape=shape)


KERNEL = Sm90Fp8Rows()
