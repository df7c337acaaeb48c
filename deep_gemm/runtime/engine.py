"""How a call flows: spec -> plan -> launch.

A spec says what is asked. The selector chooses a config for it. Spec and config give the params, which identify a
binary. The builder finds or compiles the binary, which becomes a plan when it is loaded on a device. A plan, the
operands' strides and their addresses give a launch record, which is all that a warm call needs
(`deep_gemm.runtime.calls` keeps the records).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deep_gemm import arch as archs
from deep_gemm import kernels, options, select
from deep_gemm.errors import NotWarmError, UnsupportedError
from deep_gemm.jit.binary import Binary
from deep_gemm.jit.builder import Builder, BuildRequest, default_builder
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function, load_function, primary_context
from deep_gemm.jit.generator import render
from deep_gemm.jit.render_key import render_key
from deep_gemm.kernels import epilogues
from deep_gemm.kernels.base import NO_NUMBERS, KernelFamily, LaunchPlan, Numbers, Strides
from deep_gemm.log import say
from deep_gemm.params import Config, KernelParams
from deep_gemm.records import record
from deep_gemm.runtime import debug_record
from deep_gemm.runtime.debug_record import debug_info, dump_debug_info
from deep_gemm.select import calibration
from deep_gemm.settings import settings
from deep_gemm.spec import GemmSpec, QuantizeSpec, Spec, to_json

if TYPE_CHECKING:
    from deep_gemm.select.casts import Casting

__all__ = [
    "Plan",
    "adopt",
    "build",
    "build_request",
    "debug_info",
    "dump_debug_info",
    "kernel_params",
    "launch_record",
    "load",
    "plan",
    "raw_stream",
]


@record(frozen=True)
class Plan:
    """A loaded kernel that computes a spec on a device."""

    spec: Spec
    device: int
    params: KernelParams
    function: Function

    @property
    def kernel(self) -> KernelFamily:
        """Its family."""
        return kernels.get(self.params.kernel)

    @property
    def config(self) -> str:
        """A short description of its config."""
        return self.kernel.describe(self.params.config)

    @property
    def symbol(self) -> str:
        """The kernel's name in profilers."""
        return self.function.symbol

    def launch_plan(self, strides: Strides, pdl: bool, constant: bool, numbers: Numbers) -> LaunchPlan:
        """Launch shape and parameters for operands with ``strides``; see `KernelFamily.launch_plan`."""
        return self.kernel.launch_plan(self.params, self.spec, strides, pdl, constant, numbers)


_lock = threading.RLock()


def _after_fork() -> None:
    # A thread of the parent may have been compiling; in the child nobody would release its lock.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

_plans: dict[tuple[Spec, int], Plan] = {}
_castings: dict[tuple[GemmSpec, int], Casting] = {}
_functions: dict[Hashable, tuple[Function, Binary]] = {}


def kernel_params(spec: Spec, config: Config, arch: archs.ArchSpec) -> KernelParams:
    """The identity of the binary that computes ``spec`` with ``config`` on ``arch``."""
    return kernels.get(config.family).params(spec, config, arch)


def build_request(params: KernelParams) -> BuildRequest:
    """The request to the builder for ``params``: the rendered source, the params as JSON, and the family's
    post-pass."""
    kernel = kernels.get(params.kernel)
    fields = kernel.fields(params)
    key = render_key(kernel.template_file, fields)
    # A source from a pack or from disk saves importing Jinja.
    source = default_builder().source(key) or render(kernel.template_file, fields)
    return BuildRequest(
        name=kernel.kernel_name(params),
        source=source,
        arch=params.arch,
        meta={"params": params.to_json()},
        render_key=key,
        post_pass=kernel.post_pass(params),
    )


def build(params: KernelParams) -> Binary:
    """The binary of ``params``, from the cache or compiled. Needs no GPU. Raises CompileError."""
    return default_builder().build(build_request(params))


def adopt(params: KernelParams, binary: Binary) -> Binary:
    """Take ``binary``, which another process built from ``params``, into the cache of this one. Raises
    InvalidInputError if it is not what ``build`` would return, and CompileError."""
    return default_builder().adopt(build_request(params), binary)


