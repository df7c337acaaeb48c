"""Transposes scale factors of A into the layout that TMA loads: MN-major, columns padded to 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams, TransposeConfig
from ..spec import Spec, TransposeSpec, align, ceil_div
from .base import Argument, Kernel, Strides, Value


class TransposeScales(Kernel[TransposeConfig]):
    """See ``templates/include/transpose.cuh``."""

    name = "transpose_scales"
    archs = (SM90.name,)
    config_class = TransposeConfig

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except transposes of scales."""
        return None if isinstance(spec, TransposeSpec) else "it transposes float32 matrices"

    def configs(self, arch: ArchSpec) -> Iterator[TransposeConfig]:
        """One config: the kernel moves a few kilobytes, and takes only the time of its launch."""
        yield TransposeConfig(tile_rows=64, tile_columns=32, num_threads=256)

    def illegal(self, config: TransposeConfig, arch: ArchSpec) -> str | None:
        """None for the only config."""
        return None if config in self.configs(arch) else f"there is one config only: {next(self.configs(arch))}"

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``transpose_scales.cu.jinja``; its tile has 32 columns."""
        config = self._config(params)
        return {"tile_rows": config.tile_rows, "num_threads": config.num_threads}

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Transposes ``input`` to ``output``; strides in elements."""
        return (
            Argument("input", "const float*", operand="source"),
            Argument("output", "float*", operand="target"),
            Argument("rows", "u32"),
            Argument("columns", "u32"),
            Argument("stride_row", "i64"),
            Argument("stride_column", "i64"),
            Argument("stride_batch", "i64"),
            Argument("padded_rows", "u32"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Writes operand "source" (batch, rows, columns), with any strides, densely to "target" as (batch, columns,
        align(rows, 4))."""
        if not isinstance(spec, TransposeSpec):
            raise TypeError(f"{self.name} transposes scales, but it was asked for {spec}")
        config, padded = self._config(params), align(spec.rows, 4)
        tiles = ceil_div(padded, config.tile_rows) * ceil_div(spec.columns, config.tile_columns)
        stride_batch, stride_row, stride_column = strides["source"]
        shape = LaunchShape(grid=(tiles * spec.batch, 1, 1), block=config.num_threads, dynamic_shared=0, pdl=pdl)
        return shape, {
            "rows": spec.rows,
            "columns": spec.columns,
            "stride_row": stride_row,
            "stride_column": stride_column,
            "stride_batch": stride_batch,
            "padded_rows": padded,
        }

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """``transpose_scales``."""
        return self.name

    def cases(self) -> list[KernelParams]:
        """The one instance."""
        return [KernelParams(kernel=self.name, arch=SM90.name, config=next(self.configs(SM90)))]

    def _config(self, params: KernelParams) -> TransposeConfig:
        if not isinstance(params.config, TransposeConfig):
            raise TypeError(f"{self.name} takes a TransposeConfig, not {type(params.config).__name__}")
        return params.config


KERNEL = TransposeScales()
