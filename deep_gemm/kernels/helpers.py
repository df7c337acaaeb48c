"""Kernels that prepare operands for a GEMM: each is a parameter list and a launch function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape, Map
from ..jit.driver.tensor_map import TensorMapSpec
from ..params import KernelParams, TileConfig
from ..records import record
from ..spec import (
    SCALE_BLOCK,
    CopySpec,
    KGroupMapsSpec,
    LogitsScheduleSpec,
    Spec,
    TransposeBytesSpec,
    TransposeSpec,
    align,
    ceil_div,
)
from .base import EVERY_ARCH, Argument, KernelFamily, Numbers, Strides, Value, parse_arguments

Grid: TypeAlias = tuple[int, int, int]


@record(frozen=True)
class Helper(KernelFamily):
    """A kernel with one config and static shared memory."""

    name: str
    spec: type
    """The class of the specs that it computes."""
    what: str
    """What it does, as its refusals say it."""
    config: TileConfig
    given: tuple[Argument, ...]
    launched: Callable[[TileConfig, Any, Strides], tuple[Grid, Mapping[str, Value]]]
    """The grid, and the values of the arguments, for a config, a spec and strides."""
    constant_names: tuple[str, ...] = ()
    """The fields of the config that its template has."""
    archs: tuple[str, ...] = EVERY_ARCH
    ships: bool = True
    """Whether calls with default options on one GPU can need it."""

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        return self.cases(arch) if self.ships else []

    @property
    def template_file(self) -> str:  # type: ignore[override]
        return f"{self.name}.cu.jinja"

    def refuses(self, spec: Spec) -> str | None:
        return None if isinstance(spec, self.spec) else self.what

    def configs(self, arch: ArchSpec) -> tuple[TileConfig, ...]:
        return (self.config,)

    def params(self, spec: Spec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        return KernelParams(kernel=self.name, arch=arch.name, config=config)

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        return self.given

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        return {name: getattr(params.config, name) for name in self.constant_names}

    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        if not isinstance(spec, self.spec):
            raise TypeError(f"{self.name} was asked for {spec}, but {self.what}")
        grid, values = self.launched(self.config, spec, strides)
        return LaunchShape(grid=grid, block=self.config.num_threads, dynamic_shared=0, pdl=pdl), values

    def shared_bytes(self, params: KernelParams) -> int:
        return 0

    def kernel_name(self, params: KernelParams) -> str:
        return self.name

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        return [KernelParams(kernel=self.name, arch=(arch or self.arch).name, config=self.config)]


def _looped(most: int, rows: int, columns: int, config: TileConfig) -> Grid:
    """A CTA for each tile, but at most ``most``, which then loop over tiles."""
    return min(ceil_div(rows, config.tile_rows) * ceil_div(columns, config.tile_columns), most), 1, 1


def _copy(config: TileConfig, spec: CopySpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operand "source" (rows, columns), with any strides, to "target" (rows, ``spec.padded_columns``)."""
    stride_row, stride_column = strides["source"]
    return _looped(1 << 14, spec.rows, spec.padded_columns, config), {
        "rows": spec.rows,
        "columns": spec.columns,
        "stride_row": stride_row,
        "stride_column": stride_column,
        "padded_columns": spec.padded_columns,
    }


def _transpose_bytes(
    config: TileConfig, spec: TransposeBytesSpec, strides: Strides
) -> tuple[Grid, Mapping[str, Value]]:
    """Operand "source" (rows, columns), whose columns are contiguous, densely to "target"."""
    values = {"rows": spec.rows, "columns": spec.columns, "stride": strides["source"][1]}
    return _looped(1 << 16, spec.rows, spec.columns, config), values