def plan(spec: Spec, device: int) -> Plan:
    """The plan of ``spec`` on CUDA device ``device``: chosen, built and loaded the first time, then remembered.

    Raises:
        UnsupportedError: there is no kernel for this GPU, for this spec or for these options.
        NotWarmError: the kernel would have to be loaded inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled or loaded.
    """
    found = _plans.get((spec, device))
    if found is not None:
        return found
    with _lock:
        found = _plans.get((spec, device))
        if found is None:
            found = _plans[spec, device] = _make_plan(spec, device)
        return found


def launches(spec: GemmSpec, device: int) -> tuple[GemmSpec, QuantizeSpec | None]:
    """The launches that compute ``spec`` on CUDA device ``device``: one, or a product and the cast of it (see
    `select.casts`). Raises UnsupportedError."""
    both = epilogues.apart(spec)
    if both is None:
        return spec, None
    found = _castings.get((spec, device))
    if found is None:
        from deep_gemm.select import casts  # here, so that processes without such products do not import it

        found = casts.casting(spec, archs.for_device(device), calibration_of(device))
        entry = {"device": device, **asdict(found)}
        debug_record.add_casting((spec, device), lambda: {"spec": to_json(spec), **entry})
        if settings.print_configs:
            say(f"{spec}: {found.one_us:.2f} us in one launch, {found.two_us:.2f} us in two: {found.launches}")
        _castings[spec, device] = found
    return (spec, None) if found.launches == 1 else both


def is_planned(spec: Spec, device: int) -> bool:
    """Whether `plan` would find a plan that it made before."""
    return (spec, device) in _plans


def planned() -> list[Spec]:
    """The specs of all plans, that is of calls since an option changed."""
    return [spec for spec, _ in _plans]


def forget_plans() -> None:
    """Forget all plans, so that configs are chosen again; loaded kernels stay loaded."""
    with _lock:
        _plans.clear()
        _castings.clear()


options.changed.add(forget_plans)


def _make_plan(spec: Spec, device: int) -> Plan:
    start = time.perf_counter()
    arch = archs.for_device(device)
    ranked: list[select.Choice] = []
    if isinstance(spec, GemmSpec):
        ranked = ranked_configs(spec, device)
        config: Config = ranked[0].config
    else:
        config = kernels.for_helper(spec, arch).config_of(spec, arch)
    params = kernel_params(spec, config, arch)
    selected = time.perf_counter()
    function, binary = load(params, device, str(spec))
    loaded = time.perf_counter()
    seconds = {**binary.seconds, "select": selected - start, "build_and_load": loaded - selected}
    post_pass = kernels.get(params.kernel).post_pass(params)
    changed = post_pass.identity if post_pass else None
    entry = partial(_entry, spec, device, params, binary, changed, seconds, ranked[:4])
    debug_record.add_plan((spec, device, params), entry)
    if settings.print_configs:
        measured = f", measured {ranked[0].measured_us:.2f} us" if ranked and ranked[0].measured_us else ""
        say(f"{spec}: {config}" + measured + (f", {ranked[0].estimate}" if ranked else ""))
    return Plan(spec, device, params, function)


def _entry(
    spec: Spec,
    device: int,
    params: KernelParams,
    binary: Binary,
    post_pass: str | None,
    seconds: dict[str, float],
    ranked: list[select.Choice],
) -> dict[str, Any]:
    """A plan's entry in the debug record. It is made on demand, since that takes 500 Python calls."""
    entry = {
        "spec": to_json(spec),
        "device": device,
        "params": params.to_json(),
        "kernel": binary.name,
        "key": binary.key,
        "layer": binary.layer,
        "compiler": binary.compiler,
        "source": binary.source_path,
        "resources": binary.resources.to_json(),
        "post_pass": post_pass,
        "seconds": seconds,
    }
    if ranked:
        others = [{"config": asdict(other.config), "total_us": other.estimate.total_us} for other in ranked[1:]]
        entry |= {"estimate": asdict(ranked[0].estimate), "next_best": others}
        entry |= {"measured_us": ranked[0].measured_us} if ranked[0].measured_us else {}
    return entry


