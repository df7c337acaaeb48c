"""GEMM families: what each supports, and its binaries, launches and names.

A family is data: a template, a serving set, and a row of what is supported. Everything else follows from these here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from .. import arch as archs
from ..arch import SM90, ArchSpec
from ..jit.binary import PostPass
from ..jit.driver.launch import LaunchShape
from ..params import GemmConfig, KernelParams
from ..parts import MATRICES, Parts, parse
from ..records import record
from ..spec import SCALE_BLOCK, SCALINGS, Accumulate, GemmSpec, Grouping, Spec
from . import epilogues, groups
from .base import Argument, KernelFamily, Numbers, Strides, Value
from .features import Costs, Features
from .gemm_features import constant_features
from .gemm_features import features as count
from .groups import ALONG_M
from .template import BYTES, Template, kernel_name

SAME = "same"
"""In `GemmFamily.outputs`: the dtype of the operands."""


def _none(spec: GemmSpec) -> None:
    return None


@record(frozen=True, eq=False)
class GemmFamily(KernelFamily):
    """One family: its ``template``, and the ``serving`` set as arguments of `Template.make`.

    ``in_parts`` are other rows for batch invariance, where K is summed in parts; see `Template.parts_of_k`.
    It is built for ``archs``. It takes operands of ``dtypes``, A and B of one unless it ``mixes`` them, in the
    ``forms`` and ``scalings``, writes D in ``outputs``, adds C in the ways ``accumulates``, and knows the
    ``groupings``. ``aligned_d``: only a D whose rows begin at multiples of 16 bytes. ``limit`` refuses more, in a
    sentence. Names of kernels begin with ``prefix``, if it is given, instead of operands and output, and descriptions
    of configs with ``label``. Cases are the serving set with ``serving_options``, and ``varied``, as arguments of
    `config` and of `case`.
    """

    name: str
    template: Template
    serving: tuple[tuple[Any, ...], ...]
    dtypes: tuple[str, ...]
    outputs: tuple[str, ...]
    in_parts: tuple[tuple[Any, ...], ...] = ()
    mixes: bool = False
    forms: tuple[str, ...] = ("nt",)
    scalings: tuple[str, ...] = ("none",)
    groupings: tuple[Grouping, ...] = ("none",)
    accumulates: tuple[Accumulate, ...] = get_args(Accumulate)
    aligned_d: bool = False
    limit: Callable[[GemmSpec], str | None] = _none
    label: str = ""
    prefix: str = ""
    tile_prefix: str = ""
    varied: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()
    serving_options: Callable[[GemmConfig], Mapping[str, Any]] = lambda config: {}
    archs: tuple[str, ...] = (SM90.name,)

    @property
    def template_file(self) -> str:  # type: ignore[override]
        return self.template.file

    @property
    def mma_instruction(self) -> str:  # type: ignore[override]
        return self.template.mma_instruction

    @property
    def has_epilogues(self) -> bool:
        """Whether it takes all that `Parts` has: one product does, and groups along M do."""
        return self.template.takes_epilogues and set(self.groupings) <= {"none", *ALONG_M}

    @property
    def has_residuals(self) -> bool:
        """Whether it adds a residual. Wide tiles of others have too few registers for its addresses."""
        return self.groupings == ("none",) and self.template.adds_residuals

    # ---- which specs, and which configs

    def refuses(self, spec: Spec) -> str | None:
        if not isinstance(spec, GemmSpec):
            return "it multiplies matrices"
        a, b, d = spec.a, spec.b, spec.d
        if a.dtype not in self.dtypes or b.dtype not in (self.dtypes if self.mixes else (a.dtype,)):
            known = f"be {' or '.join(self.dtypes)}" if self.mixes else f"both be {' or both '.join(self.dtypes)}"
            return f"A and B must {known}, not {a.dtype} and {b.dtype}"
        if spec.scaling not in self.scalings:
            known = ", ".join(" and ".join(pair) for pair, name in SCALINGS.items() if name in self.scalings)
            return f"scales of A and B must be {known}, not {a.scaling} and {b.scaling}"
        if spec.form not in self.forms:
            return f"the layouts of A and B must be {', '.join(self.forms).upper()}, not {spec.form.upper()}"
        for name, operand in (("A", a), ("B", b)):
            if why := self.template.unreadable(name, operand):
                return why
        outputs = [a.dtype if output == SAME else output for output in self.outputs]
        if d.dtype not in outputs or (d.major, d.scaling) != ("mn", "1x128" if d.dtype == "e4m3" else "none"):
            return f"D must be row-major {' or '.join(outputs)}, not {d.major}-major {d.dtype}"
        if self.aligned_d and not d.aligned:
            return "rows of D must begin on 16-byte boundaries"
        if spec.grouping not in self.groupings:
            return f"its groups are {' or '.join(self.groupings)}, not {spec.grouping}"
        parts = spec.epilogue
        if parts and not self.has_epilogues:
            return f"it has no epilogue, and {parts} is asked for"
        if parts.is_gated != self.template.gated:
            return "it computes products with a gate only" if self.template.gated else "it has no gate for SwiGLU"
        if not self.has_residuals and (matrix := next((x for x in parts.tensors if x in MATRICES), "")):
            return f"it adds no {matrix}"
        if spec.grouping != "none" and parts.expression:
            return "with groups it takes no expression of a user"
        if not parts.cast and (why := parts.refusal(spec.grouping != "none")):
            return why
        if bool(parts.cast) != (d.dtype == "e4m3"):
            return f"D of FP8 has scales, which an epilogue asks for, but D is {d.dtype} and the epilogue {parts}"
        if parts.cast and (parts.refusal() or spec.accumulate != "none"):
            return "it adds nothing to a D of FP8 but a bias"
        if parts.cast and (columns := self.template.columns_of_d(spec.n)) % SCALE_BLOCK:
            return f"columns of a D of FP8 must be a multiple of {SCALE_BLOCK}, not {columns}"
        if parts.cast and not d.aligned:
            return "rows of a D of FP8 must begin on 16-byte boundaries"
        if spec.accumulate not in self.accumulates:
            return "it writes the product as it is" + (", or with C added" if len(self.accumulates) > 1 else "")
        return self.limit(spec)

    def config(self, *tile: Any, arch: ArchSpec | None = None, **options: Any) -> GemmConfig:
        """A config of this family; see `Template.make` of its template."""
        return self.template.make(self.name, *tile, arch=arch or self.arch, **options)

    def configs(self, arch: ArchSpec) -> tuple[GemmConfig, ...]:
        """The serving set. If the family has several targets, without what is not legal on ``arch``. If it has one, a
        test shows that all is legal: checks would make a first call slower."""
        return (_configs_of if len(self.archs) == 1 else _legal_of)(self, self.serving, arch)

    def configs_for(self, spec: GemmSpec, arch: ArchSpec) -> tuple[GemmConfig, ...]:
        """The configs that ``spec`` chooses from: the serving set, or that for parts of K."""
        return _configs_of(self, self.in_parts, arch) if self._in_parts(spec) else self.configs(arch)

    @property
    def _in_turn(self) -> tuple[tuple[Any, ...], ...]:
        """Rows of ``in_parts`` that no other config has."""
        return tuple(row for row in self.in_parts if self.config(*row).in_turn > 1)

    def _in_parts(self, spec: GemmSpec) -> bool:
        return spec.batch_invariant and self.template.parts_of_k(spec) > 1

    def legal(self, arch: ArchSpec) -> tuple[GemmConfig, ...]:
        """Every config that is legal on ``arch``, each once: for surveys and tuners."""
        return _legal_of(self, (*self.template.tiles(), *self._in_turn), arch)

    def illegal(self, config: GemmConfig, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, as a sentence, or None if it can."""
        return self.template.illegal(config, arch)

    def offered(self, spec: GemmSpec, configs: Sequence[GemmConfig]) -> list[GemmConfig]:
        """The configs that the model ranks for ``spec``, of ``configs``, which are of the serving set; see
        `Template.offered`."""
        return self.template.offered(spec, configs, self.in_parts if self._in_parts(spec) else self.serving)

    def fits(self, spec: GemmSpec, config: GemmConfig) -> bool:
        """Whether the legal config ``config`` can run ``spec``, however slowly: it respects the caller's limits, sums K
        in one order if the spec wants that, and no tile reaches from one group into the next."""
        return bool(self.fitting(spec, (config,)))

    def fitting(self, spec: GemmSpec, configs: Iterable[GemmConfig]) -> list[GemmConfig]:
        """The configs for which `fits` is true."""
        multiple_m, multiple_n = spec.block_multiple
        adds_c, scaling, fits = self.adds_c(spec), spec.scaling, self.template.fits
        alignment = spec.alignment if spec.grouping in ("contiguous", "psum") else 0
        has_epilogue = bool(spec.epilogue)
        in_order = self.template.parts_of_k(spec) if spec.batch_invariant else 0
        return [
            c
            for c in configs
            if c.block_m % multiple_m == 0
            and c.block_n % multiple_n == 0
            and c.cluster_m * c.cluster_n * c.cluster_k <= spec.num_sms
            # On part of a GPU the hardware would spread CTAs that should share an SM over other SMs.
            and (spec.whole_gpu or c.ctas_per_sm == 1)
            and (not in_order or (c.cluster_k * c.in_turn == in_order and c.consumers_k == 1 and not c.parts))
            and (c.in_turn == 1 or 2 * c.in_turn * c.block_k <= spec.k)
            and alignment % c.block_m == 0
            and not (has_epilogue and not self.template.finishes(c))
            and fits(spec, c, adds_c, scaling)
        ]

    def adds_c(self, spec: GemmSpec) -> str:
        """What adds C, see `KernelParams`. TMA would add after an epilogue, so not with one."""
        if spec.accumulate == "none":
            return "none"
        in_place = spec.accumulate == "in place" and spec.d.dtype == "f32" and spec.d.aligned
        by_tma = in_place and self.template.adds_in_memory and not spec.epilogue
        return "tma" if by_tma else "threads"

    def describe(self, config: Any) -> str:
        """Tile, stages, consumers, cluster, and CTAs per SM."""
        c = config
        text = f"{self.label}{c.block_m}x{c.block_n}x{c.block_k} s{c.num_stages} w{c.num_consumers}"
        text += f" c{c.cluster_m}x{c.cluster_n}x{c.cluster_k}"
        text += f" t{c.in_turn}" if c.in_turn > 1 else ""
        return text + (f" r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "")

    def speeds(self, spec: GemmSpec) -> str:
        """See `Template.speeds`."""
        return self.template.speeds(spec)

    def features(self, spec: GemmSpec, config: GemmConfig, arch: str = SM90.name) -> Features:
        """The inputs of the performance model on the target ``arch``. Groups are estimated as one product with about as
        much work."""
        size = BYTES[spec.a.dtype]
        scaling = SCALINGS.get((spec.a.scaling, spec.b.scaling), "")  # a property would be a call for each config
        costs = _costs(self, config, spec.d.dtype, spec.d.aligned, scaling, arch)
        if spec.grouping == "summed":
            return groups.summed(lambda each: count(*costs, each, config, size), spec, config)
        if config.parts:
            alone = costs[0].exchanges_alone
            return groups.in_parts(lambda each: count(*costs, each, config, size), spec, config, alone)
        if spec.grouping in ("none", "heads"):
            return count(*costs, spec, config, size)
        if spec.grouping == "k":
            return count(*costs, groups.one_product(spec, config, config.block_k), config, size)
        return groups.with_weights(count(*costs, groups.expected(spec, config), config, size), spec, size)

    # ---- a binary

    def params(self, spec: GemmSpec, config: GemmConfig, arch: ArchSpec) -> KernelParams:
        """The binary's config has as many stages as fit beside what the spec needs."""
        sizes = {"m": spec.m, "n": spec.n, "k": spec.k}
        m, n, k = (size if name in spec.compiled_dims else 0 for name, size in sizes.items())
        return self.case(
            config,
            arch=arch,
            store="tma" if spec.d.aligned else "direct",
            shape=(m, n, k),
            dtype=spec.dtypes,
            form=spec.form,
            scaling=spec.scaling,
            output=spec.d.dtype,
            adds_c=self.adds_c(spec),
            grouping=spec.grouping,
            epilogue=spec.epilogue,
            segments=groups.segments(spec.grouping, spec.groups),
        )

    def case(self, config: GemmConfig, arch: ArchSpec | None = None, **options: Any) -> KernelParams:
        """The identity of a binary with ``config``. ``options`` are fields of `KernelParams`, where an epilogue may be
        its text. Their defaults are TMA stores, and the first of everything that the family supports."""
        arch, dtype = arch or self.arch, options.get("dtype", self.dtypes[0])
        output = dtype if self.outputs[0] == SAME else self.outputs[0]
        first = {"dtype": dtype, "form": self.forms[0], "scaling": self.scalings[0], "output": output}
        first |= {"grouping": self.groupings[0], "store": "tma"}
        if isinstance(text := options.get("epilogue"), str):
            options["epilogue"] = parse(text)
        params = KernelParams(**{"kernel": self.name, "arch": arch.name, "config": config, **first, **options})
        if config.parts:  # the consumers that add all parts store them
            params = replace(params, store="direct", adds_c=params.adds_c.replace("tma", "threads"))
        table = groups.table_bytes(params.grouping, params.segments)
        return replace(params, config=self.template.fitted(params, table, arch))

    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """The serving set, configs that sum parts of K in turn, and `varied`."""
        arch = arch or self.arch
        configs = self.configs(arch)
        turned = _configs_of(self, self._in_turn, arch)
        serving = [self.case(config, arch, **self.serving_options(config)) for config in (*configs, *turned)]
        has_all = self.has_epilogues and not self.template.gated  # those of gates are in `varied`
        both = (Parts(bias="f32", activation="gelu"), epilogues.every(self.has_residuals)) if has_all else ()
        able = [config for config in configs if self.template.finishes(config)]
        finished = [self.case(able[-index], arch, epilogue=parts) for index, parts in enumerate(both)]
        varied = [self.case(self.config(*tile, arch=arch), arch, **more) for tile, more in self.varied]
        return serving + varied + finished

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """None of its own: see `KernelFamily.default_cases`."""
        return []

    def post_pass(self, params: KernelParams) -> PostPass | None:
        return self.template.post_pass(params)

    def shared_bytes(self, params: KernelParams) -> int:
        return self.template.shared_bytes(params) + groups.table_bytes(params.grouping, params.segments)

    def kernel_name(self, params: KernelParams) -> str:
        return kernel_name(params, self.template, self.prefix, self.tile_prefix)

    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        given: dict[str, str | int | bool] = {
            "shared_bytes": self.shared_bytes(params),
            "epilogue": epilogues.device_name(params.epilogue),
            "expression": epilogues.device_code(params.epilogue),
            "arguments": self.struct(params),
            "argument_fields": self.struct_fields(params),
        }
        return self.template.constants(params, given)

    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        return _arguments_of(self, params)

    # ---- a launch

    def values(
        self, params: KernelParams, spec: GemmSpec, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """Operands: a, b, d; c if consumers read it; sfa and sfb with scales; and layout with groups. Scales of 1x128
        are (rows, blocks of K) with contiguous rows; scales of rows have one stride.

        With groups, matrices of all groups lie one after the other in one tensor map. With "masked", A's scales of all
        groups are the rows of one matrix of (groups x blocks of K, rows of a group). With groups along K, d and c have
        three strides. FP8 then takes tensor maps of A and B from the operand maps. All operands of a batch have three
        strides; so have a and b that are summed. An epilogue's tensors are operands of their own.

        Numbers: "alpha", if the epilogue has it; with FP8 in groups along K "blocks", those of K that the scales of A
        and of B have; with heads "heads", the columns of a head of D on the left, in the middle and on the right."""
        c, pdl = params.gemm, pdl and self.template.starts_early
        grid, values = self.template.launch(params, spec, strides, numbers, constant and pdl)
        values |= epilogues.values(params.epilogue, strides, numbers)
        shape = LaunchShape(
            grid=grid,
            block=self.template.num_threads(c),
            dynamic_shared=self.shared_bytes(params),
            cluster=(c.cluster_size, 1, 1),
            pdl=pdl,
        )
        return shape, {"m": spec.m, "n": spec.n, "k": spec.k, **values}


@functools.cache
def _legal_of(family: GemmFamily, tiles: tuple[tuple[Any, ...], ...], arch: ArchSpec) -> tuple[GemmConfig, ...]:
    return tuple(each for each in _configs_of(family, tiles, arch) if family.illegal(each, arch) is None)


@functools.cache
def _configs_of(family: GemmFamily, tiles: tuple[tuple[Any, ...], ...], arch: ArchSpec) -> tuple[GemmConfig, ...]:
    make, name = family.template.make, family.name
    return tuple([make(name, *tile, arch=arch) for tile in tiles])


@functools.lru_cache(maxsize=64)
def _arguments_of(family: GemmFamily, params: KernelParams) -> tuple[Argument, ...]:
    """Cached, since a first call asks for them four times."""
    return family.template.arguments(params) + epilogues.arguments(params.epilogue)


@functools.cache
def _costs(
    family: GemmFamily, config: GemmConfig, output: str, aligned: bool, scaling: str, arch: str
) -> tuple[Costs, Mapping[str, float], int]:
    found = family.template.costs(config, output, aligned, scaling, arch)
    return found, constant_features(found, config), archs.get(arch).num_sms


def instead(spec: Spec) -> str:
    """What all GPUs compute in place of ``spec``, as a sentence; "" if nothing comes near it."""
    if not isinstance(spec, GemmSpec):
        return ""
    if spec.epilogue.is_gated:
        return "Multiply without the gate, and call deep_gemm.fused.silu_and_mul. "
    if spec.a.scaling == "ue8m0":
        return "Pass float32 scales, which may be powers of two. "
    if spec.d.dtype == "e4m3":
        return "Write a bfloat16 d, and cast it by deep_gemm.quantize.rows. "
    if spec.a.dtype == "e4m3" and spec.b.scaling != "128x128" and spec.grouping == "none":
        return "Scales of 1 x 128 for a and 128 x 128 for b are for all GPUs. "
    return ""
