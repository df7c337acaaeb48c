"""One config, built, loaded and launched directly, without validation and the selector."""

import fcntl
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from deep_gemm import kernels, ops
from deep_gemm.jit import Binary, Builder
from deep_gemm.jit.compilers import Compiler, choose
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function, load_function
from deep_gemm.kernels import epilogues
from deep_gemm.ops import cast_reference
from deep_gemm.ops.reference import Scalings
from deep_gemm.params import KernelParams
from deep_gemm.runtime import calls, engine
from deep_gemm.settings import settings
from deep_gemm.spec import SCALINGS, GemmSpec, QuantizeSpec, align
from deep_gemm.testing import Operand, assert_close_to_exact, assert_half_close_to_exact

CORES = len(os.sched_getaffinity(0))
ALPHA = 0.5
"""The factor of epilogues that have one."""
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")


def nvrtc() -> Compiler:
    """An NVRTC that this machine's driver supports."""
    with settings.override(use_nvrtc=True):
        return choose()


def compile_all(build: Callable[[T], R], jobs: Iterable[T], pool: ThreadPoolExecutor) -> list[Future[R]]:
    """What ``build`` makes of each job. All processes of a run that is side by side compile as many kernels at a time
    as there are cores: each compilation holds the lock of one of as many files in ``COMPILING_LOCKS``."""
    locks = os.environ.get("COMPILING_LOCKS")

    def one(job: T) -> R:
        while locks is not None:
            for core in range(CORES):
                with Path(locks, f"compiling{core}").open("w") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    return build(job)
            time.sleep(0.02)
        return build(job)

    return [pool.submit(one, job) for job in jobs]


@contextmanager
def compiled(jobs: Iterable[tuple[Key, Builder, KernelParams]]) -> Iterator[dict[Key, Future[Binary]]]:
    """Kernels, compiled several at a time; the error of one that fails is raised when it is looked up."""
    jobs = list(jobs)
    with ThreadPoolExecutor(CORES) as pool:
        made = compile_all(lambda job: job[1].build(engine.build_request(job[2])), jobs, pool)
        yield {key: future for (key, *_), future in zip(jobs, made, strict=True)}
        pool.shutdown(cancel_futures=True)


def compile_for_calls(wanted: Iterable[KernelParams]) -> None:
    """Compile kernels into the cache that calls use."""
    with ThreadPoolExecutor(CORES) as pool:
        for future in compile_all(engine.build, wanted, pool):
            future.result()


def load(params: KernelParams, binary: Binary, device: int = 0) -> Function:
    """The kernel on a device."""
    return load_function(binary.cubin, binary.name, device, kernels.get(params.kernel).shared_bytes(params))


def spec_of(params: KernelParams, m: int, n: int, k: int, num_sms: int) -> GemmSpec:
    """The spec of these sizes that the kernel of ``params`` computes."""
    more: dict[str, Any] = {
        "aligned": params.store == "tma",
        "accumulate": {"none": "none", "threads": "from c", "tma": "in place"}[params.adds_c],
        "epilogue": params.epilogue,
    }
    if params.scaling != "none":
        more |= {"scaling": scaling_of(params), "dtypes": dtypes_of(params), "output": params.output}
        return ops.spec(m, n, k, num_sms, **more)
    op = "bf16_gemm_nt" if params.dtype == "bf16" else "fp16_gemm_nt"
    return ops.spec(m, n, k, num_sms, op, majors=params.majors, output=params.output, **more)  # type: ignore[arg-type]


def fits(params: KernelParams, m: int, n: int, k: int, num_sms: int) -> bool:
    """Whether the config can be launched for these sizes. A part of split K without a block would wait forever."""
    return kernels.gemm_family(params.kernel).fits(spec_of(params, m, n, k, num_sms), params.gemm)


def scaling_of(params: KernelParams) -> Scalings:
    """The scaling of A and of B."""
    return next(pair for pair, name in SCALINGS.items() if name == params.scaling)  # type: ignore[return-value]


def dtypes_of(params: KernelParams) -> tuple[str, str]:
    """The dtypes of A and of B."""
    of_a, _, of_b = params.dtype.partition("_")
    return of_a, of_b or of_a


