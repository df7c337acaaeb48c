"""Casts to FP8 with scales of rows, of columns or of tiles of 128 x 128, transposed or not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams, TileConfig
from ..spec import Blocks, Dtype, QuantizeSpec, Spec, ceil_div
from .base import EVERY_ARCH, Argument, KernelFamily, Numbers, Strides, Value, parse_arguments

TILE = 128

MAX_GRID_Y = 65535
"""The most CTAs along the second and the third dimension of a grid."""

DTYPES: tuple[Dtype, ...] = ("bf16", "f16", "f32")
BLOCKS: tuple[Blocks, ...] = ("row", "column", "tile")
OUTPUTS: tuple[tuple[Blocks, Blocks], ...] = (
    *(("row", "none"), ("none", "column"), ("row", "column"), ("row", "tile"), ("column", "none")),
    *(("tile", "none"), ("none", "tile"), ("tile", "tile")),
)
"""Scales as they are and of the transpose, of each public function."""

_SOURCES = {"bf16": "kSourceBf16", "f16": "kSourceF16", "f32": "kSourceF32"}
_BLOCKS = {"none": "kNothingShared", "row": "kRow", "column": "kColumn", "tile": "kTileShared"}


def _config(rows: int, columns: int, threads: int, ctas_per_sm: int) -> TileConfig:
    return TileConfig("quantize", rows, columns, threads, ctas_per_sm)


TILES, TILES_OF_FLOATS = _config(128, 128, 256, 4), _config(128, 128, 512, 2)
ROWS_OF_FLOATS = _config(64, 128, 256, 4)
FEW_ROWS, SOME_ROWS = _config(1, 1024, 128, 8), _config(2, 1024, 128, 8)

_OF_EXPERTS = (
    *(QuantizeSpec(8192, 8192, "bf16", "row", transposed, source_rows=1) for transposed in ("column", "tile")),
    QuantizeSpec(8192, 8192, "bf16", "row", "column", source_rows=1, factors=True),
    QuantizeSpec(8192, 8192, "bf16", "row", "column", True, gradient=True),
)
"""What training steps of experts need: their tokens, the gradients of their results, and of gate and up."""

FEW, SOME = 1 << 18, 1 << 20
"""Elements up to which rows are cast by `FEW_ROWS` and `SOME_ROWS`: larger tiles would leave SMs idle. On an H100 these
were fastest for up to 16 rows of 7168, and for 64; from 256 on larger tiles were."""


class Variant(NamedTuple):
    """`KernelParams.options` of a cast: fields of `QuantizeSpec`. ``gathered``: an index says which rows are cast.
    ``factors``: the scales of each row are multiplied by a factor, or the row is. ``gradient``: see `QuantizeSpec`."""

    plain: str
    transposed: str
    gated: bool
    gathered: bool
    factors: bool
    gradient: bool = False


class QuantizeFamily(KernelFamily):
    """See ``templates/include/quantize_rows.cuh`` and ``quantize_tile.cuh``."""

    name = "quantize"
    archs = EVERY_ARCH
    template_file = "quantize.cu.jinja"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except casts with an output."""
        if not isinstance(spec, QuantizeSpec):
            return "it casts matrices to FP8"
        if spec.dtype not in _SOURCES:
            return f"it casts bf16, f16 and f32, not {spec.dtype}"
        if spec.transposed == "row" or spec.plain == spec.transposed == "none":
            return f"it writes no {spec.plain} scales with {spec.transposed} scales of the transpose"
        if {spec.plain, spec.transposed} == {"column", "tile"}:
            return "it writes scales of columns and of tiles in separate launches"
        if spec.source_rows is not None and spec.plain != "row":
            return "it gathers rows only where each row has scales of its own"
        if spec.factors and spec.plain != "row":
            return "it multiplies rows by factors only where each row has scales of its own"
        if spec.factors and spec.power_of_two and _is_of_rows(spec.plain, spec.transposed):
            return "scales that are multiplied by factors are no powers of two"
        if spec.gradient and not (spec.gated and spec.plain == "row" and spec.transposed != "none"):
            return "it casts the gradient of gate and up only as it is and transposed in one pass"
        if spec.gated and spec.transposed != "none" and (spec.factors or spec.source_rows is not None):
            return "it neither gathers nor multiplies rows of gate and up that it transposes"
        if spec.groups > 1 and not _is_of_tiles(spec.plain, spec.transposed):
            return "it casts several matrices at once only with scales of tiles"
        if spec.groups > MAX_GRID_Y:
            return f"it casts at most {MAX_GRID_Y} matrices at once, not {spec.groups}"
        return None

    def configs(self, arch: ArchSpec) -> tuple[TileConfig, ...]:
        """See `config_of`."""
        found = [_on(each, arch) for each in (TILES, TILES_OF_FLOATS, ROWS_OF_FLOATS, FEW_ROWS, SOME_ROWS)]
        return tuple(dict.fromkeys([*found, self._of_gradients(arch)]))

    def config_of(self, spec: QuantizeSpec, arch: ArchSpec) -> TileConfig:
        """One config for each kind of cast. A thread holds 16-bit elements in half as many registers as float32, which
        gated elements are too."""
        floats = spec.gated or spec.dtype == "f32"
        if not _is_of_rows(spec.plain, spec.transposed):
            return self._of_gradients(arch) if spec.gradient else _on(TILES_OF_FLOATS if floats else TILES, arch)
        size = spec.rows * spec.columns
        if size <= SOME:
            return FEW_ROWS if size <= FEW else SOME_ROWS
        return _on(ROWS_OF_FLOATS if floats else TILES, arch)

    @staticmethod
    def _of_gradients(arch: ArchSpec) -> TileConfig:
        """With two CTAs on an SM the compiler spills registers for compute capability 12.0."""
        found = _on(TILES_OF_FLOATS, arch)
        return replace(found, ctas_per_sm=1) if arch.capability[0] == 12 else found

    def params(self, spec: QuantizeSpec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`. Adds the input's type and the outputs."""
        variant = spec.plain, spec.transposed, spec.gated, spec.source_rows is not None, spec.factors
        return KernelParams(self.name, arch.name, config, dtype=spec.dtype, options=(*variant, *[True] * spec.gradient))

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``quantize.cu.jinja``."""
        p, config = _variant(params), _tile(params)
        kind = "rows" if _is_of_rows(p.plain, p.transposed) else "tile"
        gated, gathered, factored = ("true" if chosen else "false" for chosen in (p.gated, p.gathered, p.factors))
        grouped = _is_of_tiles(p.plain, p.transposed)
        rows = [gated, gathered, factored, *config.tile, config.num_threads]
        tile = [_BLOCKS[p.plain], _BLOCKS[p.transposed], gated, config.num_threads]
        if p.gathered or p.factors or p.gradient:
            tile += [gathered, factored, "true" if p.gradient else "false"]
        template = ", ".join(map(str, [_SOURCES[params.dtype], *(rows if kind == "rows" else tile)]))
        return {
            "rows_or_tile": kind,
            "grouped": grouped,
            "kernel": f"Quantize{kind.capitalize()}<{template}>",
            "num_threads": config.num_threads,
            "ctas_per_sm": config.ctas_per_sm,
            "index": "index" if p.gathered else "nullptr",
            "source_rows": "source_rows" if p.gathered else "rows",
            "factors": "factors" if p.factors else "nullptr",
            "gradient": ", {gradient, gradient_stride}" if p.gradient else "",
            "plain_output": _output("", p.plain, grouped),
            "transposed_output": _output("t_", p.transposed, grouped),
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The matrix, the rule for scales, and the values and scales of each output; strides in elements."""
        p = _variant(params)
        gathered = "const u32* index=rows, u32 source_rows, " if p.gathered else ""
        factors = "const float* factors, " if p.factors else ""
        factors += "const u8* gradient, i64 gradient_stride, " if p.gradient else ""
        grouped = _is_of_tiles(p.plain, p.transposed)
        outputs = [
            f", u8* {x}values, i64 {x}stride, float* {x}scales, i64 {x}scale_stride_row, i64 {x}scale_stride_column"
            + (f", i64 {x}group, i64 {x}scale_group" if grouped else "")
            for x, blocks in (("", p.plain), ("t_", p.transposed))
            if blocks != "none"
        ]
        head = f"const u8* input=x, i64 input_stride, u32 rows, u32 columns, {gathered}{factors}"
        head += "i64 input_group, " if grouped else ""
        return parse_arguments(f"{head}u32 band, u32 epsilon, u32 power_of_two{''.join(outputs)}")

    def values(
        self, params: KernelParams, spec: QuantizeSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Casts operand "x", (rows, columns) or (rows, 2 * columns) with contiguous rows, to "values" and "scales", and
        its transpose to "t_values" and "t_scales". Operand "rows", if there is one, says which rows of "x"; operand
        "factors" multiplies them or their scales. Operand "gradient" is (rows, columns / 2). Several matrices lie in a
        first dimension of all."""

        def of_groups(name: str) -> int:
            return strides[name][0] if len(strides[name]) > 2 else 0

        values: dict[str, Any] = {
            "input_stride": strides["x"][-2],
            "input_group": of_groups("x"),
            "rows": spec.rows,
            "columns": spec.columns,
            "epsilon": spec.epsilon,
            "power_of_two": int(spec.power_of_two),
        }
        for prefix in ("", "t_"):
            if f"{prefix}values" in strides:
                values[f"{prefix}stride"] = strides[f"{prefix}values"][-2]
                row, column = strides[f"{prefix}scales"][-2:]
                values |= {f"{prefix}scale_stride_row": row, f"{prefix}scale_stride_column": column}
                values[f"{prefix}group"] = of_groups(f"{prefix}values")
                values[f"{prefix}scale_group"] = of_groups(f"{prefix}scales")
        config = _tile(params)
        down, across = ceil_div(spec.rows, config.tile_rows), ceil_div(spec.columns, config.tile_columns)
        band = (ceil_div(down, MAX_GRID_Y) - 1).bit_length()
        values |= {"source_rows": spec.source_rows, "band": band}
        values |= {"gradient_stride": strides["gradient"][0]} if spec.gradient else {}
        grid = across << band, ceil_div(down, 1 << band), spec.groups
        return LaunchShape(grid=grid, block=config.num_threads, dynamic_shared=0, pdl=pdl), values

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``quantize_bf16_row_t_column`` or ``quantize_bf16_row_128x128``."""
        p = _variant(params)
        parts = [
            "quantize",
            "gathered" if p.gathered else "",
            "factored" if p.factors else "",
            "silu_gradient" if p.gradient else "silu" if p.gated else "",
            params.dtype,
            p.plain if p.plain != "none" else "",
        ]
        tile = self.describe(params.config) if _is_of_rows(p.plain, p.transposed) else ""
        return "_".join(filter(None, [*parts, f"t_{p.transposed}" if p.transposed != "none" else "", tile]))

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """Each kind of output, each useful pair of outputs, each type of input, and each config."""
        specs = [
            *(QuantizeSpec(8192, 8192, "bf16", plain, "none") for plain in BLOCKS),
            *(QuantizeSpec(8192, 8192, "bf16", "none", transposed) for transposed in BLOCKS[1:]),
            *(QuantizeSpec(8192, 8192, "bf16", "row", "column", gated) for gated in (False, True)),
            *(QuantizeSpec(8192, 8192, "bf16", "row", "tile", gated) for gated in (False, True)),
            *(QuantizeSpec(8192, 8192, dtype, "tile", "tile") for dtype in DTYPES if dtype != "f16"),
            *(QuantizeSpec(8192, 8192, dtype, "row", "none") for dtype in DTYPES[1:]),
            *(QuantizeSpec(8192, 8192, "bf16", "row", "none", True, source_rows=rows) for rows in (None, 1)),
            *(QuantizeSpec(rows, 8192, "bf16", "row", "none", source_rows=1) for rows in (1, 8192)),
            *(QuantizeSpec(1, 8192, dtype, "row", "none") for dtype in DTYPES),
            *(QuantizeSpec(rows, 8192, "bf16", "row", "none", True, factors=True) for rows in (1, 8192)),
            *(QuantizeSpec(rows, 8192, "bf16", "row", "none", source_rows=1, factors=True) for rows in (1, 8192)),
            *(QuantizeSpec(rows, 8192, "bf16", "row", "none", True) for rows in (1, 64)),
            QuantizeSpec(64, 8192, "bf16", "row", "none"),
            QuantizeSpec(8192, 8192, "f32", "row", "column"),
            *_OF_EXPERTS,
        ]
        arch = arch or self.arch
        return [self.params(spec, self.config_of(spec, arch), arch) for spec in specs]

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Each output, or pair of them, of each type of input, as `deep_gemm.quantize` has them."""
        specs = [
            QuantizeSpec(rows, 8192, dtype, plain, transposed, gated, source_rows=source, factors=factors)
            for dtype, (plain, transposed) in itertools.product(DTYPES, OUTPUTS)
            for rows in ((1, 64, 8192) if _is_of_rows(plain, transposed) else (8192,))
            for gated in ((False,) if "tile" in (plain, transposed) else (False, True))
            for source, factors in itertools.product((None, 1), (False, True))
        ]
        of_rows = [spec for spec in specs if _is_of_rows(spec.plain, spec.transposed)]
        plain = [spec for spec in specs if spec.source_rows is None and not spec.factors]
        able = [spec for spec in (*of_rows, *plain, *_OF_EXPERTS) if self.refuses(spec) is None]
        return list(dict.fromkeys(self.params(spec, self.config_of(spec, arch), arch) for spec in able))

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Those without an index of rows, factors and gradients, which are for experts."""
        of_experts = "gathered", "factors", "gradient"
        return [each for each in self.cases(arch) if not any(getattr(_variant(each), name) for name in of_experts)]


def _variant(params: KernelParams) -> Variant:
    return Variant(*params.options)  # type: ignore[arg-type]


def _tile(params: KernelParams) -> TileConfig:
    if not isinstance(params.config, TileConfig):
        raise TypeError(f"quantize takes a TileConfig, not a {type(params.config).__name__}")
    return params.config


def _on(config: TileConfig, arch: ArchSpec) -> TileConfig:
    """``config`` with as many CTAs on an SM as have enough registers. Conversions by software take more of them, and
    the compiler takes more for compute capability 10."""
    if arch.capability < (8, 9):
        fewer = {TILES: 2}
    else:
        fewer = {ROWS_OF_FLOATS: 2, TILES_OF_FLOATS: 1} if arch.capability[0] == 10 else {}
    return replace(config, ctas_per_sm=fewer.get(config, config.ctas_per_sm))


def _is_of_rows(plain: str, transposed: str) -> bool:
    """Whether ``quantize_rows.cuh`` does the cast."""
    return (plain, transposed) == ("row", "none")


def _is_of_tiles(plain: str, transposed: str) -> bool:
    """Whether all scales are of tiles, as those of weights are."""
    return {plain, transposed} <= {"tile", "none"}


def _output(prefix: str, blocks: str, grouped: bool) -> str:
    """C++ for one output of the kernel."""
    if blocks == "none":
        return "QuantizedOutput{}"
    names = ["values", "stride", "scales", "scale_stride_row", "scale_stride_column"]
    names += ["group", "scale_group"] if grouped else []
    return f"output({', '.join(prefix + name for name in names)})"


QUANTIZE = QuantizeFamily()
