"""How a call flows: problem -> plan -> launch.

A problem (sizes and formats) is given a config by the selector; problem and config make the params, which identify a
binary; the builder compiles or finds it; loaded on a device it is a plan. A plan and one call's addresses make a launch
record, which is all that a warm call needs (`deep_gemm.dense` keeps those).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from . import arch as archs
from . import options, record, select
from .errors import InvalidInputError, NotWarmError
from .jit.binary import Binary
from .jit.builder import Builder, BuildRequest, default_builder
from .jit.driver.launch import Launch, LaunchShape, Parameter
from .jit.driver.module import Function, load_function, primary_context
from .jit.driver.moving import MovingLaunch
from .jit.generator import render
from .jit.render_key import render_key
from .kernels import get as get_kernel
from .kernels import of as kernel_of
from .kernels import sm90_fp8_launch
from .kernels import transpose_scales as transpose
from .log import say
from .params import GemmConfig, GemmProblem, KernelParams, align
from .record import debug_info, dump_debug_info
from .select import calibration
from .settings import settings
from .workspace import MovingWorkspaceLaunch, WorkspaceLaunch

__all__ = [
    "Plan",
    "adopt",
    "build",
    "build_request",
    "debug_info",
    "dump_debug_info",
    "forced_launch",
    "fp8_gemm_launch",
    "fp8_gemm_moving",
    "kernel_params",
    "plan",
    "raw_stream",
    "transpose_launch",
    "transpose_moving",
    "transpose_scales",
]


@dataclass(frozen=True)
class Plan:
    """A problem's kernel, loaded on a device."""

    problem: GemmProblem
    params: KernelParams
    function: Function


_lock = threading.RLock()


def _after_fork() -> None:
    # A thread of the parent may have been compiling; nobody in the child would release its lock.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

_plans: dict[tuple[GemmProblem, int], Plan] = {}
_functions: dict[tuple[KernelParams, int], tuple[Function, Binary]] = {}


def kernel_params(problem: GemmProblem, config: GemmConfig, arch: archs.ArchSpec) -> KernelParams:
    """The identity of the binary that computes ``problem`` with ``config`` on ``arch``."""
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    return KernelParams(
        kernel=kernel_of(config).name,
        arch=arch.name,
        config=config,
        d_dtype=problem.d_dtype,
        store=kernel_of(config).store(config, problem.d_tma),
        shape=tuple(size if name in problem.compiled_dims else 0 for name, size in sizes.items()),  # type: ignore[arg-type]
    )


def build_request(params: KernelParams) -> BuildRequest:
    """What the builder needs for ``params``: the rendered source, and the params beside it as JSON."""
    kernel = get_kernel(params.kernel)
    fields = kernel.fields(params)
    key = render_key(kernel.template, fields)
    # Found in a pack or on disk, it saves importing Jinja.
    source = default_builder().source(key) or render(kernel.template, fields)
    meta = {"params": params.to_json()}
    return BuildRequest(name=kernel.entry(params), source=source, arch=params.arch, meta=meta, render_key=key)


def build(params: KernelParams) -> Binary:
    """The binary of ``params``, from the cache or compiled. Needs no GPU. Raises CompileError."""
    return default_builder().build(build_request(params))


def adopt(params: KernelParams, binary: Binary) -> Binary:
    """``binary``, which another process built of ``params``, in the cache of this one. Raises InvalidInputError where
    it is not what ``build`` would return, and CompileError."""
    return default_builder().adopt(build_request(params), binary)


def plan(problem: GemmProblem, device: int) -> Plan:
    """The plan of ``problem`` on CUDA device ``device``: chosen, built and loaded the first time, remembered then.

    Raises:
        UnsupportedError: there is no kernel for this GPU or for these options.
        NotWarmError: the kernel would have to be loaded inside CUDA-graph capture.
        CompileError, DriverError: the kernel could not be compiled or loaded.
    """
    found = _plans.get((problem, device))
    if found is not None:
        return found
    with _lock:
        found = _plans.get((problem, device))
        if found is None:
            found = _plans[problem, device] = _make_plan(problem, device)
        return found