def ranked_configs(spec: GemmSpec, device: int) -> list[select.Choice]:
    """The configs for ``spec`` on CUDA device ``device``, the one that calls use first: by measured times, if these
    count, and by the model."""
    arch, known = archs.for_device(device), calibration_of(device)
    if (wanted := options.wanted()) is not None:
        found = select.legal(spec, arch, wanted)
        if not found:
            raise UnsupportedError(f"No config that is wanted can compute {spec}.")
        return select.order(spec, found, known)
    if not options.measured_times():
        return select.rank(spec, arch, known)
    from deep_gemm.select import tuner  # here, so that processes that do not tune do not import it

    return tuner.rank(spec, arch, known, device_name(device))


def worth_measuring(spec: GemmSpec, device: int) -> list[select.Choice]:
    """The configs for ``spec`` that a tuner measures on CUDA device ``device``: first those that the model or measured
    times prefer."""
    from deep_gemm.select import tuner

    return tuner.worth_measuring(spec, archs.for_device(device), calibration_of(device), device_name(device))


def device_name(device: int) -> str:
    """The name of the GPU model of CUDA device ``device``."""
    return str(torch.cuda.get_device_properties(device).name)


def calibration_of(device: int) -> calibration.Calibration:
    """The calibration of CUDA device ``device``, or one scaled by its spec sheet if its model has none."""
    found = torch.cuda.get_device_properties(device)
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)  # kHz, bits
    gb_per_s, target = 2 * clock * width / 8e6, archs.target_of(found.major, found.minor)
    return calibration.for_device(found.name, found.multi_processor_count, gb_per_s, target)


def load(params: KernelParams, device: int, what: str) -> tuple[Function, Binary]:
    """The kernel of ``params``, loaded on ``device``; plans share it. ``what`` is for the message of a NotWarmError."""
    return load_once((params, device), lambda: _load(params, device, default_builder()), what)


def load_once(key: Hashable, load: Callable[[], tuple[Function, Binary]], what: str) -> tuple[Function, Binary]:
    """The result of ``load()``, remembered by ``key``, which holds the device."""
    with _lock:
        found = _functions.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise NotWarmError(
                    f"{what} needs a kernel that is not loaded yet, and a CUDA graph is being captured, during which "
                    f"modules cannot be loaded. Call it once before the capture to warm this shape."
                )
            found = _functions[key] = load()
        return found


def _load(params: KernelParams, device: int, builder: Builder) -> tuple[Function, Binary]:
    binary = builder.build(build_request(params))
    shared = kernels.get(params.kernel).shared_bytes(params)
    return load_function(binary.cubin, binary.name, device, shared), binary


def launch_record(
    plan: Plan,
    strides: Strides,
    addresses: Mapping[str, int],
    stream: int,
    constant: bool = False,
    numbers: Numbers = NO_NUMBERS,
) -> Launch:
    """The launch record of ``plan`` on operands with ``strides`` at ``addresses``; ``constant`` promises that nothing
    still running writes the weights. ``numbers`` are those of the step.

    A GEMM may start before its predecessor has finished, but not on part of a GPU: its waiting CTAs would occupy SMs
    that were left to other work.
    """
    early = options.get_pdl() and archs.has_dependent_launch(plan.params.arch)
    pdl = early and (not isinstance(plan.spec, GemmSpec) or plan.spec.whole_gpu)
    made = plan.launch_plan(strides, pdl, constant, numbers)
    with primary_context(plan.device):  # encoding a tensor map needs a context, and this thread may have none yet
        return Launch(plan.function, made.shape, stream, made.parameters, addresses)


def forced_plan(spec: Spec, config: Config, device: int, builder: Builder | None = None) -> Plan:
    """A plan with ``config``, whatever the selector prefers, for surveys. With ``builder``, which may hold other device
    code, the kernel is that builder's and is loaded for this plan alone."""
    params = kernel_params(spec, config, archs.for_device(device))
    function, _ = load(params, device, f"{config}") if builder is None else _load(params, device, builder)
    return Plan(spec, device, params, function)


def _slow_raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)
"""The handle of the current stream of a CUDA device. The first way is private to torch, and forty times faster than
creating a torch.cuda.Stream."""