def by_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (rows, K) in an FP8 dtype, and a scale for each row."""
    sf = x.abs().amax(1, keepdim=True).clamp(1e-4) / torch.finfo(dtype).max
    return (x / sf).to(dtype), sf


def mn_major(sf: Tensor) -> Tensor:
    """Scales (rows, blocks) as TMA reads them, with NaN where there is room to spare."""
    rows, blocks = sf.shape
    whole = torch.full((blocks, align(rows, 4)), float("nan"), device=sf.device)
    whole[:, :rows] = sf.t()
    return whole.t()[:rows]


def operands(params: KernelParams, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """x (M, K) and y (N, K) as a and b of `force_gemm`, cast by torch; for FP8 with sfa and sfb."""
    found = {}
    each = zip("ab", (x, y), dtypes_of(params), scaling_of(params), params.majors, strict=True)
    for name, values, dtype, kind, major in each:
        if params.scaling == "none":
            cast = values.to(DTYPES[dtype])
            found[name] = cast if major == "k" else cast.t().contiguous().t()
            continue
        if kind == "1x128":
            cast, sf = cast_reference.per_token_cast_to_fp8(values, False)
            sf = mn_major(sf)
        elif kind == "128x128":
            cast, sf = cast_reference.per_block_cast_to_fp8(values, False)
        else:
            cast, sf = by_rows(values, FP8[dtype])
        found |= {name: cast, f"sf{name}": sf}
    return found


def assert_right(params: KernelParams, tensors: Mapping[str, Tensor], c: Tensor | None = None) -> None:
    """Assert that d is within the bound for the operands of `force_gemm`, and for c if it is added."""
    a, b, d = (tensors[name] for name in "abd")
    c = None if params.adds_c == "none" else c
    if params.scaling != "none":
        assert_close_to_exact(d, a, tensors["sfa"], b, tensors["sfb"], c=c, scaling=scaling_of(params))
    else:
        assert_half_close_to_exact(d, a, b, c)


def force_gemm(
    params: KernelParams,
    function: Function,
    tensors: Mapping[str, Tensor],
    num_sms: int,
    stream: int,
    pdl: bool = False,
    constant_b: bool = False,
) -> Launch:
    """Make the launch of ``params``' kernel for d (M, N) = (c +) a @ b^T on a stream. ``tensors`` are a (M, K) and b
    (N, K), in the layouts of ``params``, d, c if consumers read it, and for FP8 sfa and sfb; scales of 1 x 128 are
    MN-major and aligned."""
    (m, k), n = tensors["a"].shape, tensors["b"].shape[0]
    if params.scaling == "none" and not fits(params, m, n, k, num_sms):
        raise ValueError(
            f"{kernels.get(params.kernel).kernel_name(params)} cannot compute {m}x{n}x{k} on {num_sms} SMs."
        )
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    spec = spec_of(params, m, n, k, num_sms)
    made = kernels.get(params.kernel).launch_plan(params, spec, strides, pdl, constant_b, {"alpha": ALPHA})
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return Launch(function, made.shape, stream, made.parameters, addresses)


@contextmanager
def in_launches(count: int) -> Iterator[None]:
    """Dense products with a d of FP8 take one launch inside, or two, whatever the model says."""
    calls.forget_all()

    def launches(spec: GemmSpec, device: int) -> tuple[GemmSpec, QuantizeSpec | None]:
        return (epilogues.apart(spec) if count == 2 else None) or (spec, None)

    with mock.patch.object(engine, "launches", launches):
        yield
    calls.forget_all()


@dataclass(frozen=True)
class Forced:
    """A launch that can be repeated, with the tensors that it keeps alive."""

    launch: Launch
    scales: Tensor

    def __call__(self) -> None:
        self.launch()


def force(
    params: KernelParams,
    function: Function,
    a: Operand,
    b: Operand,
    d: Tensor,
    num_sms: int,
    stream: int,
    pdl: bool = False,
    constant_b: bool = False,
) -> Forced:
    """`force_gemm` for dense FP8 operands. a and b are (M, K) and (N, K) E4M3 with scales (M, ceil(K / 128)) and
    (ceil(N / 128), ceil(K / 128)). Scales of a are converted to the kernel's layout."""
    (x, sfa), (y, sfb) = a, b
    (m, k), n = x.shape, y.shape[0]
    if d.shape != (m, n) or (params.store == "tma" and d.stride(0) % 8):
        raise ValueError(f"d is {tuple(d.shape)} with strides {d.stride()}: no output for {params.store}")
    scales = mn_major(sfa)
    x, y = x.as_strided((m, k), (k, 1)), y.as_strided((n, k), (k, 1))
    tensors = {"a": x, "sfa": scales, "b": y, "sfb": sfb, "d": d}
    return Forced(force_gemm(params, function, tensors, num_sms, stream, pdl, constant_b), scales)
