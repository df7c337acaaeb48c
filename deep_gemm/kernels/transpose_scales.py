"""Scale factors of A into the layout that TMA loads: MN-major, columns padded to 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Parameter, Pointer
from ..params import GemmConfig, KernelParams, align, ceil_div
from .base import Kernel

TILE_ROWS = 64
TILE_COLUMNS = 32
"""What one CTA moves; the template's tile has the same number of columns."""

NUM_THREADS = 256


class TransposeScales(Kernel[GemmConfig]):
    """See ``templates/include/transpose.cuh``."""

    name = "transpose_scales"
    archs = (SM90.name,)
    config_class = GemmConfig

    def configs(self, arch: ArchSpec) -> Iterator[GemmConfig]:
        """One: the kernel moves a few kilobytes, and its launch is all that it costs."""
        yield GemmConfig(block_m=TILE_ROWS, block_n=TILE_COLUMNS, block_k=1, num_stages=1, num_consumers=1)

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        """None for the one config that there is."""
        return None if config in self.configs(arch) else f"there is one config only: {next(self.configs(arch))}"

    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``transpose_scales.cu.jinja``."""
        return {"name": self.entry(params), "tile_rows": params.config.block_m, "num_threads": NUM_THREADS}

    def shared_bytes(self, params: KernelParams) -> int:
        """None is dynamic."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """``transpose_scales``."""
        return self.name

    def cases(self) -> list[KernelParams]:
        """The one instance."""
        return [make_params(SM90)]


def make_params(arch: ArchSpec) -> KernelParams:
    """The identity of this kernel."""
    return KernelParams(
        kernel=KERNEL.name, arch=arch.name, config=next(KERNEL.configs(arch)), d_dtype="f32", store="direct"
    )


def launch(
    shape: tuple[int, int, int], strides: tuple[int, int, int], pdl: bool
) -> tuple[LaunchShape, list[Parameter]]:
    """Launch shape and parameters for scales of ``shape`` (batch, rows, columns) and ``strides`` (elements), operand
    "source", to be written densely to "target" as (batch, columns, align(rows, 4))."""
    batch, rows, columns = shape
    padded = align(rows, 4)
    tiles = ceil_div(padded, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS)
    args: list[Parameter] = [
        Pointer("source"),
        Pointer("target"),
        ("u32", rows),
        ("u32", columns),
        ("i64", strides[1]),
        ("i64", strides[2]),
        ("i64", strides[0]),
        ("u32", padded),
    ]
    return LaunchShape(grid=(tiles * batch, 1, 1), block=NUM_THREADS, dynamic_shared=0, pdl=pdl), args


KERNEL = TransposeScales()
