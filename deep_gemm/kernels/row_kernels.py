"""Functions of the rows of 16-bit matrices: elementwise ones, and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from ..arch import ArchSpec
from ..jit.driver.launch import LaunchShape
from ..params import KernelParams, TileConfig
from ..records import record
from ..spec import Dtype, RowsSpec, Spec, ceil_div, float_bits
from .base import EVERY_ARCH, Argument, KernelFamily, Numbers, Strides, Value, parse_arguments

DTYPES: tuple[Dtype, ...] = ("bf16", "f16")
_TYPES = {"bf16": "kSourceBf16", "f16": "kSourceF16", "f32": "kSourceF32", "e4m3": "kTargetE4m3"}

_REGISTERS = 1 << 16
"""Of an SM."""

GROUPS = "groups"
"""The operand that has the group of each row."""

FEW = 1 << 20
"""Elements up to which elementwise functions have smaller tiles: larger ones would leave SMs idle."""


@record(frozen=True)
class DeviceFunction:
    """A function of rows. ``inputs`` are its matrices and vectors, in the order of the device code, which ``code``
    names for a form and the optional operands that are given."""

    inputs: tuple[str, ...]
    code: Callable[[str, tuple[str, ...]], str]
    optional: tuple[str, ...] = ()
    has_halves: bool = False
    """Whether each matrix has gate and up, and takes the place of two inputs."""
    forms: tuple[str, ...] = ("",)
    numbered: bool = True
    """Whether it depends on `RowsSpec.number`."""
    reduces: bool = False
    """Whether an element of the result depends on the whole row."""
    of_all_models: bool = True
    """Whether the wheel has its kernels, and `precompile` compiles them for each model. Those with a bias of groups are
    left to the JIT."""

    @property
    def variants(self) -> list[tuple[str, ...]]:
        """The optional operands that calls may have. A bias of groups comes with the group of each row."""
        every = product((False, True), repeat=len(self.optional))
        found = [tuple(name for name, here in zip(self.optional, each, strict=True) if here) for each in every]
        return [given for given in found if GROUPS not in self.optional or ("bias" in given) == (GROUPS in given)]


def _flag(is_true: bool) -> str:
    return "true" if is_true else "false"


def _norm(is_centred: bool) -> Callable[[str, tuple[str, ...]], str]:
    def code(form: str, given: tuple[str, ...]) -> str:
        flags = (is_centred, "residual" in given, "bias" in given)
        return f"Norm<Tile, {', '.join(map(_flag, flags))}>{{number}}"

    return code


def _gated(is_oai: bool) -> Callable[[str, tuple[str, ...]], str]:
    def code(form: str, given: tuple[str, ...]) -> str:
        factors = "factors" if "factors" in given else "nullptr"
        flags = f"{_flag(form == 'interleaved')}, {_flag('factors' in given)}"
        if "bias" in given:
            return f"Elementwise<Tile, SiluMul<{flags}, {_flag(is_oai)}, true>>{{{{number, {factors}, {GROUPS}}}}}"
        return f"Elementwise<Tile, SiluMul<{flags}{', true' * is_oai}>>{{{{number, {factors}}}}}"

    return code


FUNCTIONS: Mapping[str, DeviceFunction] = MappingProxyType(
    {
        "add_gelu": DeviceFunction(
            ("x", "y"),
            lambda form, given: f"Elementwise<Tile, AddGelu<{_flag(form == 'tanh')}>>{{}}",
            forms=("erf", "tanh"),
            numbered=False,
        ),
        "mul_add": DeviceFunction(("x", "y", "z"), lambda form, given: "Elementwise<Tile, MulAdd>{}", numbered=False),
        "silu_and_mul": DeviceFunction(
            *(("x", "bias"), _gated(False), ("factors", "bias", GROUPS), True), forms=("halves", "interleaved")
        ),
        "swigluoai_and_mul": DeviceFunction(
            *(("x", "bias"), _gated(True), ("factors", "bias", GROUPS), True),
            forms=("interleaved",),
            of_all_models=False,
        ),
        "rms_norm": DeviceFunction(("x", "residual", "weight"), _norm(False), optional=("residual",), reduces=True),
        "layer_norm": DeviceFunction(
            ("x", "residual", "weight", "bias"), _norm(True), optional=("residual", "bias"), reduces=True
        ),
    }
)


def _config(rows: int, columns: int, threads: int = 128) -> TileConfig:
    return TileConfig("rows", rows, columns, threads)


SEVERAL_ROWS = (_config(8, 128), _config(4, 256), _config(4, 512))
"""A warp or half of one for each row."""
WHOLE_ROWS = (
    *(*SEVERAL_ROWS, _config(4, 1024), _config(1, 2048), _config(1, 4096)),
    *(_config(1, 8192, 256), _config(1, 16384, 512)),
)
"""For norms, the first one that is wide enough, or the last one, whatever the number of rows: so it decides about the
order of sums."""
PARTS_OF_FEW_ROWS, PARTS = _config(1, 1024), _config(1, 2048)


class RowsFamily(KernelFamily):
    """See ``templates/include/rows.cuh``."""

    name = "rows"
    archs = EVERY_ARCH
    template_file = "rows.cu.jinja"

    def refuses(self, spec: Spec) -> str | None:
        """Refuses every spec except functions of rows of 16-bit elements."""
        if not isinstance(spec, RowsSpec):
            return "it computes functions of rows"
        if spec.function not in FUNCTIONS:
            return f"it knows {', '.join(FUNCTIONS)}, not {spec.function}"
        if spec.dtype not in DTYPES or spec.output not in (spec.dtype, "f32", "e4m3"):
            return f"it turns bf16 and f16 into the same, f32 or e4m3, not {spec.dtype} into {spec.output}"
        return None

    def configs(self, arch: ArchSpec) -> tuple[TileConfig, ...]:
        """See `config_of`."""
        return *WHOLE_ROWS, PARTS_OF_FEW_ROWS

    def config_of(self, spec: RowsSpec, arch: ArchSpec) -> TileConfig:
        """Tiles of whole rows for norms. Elementwise functions have tiles of their own, once rows are wide."""
        if FUNCTIONS[spec.function].reduces:
            return next((each for each in WHOLE_ROWS if spec.columns <= each.tile_columns), WHOLE_ROWS[-1])
        narrow = [each for each in SEVERAL_ROWS if spec.columns <= each.tile_columns]
        is_few = spec.columns <= PARTS_OF_FEW_ROWS.tile_columns or spec.rows * spec.columns <= FEW
        return narrow[0] if narrow else PARTS_OF_FEW_ROWS if is_few else PARTS

    def params(self, spec: RowsSpec, config: TileConfig, arch: ArchSpec) -> KernelParams:
        """See `KernelFamily.params`. Its options are the function, its form, and the optional operands."""
        return KernelParams(
            self.name,
            arch.name,
            config,
            store="tma" if spec.aligned else "direct",
            dtype=spec.dtype,
            output=spec.output,
            options=(spec.function, spec.form, *spec.given),
        )

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """Constants of ``rows.cu.jinja``."""
        function, config = _function(params), _tile(params)
        inputs = []
        up = "16" if params.options[1] == "interleaved" else "static_cast<i64>(columns) * 2"
        for name in _matrices(params):
            inputs.append(f"{{{name}, {name}_stride}}")
            if function.has_halves:
                inputs.append(f"{{{name} + {up}, {name}_stride}}")
        scales, rule = "nullptr, 0, 0", "0, false"
        if params.output == "e4m3":
            scales, rule = "scales, scale_stride_row, scale_stride_column", "amax_min, power_of_two != 0"
        tile = [_TYPES[params.dtype], _TYPES[params.output], _flag(params.store == "tma")]
        return {
            "tile": ", ".join(map(str, [*tile, *config.tile, config.num_threads])),
            "num_threads": config.num_threads,
            "ctas_per_sm": _REGISTERS // (config.num_threads * _budget(params)),
            "inputs": ", ".join(inputs),
            "output": f"{{values, stride, {scales}, 0}}, {{{rule}}}",
            "function": function.code(str(params.options[1]), _given(params)),
        }

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """Strides in elements, 0 for a vector."""
        found = [f"const u8* {name}, i64 {name}_stride" for name in _matrices(params)]
        found += ["const float* factors"] if "factors" in params.options else []
        found += [f"const int* {GROUPS}"] if GROUPS in params.options else []
        found += ["u32 rows, u32 columns"] + ["f32 number"] * _function(params).numbered
        found.append(f"u8* values{'' if params.output == 'e4m3' else '=out'}, i64 stride")
        if params.output == "e4m3":
            found.append("float* scales, i64 scale_stride_row, i64 scale_stride_column, u32 amax_min, u32 power_of_two")
        return parse_arguments(", ".join(found))

    def values(
        self, params: KernelParams, spec: RowsSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: the function's inputs, of which a vector is one row for all; and "out", or "values" and
        "scales"."""
        values: dict[str, Any] = {
            f"{name}_stride": strides[name][0] if len(strides[name]) == 2 else 0 for name in _matrices(params)
        }
        values |= {"rows": spec.rows, "columns": spec.columns, "number": spec.number}
        values["stride"] = strides["values" if "scales" in strides else "out"][0]
        if "scales" in strides:
            values["scale_stride_row"], values["scale_stride_column"] = strides["scales"]
            values["amax_min"] = float_bits(spec.amax_min)
            values["power_of_two"] = int(spec.power_of_two)
        config = _tile(params)
        across = 1 if _function(params).reduces else ceil_div(spec.columns, config.tile_columns)
        grid = ceil_div(spec.rows, config.tile_rows) * across, 1, 1
        return LaunchShape(grid=grid, block=config.num_threads, dynamic_shared=0, pdl=pdl), values

    def shared_bytes(self, params: KernelParams) -> int:
        """None: shared memory is static."""
        return 0

    def kernel_name(self, params: KernelParams) -> str:
        """Such as ``rms_norm_residual_bf16_e4m3_1x8192``."""
        aligned = "" if params.store == "tma" else "direct"
        parts = [*map(str, params.options), params.dtype, params.output, self.describe(params.config), aligned]
        return "_".join(filter(None, parts))

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """Each function with each of its forms and operands, to each type of output; norms with each config."""
        found = []
        for name, function in FUNCTIONS.items():
            size = 4096, 7168
            variants = function.variants
            outputs: tuple[Dtype, ...] = ("bf16", "e4m3")
            for form, given, output in product(function.forms, variants, outputs):
                found.append(RowsSpec(name, *size, "bf16", output, form, given))
            plain = [given for given in variants if GROUPS not in given]
            for given in dict.fromkeys((plain[-1], variants[-1])):
                first = RowsSpec(name, *size, "bf16", "e4m3", function.forms[0], given)
                found += [replace(first, output="f32"), replace(first, dtype="f16"), replace(first, aligned=False)]
                found += [replace(first, dtype="f16", output="f16", aligned=False)]
        every = (100, 200, 500, 1000, 2000, 4000, 8000, 20000)
        found += [RowsSpec("rms_norm", 64, columns, "bf16", "bf16") for columns in every]
        found += [RowsSpec("layer_norm", 64, 20000, "bf16", "e4m3", "", ("residual", "bias"))]
        found += [RowsSpec("silu_and_mul", 64, columns, "bf16", "e4m3", "halves") for columns in (100, 2048)]
        arch = arch or self.arch
        return list(dict.fromkeys(self.params(spec, self.config_of(spec, arch), arch) for spec in found))

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """Those of rows of every width that are aligned."""
        return self.cases_of([config.tile_columns for config in self.configs(arch)], arch)

    def cases_of(self, widths: Iterable[int], arch: ArchSpec, dtype: Dtype = "bf16") -> list[KernelParams]:
        """Each function of all models with each of its forms and operands, to the same dtype and to e4m3, of rows with
        so many columns, many and few."""
        found = []
        outputs: tuple[Dtype, ...] = (dtype, "e4m3")
        functions = [(name, function) for name, function in FUNCTIONS.items() if function.of_all_models]
        for (name, function), output, columns in product(functions, outputs, tuple(widths)):
            given = [each for each in function.variants if GROUPS not in each]
            for form, operands, rows in product(function.forms, given, (1, 1 << 16)):
                spec = RowsSpec(name, rows, columns, dtype, output, form, operands, columns % 8 == 0)
                found.append(self.params(spec, self.config_of(spec, arch), arch))
        return list(dict.fromkeys(found))

    def cases_of_experts(self, widths: Iterable[int], arch: ArchSpec, output: Dtype) -> list[KernelParams]:
        """The gated functions between two products of experts, with a bias of each and without, to ``output``, of rows
        with so many columns, many and few."""
        gated = [(name, function.forms[0]) for name, function in FUNCTIONS.items() if function.has_halves]
        every = product(gated, ((), ("bias", GROUPS)), tuple(widths), (1, 1 << 16))
        found = []
        for (name, form), given, columns, rows in every:
            spec = RowsSpec(name, rows, columns, "bf16", output, form, given, columns % 8 == 0)
            found.append(self.params(spec, self.config_of(spec, arch), arch))
        return list(dict.fromkeys(found))


def _function(params: KernelParams) -> DeviceFunction:
    return FUNCTIONS[str(params.options[0])]


def _given(params: KernelParams) -> tuple[str, ...]:
    return tuple(map(str, params.options[2:]))


def _matrices(params: KernelParams) -> list[str]:
    """The inputs that are given, in the device code's order."""
    function = _function(params)
    return [name for name in function.inputs if name not in function.optional or name in _given(params)]


def _budget(params: KernelParams) -> int:
    """Registers of a thread, so many that nothing is spilled."""
    is_norm_with_bias = "bias" in params.options and _function(params).reduces
    return 128 if params.store == "direct" or is_norm_with_bias else 80


def _tile(params: KernelParams) -> TileConfig:
    if not isinstance(params.config, TileConfig):
        raise TypeError(f"rows takes a TileConfig, not a {type(params.config).__name__}")
    return params.config


ROWS = RowsFamily()
