"""The interface of a kernel family: the specs it computes, its configs, its launch, and its template's fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from ..arch import ArchSpec
from ..jit.binary import PostPass
from ..jit.driver.launch import NUMBERS, LaunchShape, Map, Parameter, Pointer
from ..params import GemmConfig, KernelConfig, KernelParams
from ..spec import GemmSpec, Spec
from .features import Features

ConfigT = TypeVar("ConfigT", bound=KernelConfig)

Strides: TypeAlias = Mapping[str, tuple[int, ...]]
"""The strides of each operand by name, in elements, outermost dimension first."""

Value: TypeAlias = int | float | list[int] | Map | bytes | None


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel: its name and its type in the device code.

    ``operand`` is the operand that a pointer or a tensor map belongs to. ``field`` is the field of the device code's
    struct that the parameter fills. Each is the parameter's name if it is empty.
    """

    name: str
    ctype: str
    operand: str = ""
    field: str = ""

    @property
    def is_value(self) -> bool:
        """Whether it is a number or an address, not a struct."""
        return self.ctype in NUMBERS or self.ctype.endswith("*")

    @property
    def declaration(self) -> str:
        """Its declaration in the kernel's signature. Structs stay in constant memory, where TMA can read them."""
        return f"{self.ctype} {self.name}" if self.is_value else f"const __grid_constant__ {self.ctype} {self.name}"

    @property
    def assignment(self) -> str:
        """The statement that assigns it to its field of the device code's struct ``arguments``."""
        return f"arguments.{self.field or self.name} = {'' if self.is_value else '&'}{self.name};"

    def pack(self, value: Value) -> Parameter:
        """``value`` as the launch record takes it."""
        if self.ctype.endswith("*"):
            return Pointer(self.operand or self.name)
        if isinstance(value, (Map, bytes)):
            return value
        if isinstance(value, list):
            return ("u32s", tuple(value))
        if value is None:
            raise TypeError(f"a launch gives no value for the argument {self.name}")
        return (self.ctype, value)


@dataclass(frozen=True)
class LaunchPlan:
    """Grid, cluster and shared memory of one launch, and its parameters in order, without the operands' addresses."""

    shape: LaunchShape
    parameters: tuple[Parameter, ...]


