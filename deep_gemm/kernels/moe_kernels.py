"""What a mixture of experts does beside its products: it sends tokens to their experts, and adds their results."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams, TileConfig
from ..spec import AMAX_MIN, CombineSpec, DispatchSpec, Spec, ceil_div, float_bits
from .base import Argument, KernelFamily, Numbers, Strides, Value, parse_arguments

MOST_EXPERTS = 2048
"""As ``moe_dispatch.cuh`` says it."""

_SOURCES = {"bf16": "kSourceBf16", "e4m3": "kSourceE4m3"}
_DISPATCH = TileConfig("moe_dispatch", tile_rows=1, tile_columns=8192, num_threads=1024)
_COMBINE = TileConfig("moe_combine", tile_rows=1, tile_columns=2048, num_threads=256)


def _flag(is_true: bool) -> str:
    return "true" if is_true else "false"


class _OneConfig(KernelFamily):
    """A kernel with one config and static shared memory."""

    config: TileConfig

    @property
    def template_file(self) -> str:  # type: ignore[override]
        return f"{self.name}.cu.jinja"

    def configs(self, arch: ArchSpec) -> tuple[TileConfig, ...]:
        return (self.config,)

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """None: dense products need no experts."""
        return []


class DispatchFamily(_OneConfig):
    """See ``templates/include/moe_dispatch.cuh``. Options: whether experts have parts of their own, and what is
    given."""

    name = "moe_dispatch"
    config = _DISPATCH

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except tokens of bfloat16 or FP8 that go to a number of experts that its table holds."""
        if not isinstance(spec, DispatchSpec):
            return "it sends tokens to experts"
        if spec.dtype not in _SOURCES:
            return f"it sends tokens of bf16 and e4m3, not of {spec.dtype}"
        if spec.experts > MOST_EXPERTS:
            return f"{spec.experts} experts are more than {MOST_EXPERTS}"
        return None

    def params(self, spec: DispatchSpec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`."""
        return KernelParams(self.name, arch.name, config, dtype=spec.dtype, options=(spec.masked, *spec.given))

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of its template."""
        masked, *given = params.options
        of_source = "source_scales, source_scale_row, source_scale_column"
        flags = (bool(masked), "weights" in given, "stats" in given)
        return {
            "variant": ", ".join([_SOURCES[params.dtype], *map(_flag, flags)]),
            "num_threads": self.config.num_threads,
            "weights": "weights" if "weights" in given else "nullptr",
            "factors": "factors" if "weights" in given else "nullptr",
            "stats": "stats" if "stats" in given else "nullptr",
            "scale_stride_group": "scale_stride_group" if masked else "0",
            "source_scales": of_source if params.dtype == "e4m3" else "nullptr, 0, 0",
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements."""
        found = "const u8* x, i64 x_stride, "
        if params.dtype == "e4m3":
            found += "const float* source_scales=sfx, i64 source_scale_row, i64 source_scale_column, "
        found += "const i64* chosen, " + "const float* weights, float* factors, " * ("weights" in params.options)
        found += "u32 tokens, u32 width, u32 experts, u32 top_k, u32 room, u32 epsilon, int* layout, int* places, "
        found += "int* stats, " * ("stats" in params.options)
        found += "u8* values, i64 values_stride, float* scales, i64 scale_stride_row, i64 scale_stride_column"
        return parse_arguments(found + ", i64 scale_stride_group" * bool(params.options[0]))

    def values(
        self, params: KernelParams, spec: DispatchSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: x (tokens, width), with scales "sfx" if it is FP8; chosen and weights (tokens, top_k), contiguous;
        layout and stats (experts,), places (tokens, top_k), factors; values and scales of rows, of masked ones
        with the expert in front. One
        CTA for each token, or for each SM."""
        values: dict[str, Value] = {
            name: getattr(spec, name) for name in ("tokens", "width", "experts", "top_k", "room")
        }
        values |= {"x_stride": strides["x"][0], "epsilon": float_bits(AMAX_MIN), "values_stride": strides["values"][-2]}
        *group, row, column = strides["scales"]
        values |= {"scale_stride_row": row, "scale_stride_column": column}
        if group:
            values["scale_stride_group"] = group[0] - spec.room * row
        if "sfx" in strides:
            values["source_scale_row"], values["source_scale_column"] = strides["sfx"]
        grid = min(spec.tokens, spec.num_sms), 1, 1
        return LaunchShape(grid=grid, block=self.config.num_threads, dynamic_shared=0, pdl=pdl), values

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``moe_dispatch_masked_weights_bf16``."""
        masked, *given = params.options
        return "_".join([self.name, "masked" if masked else "psum", *map(str, given), params.dtype])

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """All of them."""
        return self._cases(((), ("weights",), ("stats",), ("weights", "stats")))

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Those of `deep_gemm.fp8_moe`."""
        return self._cases(((),))

    def _cases(self, given: tuple[tuple[str, ...], ...]) -> list[KernelParams]:
        every = product(_SOURCES, (False, True), given)
        specs = [DispatchSpec(64, 4096, 256, 8, 64, masked, dtype, given) for dtype, masked, given in every]  # type: ignore[arg-type]
        return [self.params(spec, self.config, SM90) for spec in specs]


class CombineFamily(_OneConfig):
    """See ``templates/include/moe_combine.cuh``. Its option: whether rows have weights."""

    name = "moe_combine"
    config = _COMBINE

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except sums of experts' rows."""
        return None if isinstance(spec, CombineSpec) else "it adds the rows of experts"

    def params(self, spec: CombineSpec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`."""
        return KernelParams(self.name, arch.name, config, dtype="bf16", options=(spec.weighted,))

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of its template."""
        (weighted,) = params.options
        return {
            "num_threads": self.config.num_threads,
            "weighted": _flag(bool(weighted)),
            "weights": "weights" if weighted else "nullptr",
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements."""
        weights = "const float* weights, " * bool(params.options[0])
        return parse_arguments(
            f"const u8* x, i64 x_stride, const int* places, {weights}u8* y, i64 y_stride, u32 tokens, u32 width, "
            "u32 top_k"
        )

    def values(
        self, params: KernelParams, spec: CombineSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: x (rows, width), or of masked rows (experts, room, width); places and weights (tokens, top_k),
        contiguous; y (tokens, width)."""
        values: dict[str, Value] = {name: getattr(spec, name) for name in ("tokens", "width", "top_k")}
        values |= {"x_stride": strides["x"][-2], "y_stride": strides["y"][0]}
        grid = ceil_div(spec.tokens * (spec.width // 8), self.config.num_threads), 1, 1
        return LaunchShape(grid=grid, block=self.config.num_threads, dynamic_shared=0, pdl=pdl), values

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``moe_combine_weights``."""
        return f"{self.name}_weights" if params.options[0] else self.name

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """With weights and without."""
        return [self.params(CombineSpec(64, 4096, 8, each), self.config, SM90) for each in (False, True)]

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """That of `deep_gemm.fp8_moe`."""
        return self.cases()[1:]


DISPATCH, COMBINE = DispatchFamily(), CombineFamily()
