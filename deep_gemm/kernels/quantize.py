"""Casts to FP8 with scales of rows, of columns or of tiles of 128 x 128, transposed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelConfig, KernelParams, QuantizeParams
from ..spec import QuantizeSpec, Spec, ceil_div
from .base import Argument, Kernel, Strides, Value

TILE = 128

_SOURCES = {"bf16": "kSourceBf16", "f16": "kSourceF16", "f32": "kSourceF32"}
_BLOCKS = {"none": "kNothingShared", "row": "kRow", "column": "kColumn", "tile": "kTileShared"}


@dataclass(frozen=True)
class QuantizeConfig(KernelConfig):
    """The tile that one CTA of ``num_threads`` threads casts."""

    tile_rows: int
    tile_columns: int
    num_threads: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that one CTA casts."""
        return self.tile_rows, self.tile_columns


class Quantize(Kernel[QuantizeConfig]):
    """See ``templates/include/quantize.cuh``."""

    name = "quantize"
    archs = (SM90.name,)
    config_class = QuantizeConfig

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except casts with an output."""
        if not isinstance(spec, QuantizeSpec):
            return "it casts matrices to FP8"
        if spec.dtype not in _SOURCES:
            return f"it casts bf16, f16 and f32, not {spec.dtype}"
        if spec.transposed == "row" or spec.plain == spec.transposed == "none":
            return f"it writes no {spec.plain} scales with {spec.transposed} scales of the transpose"
        return None

    def configs(self, arch: ArchSpec) -> Iterator[QuantizeConfig]:
        """One config: memory bandwidth limits the kernel."""
        yield QuantizeConfig(tile_rows=TILE, tile_columns=TILE, num_threads=256)

    def illegal(self, config: QuantizeConfig, arch: ArchSpec) -> str | None:
        """None for the only config."""
        return None if config in self.configs(arch) else f"there is one config only: {next(self.configs(arch))}"

    def params(self, spec: Spec, config: QuantizeConfig, arch: ArchSpec) -> QuantizeParams:
        """See `Kernel.params`. Adds the input's type and the outputs."""
        known = super().params(spec, config, arch)
        assert isinstance(spec, QuantizeSpec)  # see `refuses`
        return QuantizeParams(
            **{field.name: getattr(known, field.name) for field in fields(KernelParams)},
            dtype=spec.dtype,
            plain=spec.plain,
            transposed=spec.transposed,
            gated=spec.gated,
        )

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``quantize.cu.jinja``."""
        p = self._of(params)
        return {
            "source": _SOURCES[p.dtype],
            "plain": _BLOCKS[p.plain],
            "transposed": _BLOCKS[p.transposed],
            "gated": "true" if p.gated else "false",
            "num_threads": next(self.configs(SM90)).num_threads,
            "plain_output": _output("", p.plain),
            "transposed_output": _output("t_", p.transposed),
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The matrix, the rule for scales, and the values and scales of each output; strides in elements."""
        p = self._of(params)
        outputs: list[Argument] = []
        for prefix, blocks in (("", p.plain), ("t_", p.transposed)):
            if blocks != "none":
                outputs += [
                    Argument(f"{prefix}values", "u8*"),
                    Argument(f"{prefix}stride", "i64"),
                    Argument(f"{prefix}scales", "float*"),
                    Argument(f"{prefix}scale_stride_row", "i64"),
                    Argument(f"{prefix}scale_stride_column", "i64"),
                ]
        return (
            Argument("input", "const u8*", operand="x"),
            Argument("input_stride", "i64"),
            Argument("rows", "u32"),
            Argument("columns", "u32"),
            Argument("epsilon", "u32"),
            Argument("power_of_two", "u32"),
            *outputs,
        )

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Casts operand "x", (rows, columns) or (rows, 2 * columns) with contiguous rows, to "values" and "scales", and
        its transpose to "t_values" and "t_scales"."""
        if not isinstance(spec, QuantizeSpec):
            raise TypeError(f"{self.name} casts matrices, but it was asked for {spec}")
        values: dict[str, Any] = {
            "input_stride": strides["x"][0],
            "rows": spec.rows,
            "columns": spec.columns,
            "epsilon": spec.epsilon,
            "power_of_two": int(spec.power_of_two),
        }
        for prefix in ("", "t_"):
            if f"{prefix}values" in strides:
                values[f"{prefix}stride"] = strides[f"{prefix}values"][0]
                values[f"{prefix}scale_stride_row"], values[f"{prefix}scale_stride_column"] = strides[f"{prefix}scales"]
        tiles = ceil_div(spec.rows, TILE) * ceil_div(spec.columns, TILE)
        threads = next(self.configs(SM90)).num_threads
        return LaunchShape(grid=(tiles, 1, 1), block=threads, dynamic_shared=0, pdl=pdl), values

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def entry(self, params: KernelParams) -> str:
        """Such as ``quantize_bf16_row_t_column``."""
        p = self._of(params)
        parts = ["quantize", "silu" if p.gated else "", p.dtype, p.plain if p.plain != "none" else ""]
        return "_".join(filter(None, [*parts, f"t_{p.transposed}" if p.transposed != "none" else ""]))

    def cases(self) -> list[KernelParams]:
        """Each kind of output, each useful pair of outputs, and each type of input."""
        kinds = [
            *(("bf16", plain, "none", False) for plain in ("row", "column", "tile")),
            *(("bf16", "none", transposed, False) for transposed in ("column", "tile")),
            *(("bf16", "row", "column", gated) for gated in (False, True)),
            *((dtype, "tile", "tile", False) for dtype in ("bf16", "f32")),
            ("bf16", "row", "none", True),
            *((dtype, "row", "none", False) for dtype in ("f16", "f32")),
            ("f32", "row", "column", False),
        ]
        config = next(self.configs(SM90))
        return [
            QuantizeParams(self.name, SM90.name, config, dtype=dtype, plain=plain, transposed=transposed, gated=gated)
            for dtype, plain, transposed, gated in kinds
        ]

    def _of(self, params: KernelParams) -> QuantizeParams:
        if not isinstance(params, QuantizeParams) or not isinstance(params.config, QuantizeConfig):
            got = f"{type(params).__name__} with a {type(params.config).__name__}"
            raise TypeError(f"{self.name} takes QuantizeParams with a QuantizeConfig, not {got}")
        return params


def _output(prefix: str, blocks: str) -> str:
    """C++ for one output of the kernel."""
    if blocks == "none":
        return "QuantizedOutput{}"
    names = ("values", "stride", "scales", "scale_stride_row", "scale_stride_column")
    return f"output({', '.join(prefix + name for name in names)})"


KERNEL = Quantize()
