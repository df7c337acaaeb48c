"""What a mixture of experts does beside its products: it sends tokens to their experts, and adds their results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from itertools import product
from types import MappingProxyType

from ..arch import SM90, ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams, TileConfig
from ..spec import AMAX_MIN, ActivateSpec, CombineSpec, DispatchSpec, DotsSpec, RouteSpec, Spec, ceil_div, float_bits
from .base import Argument, KernelFamily, Numbers, Strides, Value, parse_arguments
from .helpers import Grid, Helper

MOST_EXPERTS = 2048
"""As ``moe_dispatch.cuh`` says it."""

_SOURCES = {"bf16": "kSourceBf16", "e4m3": "kSourceE4m3"}
_DISPATCH = TileConfig("moe_dispatch", tile_rows=1, tile_columns=8192, num_threads=1024)
_COMBINE = TileConfig("moe_combine", tile_rows=1, tile_columns=2048, num_threads=256)
_ROUTE = TileConfig("moe_route", tile_rows=1, tile_columns=1, num_threads=1024)
_DOTS = TileConfig("moe_dots", tile_rows=1, tile_columns=2048, num_threads=256)
_ACTIVATE = TileConfig("moe_activate", tile_rows=1, tile_columns=1024, num_threads=128)

GATED: Mapping[str, tuple[bool, bool]] = MappingProxyType({"swiglu": (False, False), "swigluoai": (True, True)})
"""Activations between experts' products: whether rows of gate and up take turns, and whether it is that of gpt-oss."""


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

    @abstractmethod
    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """What models with MXFP4 weights need of `fp8_fp4_moe` and `bf16_fp4_moe`."""


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
        flags, is_copied = (bool(masked), "weights" in given, "stats" in given), "copied" in given
        source = "kSourceCopied" if is_copied else _SOURCES[params.dtype]
        return {
            "variant": ", ".join([source, *map(_flag, flags)]),
            "num_threads": self.config.num_threads,
            "weights": "weights" if "weights" in given else "nullptr",
            "factors": "factors" if "weights" in given else "nullptr",
            "stats": "stats" if "stats" in given else "nullptr",
            "scales": "nullptr, 0, 0" if is_copied else "scales, scale_stride_row, scale_stride_column",
            "epsilon": "0" if is_copied else "epsilon",
            "scale_stride_group": "scale_stride_group" if masked and not is_copied else "0",
            "source_scales": of_source if params.dtype == "e4m3" else "nullptr, 0, 0",
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements."""
        found = "const u8* x, i64 x_stride, "
        if params.dtype == "e4m3":
            found += "const float* source_scales=sfx, i64 source_scale_row, i64 source_scale_column, "
        found += "const i64* chosen, " + "const float* weights, float* factors, " * ("weights" in params.options)
        is_copied = "copied" in params.options
        found += f"u32 tokens, u32 width, u32 experts, u32 top_k, u32 room, {'' if is_copied else 'u32 epsilon, '}"
        found += "int* layout, int* places, " + "int* stats, " * ("stats" in params.options)
        found += "u8* values, i64 values_stride"
        if is_copied:
            return parse_arguments(found)
        found += ", float* scales, i64 scale_stride_row, i64 scale_stride_column"
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
        values |= _of_scales(strides, spec.room)
        if "sfx" in strides:
            values["source_scale_row"], values["source_scale_column"] = strides["sfx"]
        grid = min(spec.tokens, spec.num_sms), 1, 1
        return LaunchShape(grid=grid, block=self.config.num_threads, dynamic_shared=0, pdl=pdl), values

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``moe_dispatch_masked_weights_bf16``."""
        masked, *given = params.options
        return "_".join([self.name, "masked" if masked else "psum", *map(str, given), params.dtype])

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """All that calls have."""
        given: tuple[tuple[str, ...], ...] = ((), ("weights",), ("stats",), ("weights", "stats"))
        return self._cases(given) + self._cases((("copied",),), ("bf16",))

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Those of `deep_gemm.fp8_moe`."""
        return self._cases(((),))

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """See `_OneConfig`: of bfloat16 tokens."""
        return self._cases(((), ("copied",)), ("bf16",))

    def _cases(self, given: tuple[tuple[str, ...], ...], sources: Iterable[str] = _SOURCES) -> list[KernelParams]:
        every = product(sources, (False, True), given)
        specs = [DispatchSpec(64, 4096, 256, 8, 64, masked, dtype, given) for dtype, masked, given in every]  # type: ignore[arg-type]
        return [self.params(spec, self.config, SM90) for spec in specs]


class CombineFamily(_OneConfig):
    """See ``templates/include/moe_combine.cuh``. Its options: whether rows have weights, and biases if they have."""

    name = "moe_combine"
    config = _COMBINE

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except sums of experts' rows."""
        return None if isinstance(spec, CombineSpec) else "it adds the rows of experts"

    def params(self, spec: CombineSpec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`."""
        options: tuple[str | bool, ...] = (spec.weighted, *["bias"] * spec.biased)
        return KernelParams(self.name, arch.name, config, dtype="bf16", options=options)

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of its template."""
        weighted, *biased = params.options
        return {
            "num_threads": self.config.num_threads,
            "flags": _flag(bool(weighted)) + ", true" * bool(biased),
            "weights": "weights" if weighted else "nullptr",
            "bias": "chosen, bias, bias_stride" if biased else "nullptr, nullptr, 0",
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements."""
        weights = "const float* weights, " * bool(params.options[0])
        weights += "const i64* chosen, const u8* bias, i64 bias_stride, " * ("bias" in params.options)
        return parse_arguments(
            f"const u8* x, i64 x_stride, const int* places, {weights}u8* y, i64 y_stride, u32 tokens, u32 width, "
            "u32 top_k"
        )

    def values(
        self, params: KernelParams, spec: CombineSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: x (rows, width), or of masked rows (experts, room, width); places, chosen and weights (tokens,
        top_k), contiguous; bias (experts, width); y (tokens, width)."""
        values: dict[str, Value] = {name: getattr(spec, name) for name in ("tokens", "width", "top_k")}
        values |= {"bias_stride": strides["bias"][0]} if spec.biased else {}
        values |= {"x_stride": strides["x"][-2], "y_stride": strides["y"][0]}
        grid = ceil_div(spec.tokens * (spec.width // 8), self.config.num_threads), 1, 1
        return LaunchShape(grid=grid, block=self.config.num_threads, dynamic_shared=0, pdl=pdl), values

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``moe_combine_weights_bias``."""
        weighted, *biased = params.options
        return "_".join([self.name, *["weights"] * bool(weighted), *map(str, biased)])

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """With weights and without, and with biases."""
        every = ((False, False), (True, False), (True, True))
        return [self.params(CombineSpec(64, 4096, 8, *each), self.config, SM90) for each in every]

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Those of `deep_gemm.fp8_moe`, and of its gradient."""
        return self.cases()[:2]

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """See `_OneConfig`: with the router's weights."""
        return self.cases()[1:]


class ActivateFamily(_OneConfig):
    """See ``templates/include/moe_activate.cuh``. Its options: the function, and whether rows have biases."""

    name = "moe_activate"
    config = _ACTIVATE

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except activations of experts' rows."""
        if not isinstance(spec, ActivateSpec):
            return "it computes the activation of rows of experts"
        return None if spec.function in GATED else f"it knows {', '.join(GATED)}, not {spec.function}"

    def params(self, spec: ActivateSpec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`."""
        options = spec.function, *["bias"] * spec.biased
        return KernelParams(self.name, arch.name, config, dtype="bf16", output=spec.output, options=options)

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of its template."""
        (function, *biased), fp8 = params.options, params.output == "e4m3"
        interleaved, is_oai = GATED[str(function)]
        up = "16" if interleaved else "static_cast<i64>(columns) * 2"
        inputs = [f"{{{name}{part}, {name}_stride}}" for name in ("x", *map(str, biased)) for part in ("", f" + {up}")]
        return {
            "target": "kTargetE4m3" if fp8 else "kSourceBf16",
            "columns": self.config.tile_columns,
            "num_threads": self.config.num_threads,
            "flags": ", ".join(map(_flag, (interleaved, False, is_oai, bool(biased)))),
            "inputs": ", ".join(inputs),
            "chosen": "chosen" if biased else "nullptr",
            "groups": "room, scale_stride_group" if fp8 else "0, 0",
            "scales": "scales, scale_stride_row, scale_stride_column" if fp8 else "nullptr, 0, 0",
            "epsilon": "epsilon" if fp8 else "0",
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements."""
        found = "const u8* x, i64 x_stride, const int* places, "
        found += "const i64* chosen, const u8* bias, i64 bias_stride, " * ("bias" in params.options)
        found += "u32 rows, u32 columns, f32 limit, u8* values, i64 values_stride"
        if params.output == "e4m3":
            found += ", float* scales, i64 scale_stride_row, i64 scale_stride_column, i64 scale_stride_group, u32 room"
            found += ", u32 epsilon"
        return parse_arguments(found)

    def values(
        self, params: KernelParams, spec: ActivateSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: x (rows, 2 * columns), or of masked rows (experts, room, 2 * columns); places and chosen (tokens,
        top_k), contiguous; bias (experts, 2 * columns); values and scales as x. A CTA for each 1024 columns of a
        choice."""
        values: dict[str, Value] = {name: getattr(spec, name) for name in ("rows", "columns", "limit", "room")}
        values |= {"x_stride": strides["x"][-2], "values_stride": strides["values"][-2]}
        values |= {"bias_stride": strides["bias"][0]} if spec.biased else {}
        if spec.output == "e4m3":
            values |= {"scale_stride_group": 0, "epsilon": float_bits(AMAX_MIN)} | _of_scales(strides, spec.room)
        grid = spec.choices * ceil_div(spec.columns, self.config.tile_columns), 1, 1
        return LaunchShape(grid=grid, block=self.config.num_threads, dynamic_shared=0, pdl=pdl), values

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``moe_activate_swigluoai_bias_bf16``."""
        return "_".join([self.name, *map(str, params.options), params.output])

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """All of them."""
        every = product(GATED, ("bf16", "e4m3"), (False, True))
        specs = [ActivateSpec(name, 64, 512, 2048, 0, output, biased, 7.0) for name, output, biased in every]
        return [self.params(spec, self.config, SM90) for spec in specs]

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Those of gpt-oss with bfloat16, and of DeepSeek-V4 with FP8."""
        served = ("swigluoai", "bias", "bf16"), ("swiglu", "e4m3")
        return [each for each in self.cases() if (*each.options, each.output) in served]

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """See `_OneConfig`: SwiGLU without biases, and gpt-oss's activation with them."""
        return [each for each in self.cases() if ("bias" in each.options) == GATED[str(each.options[0])][1]]


def _of_scales(strides: Strides, room: int) -> dict[str, Value]:
    """How scales of rows lie, of masked ones with the expert in front; without scales nothing."""
    if "scales" not in strides:
        return {}
    *group, row, column = strides["scales"]
    found: dict[str, Value] = {"scale_stride_row": row, "scale_stride_column": column}
    return found | ({"scale_stride_group": group[0] - room * row} if group else {})


def _dots(config: TileConfig, spec: DotsSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: x (any rows, width), places and out (tokens, top_k), contiguous, and rows (tokens, width). A CTA for
    each token."""
    values = {"x_stride": strides["x"][-2], "rows_stride": strides["rows"][0]}
    return (spec.tokens, 1, 1), {"width": spec.width, "top_k": spec.top_k, **values}


def _route(config: TileConfig, spec: RouteSpec, strides: Strides) -> tuple[Grid, Mapping[str, Value]]:
    """Operands: chosen, rows and places (tokens, top_k), of_rows, index and labels (capacity), sizes (experts), all
    contiguous. A CTA for each token, or for each SM."""
    names = "tokens", "experts", "top_k", "room", "capacity"
    return (min(spec.tokens, spec.num_sms), 1, 1), {name: getattr(spec, name) for name in names}


DISPATCH, COMBINE, ACTIVATE = DispatchFamily(), CombineFamily(), ActivateFamily()
ROUTE = Helper(
    name="moe_route",
    spec=RouteSpec,
    what="it gives choices of experts rows",
    config=_ROUTE,
    given=parse_arguments(
        "const i64* chosen, i64* rows, int* places, i64* of_rows, int* index, int* labels, int* sizes, u32 tokens, "
        "u32 experts, u32 top_k, u32 room, u32 capacity"
    ),
    launched=_route,
    constant_names=("num_threads",),
    archs=(SM90.name,),
)
"""See ``templates/include/moe_route.cuh``."""
DOTS = Helper(
    name="moe_dots",
    spec=DotsSpec,
    what="it multiplies rows of tokens with those of experts",
    config=_DOTS,
    given=parse_arguments(
        "const u8* x, i64 x_stride, const int* places, const u8* rows, i64 rows_stride, float* out, u32 width, "
        "u32 top_k"
    ),
    launched=_dots,
    constant_names=("num_threads",),
    archs=(SM90.name,),
)
"""See ``templates/include/moe_dots.cuh``."""