def _transpose_scales(config: TileConfig, spec: TransposeSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operand "source" (batch, rows, columns), with any strides, densely to "target" as (batch, columns, align(rows,
    4))."""
    padded = align(spec.rows, 4)
    tiles = ceil_div(padded, config.tile_rows) * ceil_div(spec.columns, config.tile_columns)
    stride_batch, stride_row, stride_column = strides["source"]
    return (tiles * spec.batch, 1, 1), {
        "rows": spec.rows,
        "columns": spec.columns,
        "stride_row": stride_row,
        "stride_column": stride_column,
        "stride_batch": stride_batch,
        "padded_rows": padded,
    }


_LEAST_K = 16
"""K of the maps that are copied before their K is replaced."""


def _k_group_maps(config: TileConfig, spec: KGroupMapsSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: a, b, layout (K of each group), maps: A's and B's of each group. Rows of padded operands have
    strides."""

    def first(name: str, rows: int) -> Map:
        shape, box = (_LEAST_K, rows), (SCALE_BLOCK, 64)
        return Map(TensorMapSpec("u8", shape, (_LEAST_K,), box, 128, SCALE_BLOCK), name)

    values: dict[str, Value] = {"map_a": first("a", spec.m), "map_b": first("b", spec.n), "m": spec.m, "n": spec.n}
    rows = {f"row_bytes_{name}": strides[name][0] if spec.padded_k else 0 for name in ("a", "b")}
    return (2 * spec.groups, 1, 1), values | {"padded_k": spec.padded_k} | rows


def _logits_schedule(
    config: TileConfig, spec: LogitsScheduleSpec, strides: Strides
) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: lengths (batch) or (batch, tokens), schedule."""
    return (1, 1, 1), {
        "stride": strides["lengths"][0],
        "offset": spec.offset,
        "batch": spec.batch,
        "slots": spec.slots,
    }


COPY_ROWS = Helper(
    name="copy_rows",
    spec=CopySpec,
    what="it copies matrices",
    config=TileConfig("copy_rows", tile_rows=64, tile_columns=64, num_threads=256),
    given=parse_arguments(
        "const u16* input=source, u16* output=target, u32 rows, u32 columns, i64 stride_row, i64 stride_column, "
        "u32 padded_columns"
    ),
    launched=_copy,
    constant_names=("tile_rows", "tile_columns", "num_threads"),
)
"""Copies operands with two bytes per element into rows that TMA can address. Memory bandwidth limits it."""

TRANSPOSE_BYTES = Helper(
    name="transpose_bytes",
    spec=TransposeBytesSpec,
    what="it transposes matrices of bytes",
    config=TileConfig("transpose_bytes", tile_rows=128, tile_columns=128, num_threads=256),
    given=parse_arguments("const u8* input=source, u8* output=target, u32 rows, u32 columns, i64 stride"),
    launched=_transpose_bytes,
    constant_names=("num_threads",),
)
"""Transposes FP8 operands whose K is not contiguous into rows that TMA can address. Memory bandwidth limits it."""

TRANSPOSE_SCALES = Helper(
    name="transpose_scales",
    spec=TransposeSpec,
    what="it transposes float32 matrices",
    config=TileConfig("transpose_scales", tile_rows=64, tile_columns=32, num_threads=256),
    given=parse_arguments(
        "const float* input=source, float* output=target, u32 rows, u32 columns, i64 stride_row, i64 stride_column, "
        "i64 stride_batch, u32 padded_rows"
    ),
    launched=_transpose_scales,
    constant_names=("tile_rows", "num_threads"),
)
"""Transposes scales into the layout that TMA loads: MN-major, columns padded to 16 bytes. It moves a few kilobytes, and
takes only the time of its launch."""

K_GROUP_MAPS = Helper(
    name="k_group_maps",
    spec=KGroupMapsSpec,
    what="it makes tensor maps of groups along K",
    archs=(SM90.name,),
    config=TileConfig("k_group_maps", tile_rows=1, tile_columns=1, num_threads=32),
    given=parse_arguments(
        "TensorMap map_a=a, TensorMap map_b=b, const u8* a, const u8* b, u32 m, u32 n, u32 padded_k, u32 row_bytes_a, "
        "u32 row_bytes_b, const int* layout, TensorMap* maps"
    ),
    launched=_k_group_maps,
)
"""Makes the tensor maps of an FP8 GEMM in groups along K, whose sizes are on the device. One warp makes one map."""

LOGITS_SCHEDULE = Helper(
    name="paged_mqa_logits_metadata",
    spec=LogitsScheduleSpec,
    what="it makes schedules of paged logits",
    archs=(SM90.name,),
    config=TileConfig("paged_mqa_logits_metadata", tile_rows=1, tile_columns=1, num_threads=256),
    given=parse_arguments("const int* lengths, i64 stride, u32 offset, u32 batch, u32 slots, u32* schedule"),
    launched=_logits_schedule,
    constant_names=("num_threads",),
)
"""Shares out the work of paged logits. One CTA does it."""
