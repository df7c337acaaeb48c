"""A user's kernel as an operation: checks, source, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deep_gemm import arch
from deep_gemm.records import record
from deep_gemm.runtime import debug_record, engine
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step

from ..errors import InvalidInputError, UnsupportedError
from ..jit.binary import Binary
from ..jit.builder import BuildRequest, default_builder
from ..jit.driver.launch import LaunchShape
from ..jit.driver.module import Function, load_function
from ..jit.generator import filled, names_in, render, variables
from ..kernels.base import LaunchPlan, Numbers, Strides
from ..names import SURE_MISTAKES
from ..ops import checks
from ..params import Config, KernelParams
from .launch import LaunchConfig, checked_shape, checked_values
from .parameters import ELEMENTS, Declared

Constants = tuple[tuple[str, str | int | bool], ...]

_GIVEN = ("name", "signature", "num_threads")
"""Jinja fields that every source has."""


@record(frozen=True)
class Source:
    """The source of a kernel: text with fields, or a template, which may include other templates of its directory."""

    name: str
    text: str | None
    directory: Path | None

    def render(self, fields: Mapping[str, str | int | bool]) -> str:
        """The rendered source. Raises InvalidInputError if a field is missing or unused."""
        used = variables(self.name, self.directory) if self.text is None else names_in(self.text, self.name)
        unused = fields.keys() - used - set(_GIVEN)
        if unused:
            raise InvalidInputError(
                f"constants of {fields['name']} has {', '.join(sorted(unused))}, which its source does not use."
            )
        if self.text is not None:
            return f"{SURE_MISTAKES}\n{filled(self.text, fields, self.name)}"
        return f"{SURE_MISTAKES}\n{render(self.name, fields, self.directory)}"


@record(frozen=True)
class CustomConfig(Config):
    num_threads: int
    constants: Constants

    def __str__(self) -> str:
        text = f"{self.num_threads} threads"
        return text + "".join(f", {name}={value}" for name, value in self.constants)


@record(frozen=True)
class CustomSpec:
    config: CustomConfig
    launch: LaunchPlan


@dataclass(eq=False)
class CustomOperands:
    """The checked operands of a call, all arguments, and the spec that the function's launch gives."""

    tensors: Mapping[str, Tensor]
    arguments: tuple[Any, ...]
    device: torch.device
    spec: CustomSpec
    flops: int


@record(frozen=True)
class CustomPlan(engine.Plan):
    """A user's kernel, loaded, and one launch of it."""

    spec: Any

    @property
    def config(self) -> str:
        return str(self.spec.config)

    def launch_plan(self, strides: Strides, pdl: bool, constant: bool, numbers: Numbers) -> LaunchPlan:
        """The launch that its function returned. `set_pdl` may switch dependent launch off."""
        found: LaunchPlan = self.spec.launch
        return found if pdl else replace(found, shape=replace(found.shape, pdl=False))