class Kernel(ABC, Generic[ConfigT]):
    """One kernel family: a template, and the Python code that knows its legal configs.

    Discovery, selection, the compile tests, the GPU accuracy tests and precompilation follow from
    an instance named ``KERNEL`` in a module of this package.
    """

    name: str
    """The family's name, and the template's: ``templates/kernels/<name>.cu.jinja``."""

    archs: tuple[str, ...]
    """Compiler targets that the family can be built for."""

    config_class: type[ConfigT]
    """The class of this family's configs. No other family has the same class."""

    mma_instruction: str = ""
    """The tensor-core instruction that the SASS must contain; empty for a kernel without one."""

    @property
    def template(self) -> str:
        """File name of the template."""
        return f"{self.name}.cu.jinja"

    @abstractmethod
    def refuses(self, spec: Spec) -> str | None:
        """Why this family cannot compute ``spec``, as a sentence, or None if it can."""

    @abstractmethod
    def configs(self, arch: ArchSpec) -> Iterator[ConfigT]:
        """The serving set: the configs that calls choose from, each once, all of them legal on ``arch``."""

    def legal(self, arch: ArchSpec) -> Iterator[ConfigT]:
        """Every config that is legal on ``arch``, each once: for surveys and tuners."""
        return self.configs(arch)

    @abstractmethod
    def illegal(self, config: ConfigT, arch: ArchSpec) -> str | None:
        """Why ``config`` cannot run on ``arch``, as a sentence, or None if it can."""

    def runs(self, spec: Spec, config: ConfigT) -> bool:
        """Whether the legal config ``config`` can run ``spec``, however slowly."""
        return True

    def worthwhile(self, spec: Spec, config: ConfigT) -> bool:
        """Whether the model ranks ``config``; False where another config is known to be better."""
        return True

    def handicap(self, config: ConfigT) -> float:
        """By how much the model's time of ``config`` counts longer. Above 1 for configs that only few shapes need: they
        are chosen where they save more than the model errs, and so a deployment compiles fewer kernels."""
        return 1.0

    def speeds(self, spec: Spec) -> str:
        """The name of the speeds in a calibration by which the model estimates ``spec``; empty for the common ones. All
        families give the same name for one spec."""
        return ""

    def params(self, spec: Spec, config: ConfigT, arch: ArchSpec) -> KernelParams:
        """The identity of the binary that computes ``spec`` with ``config``."""
        return KernelParams(kernel=self.name, arch=arch.name, config=config)

    @abstractmethod
    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The kernel's parameters in order. The signature and the packing of a launch both follow from this list."""

    @abstractmethod
    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """The template's variables, except ``name`` and those that follow from `arguments`."""

    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """All variables of the template, and no others."""
        signature = ", ".join(argument.declaration for argument in self.arguments(params))
        return {**self.constants(params), "name": self.entry(params), "signature": signature}

    def struct_fields(self, params: KernelParams) -> str:
        """The fields of the device code's struct ``Arguments``: numbers, addresses, and pointers to structs in constant
        memory. A parameter whose field is ``name[i]`` is an element of an array."""
        fields: dict[str, tuple[str, int]] = {}
        for argument in self.arguments(params):
            name, _, index = (argument.field or argument.name).partition("[")
            ctype = argument.ctype if argument.is_value else f"const {argument.ctype}*"
            fields[name] = (ctype, int(index.rstrip("]")) + 1 if index else 0)
        return "\n  ".join(f"{ctype} {name}{f'[{size}]' if size else ''};" for name, (ctype, size) in fields.items())

    def struct(self, params: KernelParams) -> str:
        """Statements that fill the device code's struct ``arguments``, whose fields have the parameters' names."""
        return "\n  ".join(argument.assignment for argument in self.arguments(params))

    @abstractmethod
    def values(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """The launch shape, and the values of `arguments` by name, without pointers."""

    def launch(
        self, params: KernelParams, spec: Spec, strides: Strides, pdl: bool = False, constant: bool = False
    ) -> LaunchPlan:
        """The launch with which the kernel of ``params`` computes ``spec`` on operands with ``strides``.

        Args:
            pdl: programmatic dependent launch: the kernel may start before the previous kernel of the stream has ended.
            constant: no kernel that still runs writes the weights (B and its scales).
        """
        shape, values = self.values(params, spec, strides, pdl, constant)
        return LaunchPlan(shape, tuple(argument.pack(values.get(argument.name)) for argument in self.arguments(params)))

    def features(self, spec: Spec, config: ConfigT) -> Features:
        """The inputs of the performance model. A family with one config does not need them."""
        raise NotImplementedError(f"{self.name} has one config: there is nothing to rank")

    def post_pass(self, params: KernelParams | None = None) -> PostPass | None:
        """The edit of the cubin of ``params`` under the current settings, or None; without ``params``, that of any
        cubin of the family."""
        return None

    @abstractmethod
    def shared_bytes(self, params: KernelParams) -> int:
        """Dynamic shared memory of one CTA."""

    @abstractmethod
    def entry(self, params: KernelParams) -> str:
        """The extern "C" name of the kernel: readable in a profiler, and a safe file name."""

    def describe(self, config: ConfigT) -> str:
        """``config`` as a short text for people."""
        rows, columns = config.tile
        return f"{rows}x{columns}"

    @abstractmethod
    def cases(self) -> list[KernelParams]:
        """The instances that tests compile and run: every template branch at least once."""

    def ahead(self) -> list[KernelParams]:
        """The instances that calls before a dense GEMM can need (see `ops.helpers`)."""
        return self.cases()


class GemmKernel(Kernel[ConfigT]):
    """The base class of GEMM families."""

    label: str = ""
    """The family's prefix in `describe`, which ends in a space."""

    def describe(self, config: ConfigT) -> str:
        """Tile, stages, consumers, cluster, and CTAs per SM."""
        c = config
        if not isinstance(c, GemmConfig):
            return super().describe(c)
        text = f"{self.label}{c.block_m}x{c.block_n}x{c.block_k} s{c.num_stages} w{c.num_consumers}"
        text += f" c{c.cluster_m}x{c.cluster_n}x{c.cluster_k}"
        return text + (f" r{c.ctas_per_sm}" if c.ctas_per_sm > 1 else "")

    def runs(self, spec: Spec, config: ConfigT) -> bool:
        """Whether tile and cluster respect the caller's limits, and K is summed in one order if the spec wants that."""
        if not isinstance(spec, GemmSpec) or not isinstance(config, GemmConfig):
            return False
        multiple_m, multiple_n = spec.block_multiple
        return (
            config.block_m % multiple_m == 0
            and config.block_n % multiple_n == 0
            and config.cluster_size <= spec.num_sms
            # On part of a GPU the hardware would spread CTAs that should share an SM over other SMs.
            and (spec.whole_gpu or config.ctas_per_sm == 1)
            and not (spec.batch_invariant and config.k_splits > 1)
        )

    def store(self, config: ConfigT, aligned: bool) -> str:
        """How ``config`` stores D: "tma" if its rows are aligned for TMA, otherwise "direct"."""
        return "tma" if aligned else "direct"

    def params(self, spec: Spec, config: ConfigT, arch: ArchSpec) -> KernelParams:
        """See `Kernel.params`. Adds the store that D allows and the dimensions that the caller wants compiled in."""
        if not isinstance(spec, GemmSpec):
            raise TypeError(f"{self.name} multiplies matrices, but it was asked for {spec}")
        sizes = {"m": spec.m, "n": spec.n, "k": spec.k}
        m, n, k = (size if name in spec.compiled_dims else 0 for name, size in sizes.items())
        params = super().params(spec, config, arch)
        return replace(params, store=self.store(config, spec.d.aligned), shape=(m, n, k))
