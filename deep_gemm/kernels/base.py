"""The interface of a kernel family: the specs it computes, its configs, its launch, and its template's fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from .. import arch as archs
from ..arch import SM90, ArchSpec
from ..jit.binary import PostPass
from ..jit.driver.launch import NUMBERS, LaunchArgument, LaunchShape, Map, Pointer
from ..params import Config, KernelParams
from ..records import record
from ..spec import Spec

Strides: TypeAlias = Mapping[str, tuple[int, ...]]
"""The strides of each operand by name, in elements, outermost dimension first."""

Numbers: TypeAlias = Mapping[str, float | tuple[int, ...]]
"""Numbers by name that a launch takes besides sizes and strides, such as alpha."""

NO_NUMBERS: Numbers = MappingProxyType({})

EVERY_ARCH = archs.names()
"""The targets of kernels that need no instruction of one architecture."""


def integers(numbers: Numbers, name: str) -> tuple[int, ...]:
    """Several integers of ``numbers``."""
    found = numbers[name]
    if not isinstance(found, tuple):
        raise TypeError(f"{name} must be a tuple of integers, but it is {found!r}")
    return found


Value: TypeAlias = int | float | Sequence[int] | Map | bytes | None


@record(frozen=True)
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

    def pack(self, value: Value) -> LaunchArgument:
        """``value`` as the launch record takes it."""
        if self.ctype.endswith("*"):
            return Pointer(self.operand or self.name)
        if isinstance(value, (Map, bytes)):
            return value
        if value is None:
            raise TypeError(f"a launch gives no value for the argument {self.name}")
        return (self.ctype, value) if isinstance(value, (int, float)) else ("u32s", tuple(value))


def parse_arguments(text: str) -> tuple[Argument, ...]:
    """Arguments from declarations such as ``"u32 m, const u8* input=x"``: type, name, and the operand if it is called
    differently."""
    found = []
    for declaration in text.split(","):
        name, _, operand = declaration.strip().rpartition(" ")[2].partition("=")
        found.append(Argument(name, declaration.strip().rpartition(" ")[0], operand))
    return tuple(found)


@record(frozen=True)
class LaunchPlan:
    """Grid, cluster and shared memory of one launch, and its parameters in order, without the operands' addresses."""

    shape: LaunchShape
    parameters: tuple[LaunchArgument, ...]


class KernelFamily(ABC):
    """One kernel family: a template, and the Python code that knows its legal configs.

    Discovery, selection, the compile tests, the GPU accuracy tests and precompilation follow from an instance in
    `families.GEMMS` or in `other_families.OTHERS`.
    """

    name: str
    template_file: str
    """File name of the template, in ``templates/kernels``."""
    archs: tuple[str, ...] = (SM90.name,)
    """Compiler targets that the family can be built for. Tests compile its cases for the first one."""
    mma_instruction: str = ""
    """The tensor-core instruction that the SASS must contain; empty for a kernel without one."""

    @property
    def arch(self) -> ArchSpec:
        """The first of its targets."""
        return archs.get(self.archs[0])

    @abstractmethod
    def refuses(self, spec: Spec) -> str | None:
        """Why this family cannot compute ``spec``, as a sentence, or None if it can."""

    @abstractmethod
    def configs(self, arch: ArchSpec) -> Sequence[Config]:
        """The serving set: the configs that calls choose from, each once, all of them legal on ``arch``."""

    def config_of(self, spec: Any, arch: ArchSpec) -> Config:
        """The config with which a helper kernel computes ``spec``. Of GEMMs, `select` chooses."""
        return self.configs(arch)[0]

    @abstractmethod
    def params(self, spec: Any, config: Any, arch: ArchSpec) -> KernelParams:
        """The identity of the binary that computes ``spec`` with ``config``."""

    @abstractmethod
    def arguments(self, params: KernelParams) -> tuple[Argument, ...]:
        """The kernel's parameters in order. The signature and the packing of a launch both follow from this list."""

    @abstractmethod
    def constants(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """The template's variables, except ``name`` and those that follow from `arguments`."""

    @abstractmethod
    def values(
        self, params: KernelParams, spec: Any, strides: Strides, numbers: Numbers, pdl: bool, constant: bool
    ) -> tuple[LaunchShape, Mapping[str, Value]]:
        """The launch shape, and the values of `arguments` by name, without pointers."""

    @abstractmethod
    def shared_bytes(self, params: KernelParams) -> int:
        """Dynamic shared memory of one CTA."""

    @abstractmethod
    def kernel_name(self, params: KernelParams) -> str:
        """The extern "C" name of the kernel: readable in a profiler, and a safe file name."""

    @abstractmethod
    def cases(self, arch: ArchSpec | None = None) -> list[KernelParams]:
        """The instances that tests compile and run: every template branch at least once. They are for the first of its
        targets if ``arch`` is None."""

    def precompile_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """The instances that calls before a dense GEMM can need (see `ops.helpers`)."""
        return self.cases(arch)

    def default_cases(self, arch: ArchSpec) -> list[KernelParams]:
        """The instances that calls with default options can need, but for those of a `GemmFamily`, which depend on the
        operation (see `aot.shipped`)."""
        return self.cases(arch)

    def describe(self, config: Config) -> str:
        """``config`` as a short text for people."""
        rows, columns = config.tile
        return f"{rows}x{columns}"

    def post_pass(self, params: KernelParams) -> PostPass | None:
        """The edit of the cubin of ``params`` under the current settings, or None."""
        return None

    def fields(self, params: KernelParams) -> Mapping[str, str | int | bool]:
        """All variables of the template, and no others."""
        signature = ", ".join(argument.declaration for argument in self.arguments(params))
        return {**self.constants(params), "name": self.kernel_name(params), "signature": signature}

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

    def launch_plan(
        self,
        params: KernelParams,
        spec: Any,
        strides: Strides,
        pdl: bool = False,
        constant: bool = False,
        numbers: Numbers = NO_NUMBERS,
    ) -> LaunchPlan:
        """The launch with which the kernel of ``params`` computes ``spec`` on operands with ``strides``.

        Args:
            pdl: programmatic dependent launch: the kernel may start before the previous kernel of the stream has ended.
            constant: no kernel that still runs writes the weights (B and its scales).
            numbers: those of the step; see `runtime.operation.Step`.
        """
        shape, values = self.values(params, spec, strides, numbers, pdl, constant)
        return LaunchPlan(shape, tuple(argument.pack(values.get(argument.name)) for argument in self.arguments(params)))