def forget_plans() -> None:
    """Choose again from now on; loaded kernels stay loaded."""
    with _lock:
        _plans.clear()


options.on_change(forget_plans)


def _make_plan(problem: GemmProblem, device: int) -> Plan:
    start = time.perf_counter()
    spec = archs.for_device(device)
    ranked = select.rank(problem, spec, calibration.of(torch.cuda.get_device_name(device)))
    chosen = ranked[0]
    params = kernel_params(problem, chosen.config, spec)
    selected = time.perf_counter()
    where = f"M={problem.m}, N={problem.n}, K={problem.k}"
    function, binary = _load(params, device, f"fp8_gemm_nt with {where}")
    loaded = time.perf_counter()
    if settings.print_configs:
        say(f"{where} on {problem.num_sms} SMs: {chosen.config}, {chosen.estimate}")
    record.add_plan(
        {
            "problem": asdict(problem),
            "device": device,
            "params": params.to_json(),
            "estimate": asdict(chosen.estimate),
            "next_best": [
                {"config": asdict(other.config), "total_us": other.estimate.total_us} for other in ranked[1:4]
            ],
            "kernel": binary.name,
            "key": binary.key,
            "layer": binary.layer,
            "compiler": binary.compiler,
            "source": binary.source_path,
            "resources": binary.resources.to_json(),
            "seconds": {**binary.seconds, "select": selected - start, "build_and_load": loaded - selected},
        }
    )
    return Plan(problem, params, function)


def _load(params: KernelParams, device: int, what: str) -> tuple[Function, Binary]:
    """The kernel of ``params`` on ``device``; plans share it."""
    with _lock:
        found = _functions.get((params, device))
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise NotWarmError(
                    f"{what} needs a kernel that is not loaded yet, and a CUDA graph is being captured, during which "
                    f"modules cannot be loaded. Call it once before the capture to warm this shape."
                )
            binary = build(params)
            kernel = get_kernel(params.kernel)
            function = load_function(binary.cubin, binary.name, device, kernel.shared_bytes(params))
            found = _functions[params, device] = (function, binary)
        return found


def fp8_gemm_launch(
    problem: GemmProblem,
    geometry: sm90_fp8_launch.Geometry,
    addresses: sm90_fp8_launch.Addresses,
    device: int,
    stream: int,
    constant_b: bool = False,
) -> Callable[[], None]:
    """The launch record of one FP8 GEMM at these addresses on ``stream`` of ``device``; ``constant_b`` promises that
    nothing still running writes B or its scales."""
    made = plan(problem, device)
    return _launch(
        made.params, made.function, problem, geometry, addresses, device, stream, dependent_launch(problem), constant_b
    )


def fp8_gemm_moving(
    problem: GemmProblem,
    geometry: sm90_fp8_launch.Geometry,
    addresses: sm90_fp8_launch.Addresses,
    device: int,
    stream: int,
    constant_b: bool = False,
) -> Callable[[Mapping[str, int]], None]:
    """The same for operands that are elsewhere from call to call: called with where they are, by the names of
    ``Addresses``. ``addresses`` are those of one such call, and any other may differ by multiples of 16 bytes."""
    made = plan(problem, device)
    shape, parameters = sm90_fp8_launch.launch(
        made.params, geometry, problem.num_sms, dependent_launch(problem), constant_b
    )
    with primary_context(device):
        launch = MovingLaunch(made.function, shape, stream, parameters, vars(addresses))
    size = sm90_fp8_launch.slot_bytes(made.params.config, geometry, problem.num_sms)
    return MovingWorkspaceLaunch(launch, device, stream, size) if size else launch


def _launch(
    params: KernelParams,
    function: Function,
    problem: GemmProblem,
    geometry: sm90_fp8_launch.Geometry,
    addresses: sm90_fp8_launch.Addresses,
    device: int,
    stream: int,
    pdl: bool,
    constant_b: bool,
) -> Callable[[], None]:
    shape, parameters = sm90_fp8_launch.launch(params, geometry, problem.num_sms, pdl, constant_b)

    def at(flags: int, slots: int) -> Launch:
        there = replace(addresses, flags=flags, slots=slots)
        with primary_context(device):  # encoding a tensor map needs a context, and this thread may have none yet
            return Launch(function, shape, stream, parameters, vars(there))

    size = sm90_fp8_launch.slot_bytes(params.config, geometry, problem.num_sms)
    return WorkspaceLaunch(at, device, stream, size) if size else at(0, 0)


