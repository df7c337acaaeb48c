"""Transposes FP8 operands whose K is not contiguous into rows that TMA can address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams, TransposeConfig
from ..spec import Spec, TransposeBytesSpec, ceil_div
from .base import Argument, Kernel, Strides, Value

MAX_CTAS = 1 << 16
"""CTAs of one launch at most. Each CTA loops over tiles."""


class TransposeBytesConfig(TransposeConfig):
    """The config class of this family."""


class TransposeBytes(Kernel[TransposeBytesConfig]):
    """See ``templates/include/transpose_bytes.cuh``."""

    name = "transpose_bytes"
    archs = (SM90.name,)
    config_class = TransposeBytesConfig

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except transposes of bytes."""
        return None if isinstance(spec, TransposeBytesSpec) else "it transposes matrices of bytes"

    def configs(self, arch: ArchSpec) -> Iterator[TransposeBytesConfig]:
        """One config: memory bandwidth limits the kernel."""
        yield TransposeBytesConfig(tile_rows=128, tile_columns=128, num_threads=256)

    def illegal(self, config: TransposeBytesConfig, arch: ArchSpec) -> str | None:
        """None for the only config."""
        return None if config in self.configs(arch) else f"there is one config only: {next(self.configs(arch))}"

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``transpose_bytes.cu.jinja``."""
        return {"num_threads": self._config(params).num_threads}

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Transposes ``input`` to ``output``; ``stride`` is the distance between columns of the input."""
        return (
            Argument("input", "const u8*", operand="source"),
            Argument("output", "u8*", operand="target"),
            Argument("rows", "u32"),
            Argument("columns", "u32"),
            Argument("stride", "i64"),
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Writes operand "source" (rows, columns), whose columns are contiguous, densely to "target"."""
        if not isinstance(spec, TransposeBytesSpec):
            raise TypeError(f"{self.name} transposes bytes, but it was asked for {spec}")
        config = self._config(params)
        tiles = ceil_div(spec.rows, config.tile_rows) * ceil_div(spec.columns, config.tile_columns)
        shape = LaunchShape(grid=(min(tiles, MAX_CTAS), 1, 1), block=config.num_threads, dynamic_shared=0, pdl=pdl)
        return shape, {"rows": spec.rows, "columns": spec.columns, "stride": strides["source"][1]}

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """``transpose_bytes``."""
        return self.name

    def cases(self) -> list[KernelParams]:
        """The one instance."""
        return [KernelParams(kernel=self.name, arch=SM90.name, config=next(self.configs(SM90)))]

    def _config(self, params: KernelParams) -> TransposeBytesConfig:
        if not isinstance(params.config, TransposeBytesConfig):
            raise TypeError(f"{self.name} takes a TransposeBytesConfig, not {type(params.config).__name__}")
        return params.config


KERNEL = TransposeBytes()
