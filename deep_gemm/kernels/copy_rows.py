"""Copies operands with two bytes per element into rows that TMA can address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelConfig, KernelParams
from ..spec import CopySpec, Spec, ceil_div
from .base import Argument, Kernel, Strides, Value

MAX_CTAS = 1 << 14
"""CTAs of one launch at most. Each CTA loops over tiles."""


@dataclass(frozen=True)
class CopyConfig(KernelConfig):
    """The tile that one CTA of ``num_threads`` threads copies at a time."""

    tile_rows: int
    tile_columns: int
    num_threads: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA writes at a time."""
        return self.tile_rows, self.tile_columns


class CopyRows(Kernel[CopyConfig]):
    """See ``templates/include/copy_rows.cuh``."""

    name = "copy_rows"
    archs = (SM90.name,)
    config_class = CopyConfig

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except copies."""
        return None if isinstance(spec, CopySpec) else "it copies matrices"

    def configs(self, arch: ArchSpec) -> Iterator[CopyConfig]:
        """One config: memory bandwidth limits the kernel."""
        yield CopyConfig(tile_rows=64, tile_columns=64, num_threads=256)

    def illegal(self, config: CopyConfig, arch: ArchSpec) -> str | None:
        """None for the only config."""
        return None if config in self.configs(arch) else f"there is one config only: {next(self.configs(arch))}"

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``copy_rows.cu.jinja``."""
        config = self._config(params)
        rows, columns = config.tile
        return {"tile_rows": rows, "tile_columns": columns, "num_threads": config.num_threads}

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Copies ``input`` to ``output``; strides in elements."""
        return (
            Argument("input", "const u16*", operand="source"),
            Argument("output", "u16*", operand="target"),
            Argument("rows", "u32"),
            Argument("columns", "u32"),
            Argument("stride_row", "i64"),
            Argument("stride_column", "i64"),
            Argument("padded_columns", "u32"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Copies operand "source" (rows, columns), with any strides, to "target" (rows, ``spec.padded_columns``)."""
        if not isinstance(spec, CopySpec):
            raise TypeError(f"{self.name} copies matrices, but it was asked for {spec}")
        config = self._config(params)
        tiles = ceil_div(spec.rows, config.tile_rows) * ceil_div(spec.padded_columns, config.tile_columns)
        stride_row, stride_column = strides["source"]
        shape = LaunchShape(grid=(min(tiles, MAX_CTAS), 1, 1), block=config.num_threads, dynamic_shared=0, pdl=pdl)
        return shape, {
            "rows": spec.rows,
            "columns": spec.columns,
            "stride_row": stride_row,
            "stride_column": stride_column,
            "padded_columns": spec.padded_columns,
        }

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """``copy_rows``."""
        return self.name

    def cases(self) -> list[KernelParams]:
        """The one instance."""
        return [KernelParams(kernel=self.name, arch=SM90.name, config=next(self.configs(SM90)))]

    def _config(self, params: KernelParams) -> CopyConfig:
        if not isinstance(params.config, CopyConfig):
            raise TypeError(f"{self.name} takes a CopyConfig, not {type(params.config).__name__}")
        return params.config


KERNEL = CopyRows()