def dependent_launch(problem: GemmProblem) -> bool:
    """Whether a GEMM may start before its predecessor has finished. Not on part of a GPU: its waiting CTAs would take
    SMs that were left to others, beside those that its predecessor uses."""
    return options.get_pdl() and problem.whole_gpu


def forced_launch(
    problem: GemmProblem,
    config: GemmConfig,
    geometry: sm90_fp8_launch.Geometry,
    addresses: sm90_fp8_launch.Addresses,
    device: int,
    stream: int,
    constant_b: bool = False,
    builder: Builder | None = None,
) -> Callable[[], None]:
    """The same with ``config``, whatever the selector thinks of it: for surveys. With ``builder``, its kernel, loaded
    for this launch alone: for other device code."""
    params = kernel_params(problem, config, archs.for_device(device))
    if builder is None:
        function, _ = _load(params, device, f"{config}")
    else:
        binary, kernel = builder.build(build_request(params)), get_kernel(params.kernel)
        function = load_function(binary.cubin, binary.name, device, kernel.shared_bytes(params))
    return _launch(params, function, problem, geometry, addresses, device, stream, options.get_pdl(), constant_b)


def transpose_launch(
    source: int, target: int, shape: tuple[int, int, int], strides: tuple[int, int, int], device: int, stream: int
) -> Launch:
    """The launch record that brings scales (batch, rows, columns) at ``source``, with ``strides`` in elements, to
    ``target``, as (batch, columns, align(rows, 4))."""
    function, launch_shape, parameters = _transpose(shape, strides, device)
    return Launch(function, launch_shape, stream, parameters, {"source": source, "target": target})


def transpose_moving(
    source: int, target: int, shape: tuple[int, int, int], strides: tuple[int, int, int], device: int, stream: int
) -> MovingLaunch:
    """The same from and to where "source" and "target" are at each call."""
    function, launch_shape, parameters = _transpose(shape, strides, device)
    return MovingLaunch(function, launch_shape, stream, parameters, {"source": source, "target": target})


def _transpose(
    shape: tuple[int, int, int], strides: tuple[int, int, int], device: int
) -> tuple[Function, LaunchShape, list[Parameter]]:
    function, _ = _load(transpose.make_params(archs.for_device(device)), device, "transposing scales")
    return function, *transpose.launch(shape, strides, options.get_pdl())


def transpose_scales(sf: Tensor) -> Tensor:
    """``sf`` as MN-major scales: same shape and values, rows contiguous, columns (align(mn, 4)) floats apart.

    ``sf`` is float32 on a CUDA device, (mn, columns) or (groups, mn, columns), of any strides. Runs on the current
    stream of its device.
    """
    if sf.dim() not in (2, 3) or sf.dtype != torch.float32 or not sf.is_cuda:
        raise InvalidInputError(
            f"sf must be float32 on a CUDA device with 2 or 3 dimensions, but it is {sf.dtype} on {sf.device} with "
            f"{sf.dim()}."
        )
    batched = sf if sf.dim() == 3 else sf.unsqueeze(0)
    batch, rows, columns = batched.shape
    # Not empty_strided, which would leave out what lies past the last row of the last column.
    whole = torch.empty((batch, columns, align(rows, 4)), dtype=sf.dtype, device=sf.device)
    if sf.numel():
        device = sf.get_device()
        strides = (batched.stride(0), batched.stride(1), batched.stride(2))
        with torch.cuda.device(device):
            transpose_launch(
                sf.data_ptr(), whole.data_ptr(), (batch, rows, columns), strides, device, raw_stream(device)
            )()
    out = whole.transpose(1, 2)[:, :rows]
    return out if sf.dim() == 3 else out[0]


def _slow_raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)
"""The handle of the current stream of a CUDA device. The first way is not in torch's public interface, and forty times
faster than making a torch.cuda.Stream."""