class CustomOperation(KernelOperation):
    """A user's kernel as an operation, so that `deep_gemm.runtime.calls`, monitors and DG_FALLBACK work with it."""

    apart = False
    has_operator = False

    def __init__(
        self,
        declared: Declared,
        source: Source,
        function: Callable[..., LaunchConfig | None],
        strided: Sequence[str],
        needs: tuple[int, int] | None,
    ) -> None:
        self.name, self.floats = declared.kernel, declared.floats
        self.parameters = tuple(
            Parameter(name, "Tensor" if name in declared.tensors else "Any") for name in declared.arguments
        )
        self.operands = {name: name for name in declared.tensors}
        self.output, self.outputs = declared.written[0], declared.written
        self.declared, self.source, self.function, self.needs = declared, source, function, needs
        self.strided = frozenset(strided)
        self.in_torch: Callable[..., object] | None = None
        self._requests: dict[tuple[KernelParams, str], BuildRequest] = {}

    def check(self, *arguments: Any, **named: Any) -> CustomOperands | None:
        """None for fake tensors, and if the function returns None because there is nothing to do."""
        given = self.given(arguments, named)
        arguments = tuple(given.values())
        tensors = {name: given[name] for name in self.operands}
        device = checks.check_tensors(self.name, tensors, {}, written=self.outputs)
        for name, tensor in tensors.items():
            wanted = ELEMENTS[self.declared.tensors[name]]
            if tensor.dtype != wanted:
                raise InvalidInputError(f"{name} of {self.name} must be {wanted}, but it is {tensor.dtype}.")
        if checks.is_fake(tensors.values()):
            return None
        for name in self.declared.pointers - self.strided:
            if not tensors[name].is_contiguous():
                raise InvalidInputError(
                    f"{name} of {self.name} must be contiguous, but it is {checks.shape_of(tensors[name])} with "
                    f"strides {tensors[name].stride()}. Pass .contiguous(), or declare the kernel with "
                    f"strided=({name!r},) if it takes the strides."
                )
        for name in self.floats:
            if not isinstance(given[name], (int, float, str, torch.dtype, type(None))):
                raise InvalidInputError(
                    f"{name} of {self.name} must be a number, text, None or a dtype, but it is "
                    f"{checks.kind_of(given[name])}. Tensors must be declared in parameters."
                )
        config = self.function(*arguments)
        if config is None:
            return None
        spec = self._spec(config, given, tensors)
        return CustomOperands(tensors, arguments, device, spec, int(config.flops))

    def _spec(self, config: LaunchConfig, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CustomSpec:
        shape = checked_shape(self.name, config)
        values = checked_values(self.declared, config, given, tensors)
        for name, value in config.constants.items():
            if name in _GIVEN or not isinstance(value, (str, int)):
                raise InvalidInputError(
                    f"constants of {self.name}: {name} must be a number, text, True or False, and not be one of "
                    f"{', '.join(_GIVEN)}, but it is {value!r}."
                )
        packed = tuple(p.argument.pack(values.get(p.name)) for p in self.declared.parameters)
        constants = tuple(sorted(config.constants.items()))
        return CustomSpec(CustomConfig(self.name, config.block, constants), LaunchPlan(shape, packed))

    def launches(self, x: CustomOperands, device: int) -> LaunchSequence:
        spec: Any = x.spec
        return LaunchSequence((Step(spec, {}, self.operands),))

    def plan(self, step: Step, device: int) -> CustomPlan:
        """The kernel. It is compiled and loaded the first time."""
        spec: Any = step.spec
        config, shape = spec.config, spec.launch.shape
        self._check_device(device)
        params = KernelParams(kernel=self.name, arch=arch.target(device), config=config)
        which = params, repr(config.constants)  # True equals 1, and is printed as another text
        request = self._requests.get(which)
        if request is None:
            request = self._requests[which] = self.request(params)
        # The key has the source, so that a kernel that is declared again, as in a notebook, is not loaded again.
        key = (request.name, request.source, request.arch, shape.dynamic_shared, device)
        function, _ = engine.load_once(key, lambda: _load(request, shape, device), f"{self.name} ({config})")
        return CustomPlan(spec, device, params, function)

    def _check_device(self, device: int) -> None:
        if self.needs is None or (found := torch.cuda.get_device_capability(device)) >= self.needs:
            return
        needed, has = (".".join(map(str, capability)) for capability in (self.needs, found))
        raise UnsupportedError(
            f"{self.name} needs a GPU of compute capability {needed} or newer, but "
            f"{torch.cuda.get_device_name(device)} has {has}."
        )

    def request(self, params: KernelParams) -> BuildRequest:
        config = params.config
        if not isinstance(config, CustomConfig):
            raise TypeError(f"{self.name} is built for a CustomConfig, not {config}")
        fields: dict[str, str | int | bool] = {
            "name": self.name,
            "signature": self.declared.signature,
            "num_threads": config.num_threads,
            **dict(config.constants),
        }
        meta, source = {"params": params.to_json()}, self.source.render(fields)
        return BuildRequest(name=self.name, source=source, arch=params.arch, meta=meta)

    def reference(self, x: CustomOperands) -> None:
        """Calls the reference that the caller declared. Raises UnsupportedError if there is none."""
        if self.in_torch is None:
            raise UnsupportedError(
                f"{self.name} has no reference to run on {x.device}: pass CUDA tensors, or give it one with "
                f"@{self.name}.reference."
            )
        with torch.inference_mode():  # as the kernel, which knows no gradients and writes inference tensors too
            self.in_torch(*x.arguments)


def _load(request: BuildRequest, shape: LaunchShape, device: int) -> tuple[Function, Binary]:
    binary = default_builder().build(request)
    function = load_function(binary.cubin, binary.name, device, shape.dynamic_shared)
    debug_record.add_plan(
        (request.name, binary.key, device),
        lambda: {
            "spec": {"kernel": request.name, "first_launch": asdict(shape)},
            "device": device,
            "params": dict(request.meta)["params"],
            "kernel": binary.name,
            "key": binary.key,
            "layer": binary.layer,
            "compiler": binary.compiler,
            "source": binary.source_path,
            "resources": binary.resources.to_json(),
            "seconds": dict(binary.seconds),
        },
    )
    return function, binary
