"""One config, built, loaded and launched directly, without validation and the selector."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from deep_gemm import engine, kernels, quantisation
from deep_gemm.jit import Binary, Builder
from deep_gemm.jit.compilers import Compiler, choose
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function, load_function
from deep_gemm.kernels.scaled import SCALINGS
from deep_gemm.ops import fp8_dense, half_dense
from deep_gemm.params import HalfParams, KernelParams, ScaledParams
from deep_gemm.reference import Scalings
from deep_gemm.settings import settings
from deep_gemm.spec import align, ceil_div
from deep_gemm.testing import Operand

COMPILING_THREADS = 16

Key = TypeVar("Key", bound=Hashable)


def nvrtc() -> Compiler:
    """An NVRTC that this machine's driver supports."""
    with settings.override(use_nvrtc=True):
        return choose()


@contextmanager
def compiled(jobs: Iterable[tuple[Key, Builder, KernelParams]]) -> Iterator[dict[Key, Future[Binary]]]:
    """Kernels, compiled several at a time; the error of one that fails is raised when it is looked up."""
    with ThreadPoolExecutor(COMPILING_THREADS) as pool:
        yield {key: pool.submit(builder.build, engine.build_request(params)) for key, builder, params in jobs}
        pool.shutdown(cancel_futures=True)


def load(params: KernelParams, binary: Binary, device: int = 0) -> Function:
    """The kernel on a device."""
    return load_function(binary.cubin, binary.name, device, kernels.get(params.kernel).shared_bytes(params))


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
    """Make the launch of ``params``' kernel for d (M, N) = a @ b^T on a stream.

    a and b are (M, K) and (N, K) E4M3 with scales (M, ceil(K / 128)) and (ceil(N / 128), ceil(K / 128)), all dense.
    Scales of a are converted to the kernel's layout by torch, with NaN in its padding.
    """
    (x, sfa), (y, sfb) = a, b
    (m, k), n = x.shape, y.shape[0]
    if d.shape != (m, n) or (params.store == "tma" and d.stride(0) % 8):
        raise ValueError(f"d is {tuple(d.shape)} with strides {d.stride()}: no output for {params.store}")
    rows, blocks = align(m, 4), ceil_div(k, 128)
    scales = torch.full((blocks, rows), float("nan"), device=sfa.device)
    scales[:, :m] = sfa.t()
    tensors = {"a": x, "sfa": scales, "b": y, "sfb": sfb, "d": d}
    strides = {name: tensor.stride() for name, tensor in tensors.items()} | {"a": (k, 1), "sfa": (1, rows), "b": (k, 1)}
    spec = fp8_dense.spec(m, n, k, num_sms=num_sms, aligned=params.store == "tma")
    made = kernels.get(params.kernel).launch(params, spec, strides, pdl, constant_b)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return Forced(Launch(function, made.shape, stream, made.parameters, addresses), scales)


def mn_major(sf: Tensor) -> Tensor:
    """Scales (rows, blocks) as TMA reads them, with NaN where there is room to spare."""
    rows, blocks = sf.shape
    whole = torch.full((blocks, align(rows, 4)), float("nan"), device=sf.device)
    whole[:, :rows] = sf.t()
    return whole.t()[:rows]


def scaled_operands(params: ScaledParams, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """x (M, K) and y (N, K) as a, sfa, b and sfb of `force_scaled`, cast by torch."""
    found = {}
    for name, values, kind in zip("ab", (x, y), scaling_of(params), strict=True):
        if kind == "1x128":
            cast, sf = quantisation.per_token_cast_to_fp8(values, False)
            sf = mn_major(sf)
        elif kind == "128x128":
            cast, sf = quantisation.per_block_cast_to_fp8(values, False)
        else:
            sf = values.abs().amax(1, keepdim=True) / 448
            cast = (values / sf).to(torch.float8_e4m3fn)
        found |= {name: cast, f"sf{name}": sf}
    return found


def scaling_of(params: ScaledParams) -> Scalings:
    """The scaling of A and of B."""
    return next(pair for pair, name in SCALINGS.items() if name == params.scaling)  # type: ignore[return-value]


def force_scaled(
    params: ScaledParams,
    function: Function,
    tensors: Mapping[str, Tensor],
    num_sms: int,
    stream: int,
    pdl: bool = False,
    constant_b: bool = False,
) -> Launch:
    """Make the launch of an FP8 kernel with any scaling for d (M, N) = (c +) a @ b^T on a stream. ``tensors`` are a (M,
    K), sfa, b (N, K), sfb, d, and c where there is one; scales of 1 x 128 are MN-major and aligned."""
    (m, k), n = tensors["a"].shape, tensors["b"].shape[0]
    spec = fp8_dense.spec(
        m,
        n,
        k,
        num_sms=num_sms,
        aligned=params.store == "tma",
        scaling=scaling_of(params),
        output=params.output,  # type: ignore[arg-type]
        accumulate={"none": "none", "reads": "from c", "reduces": "in place"}[params.accumulate],  # type: ignore[arg-type]
    )
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    made = kernels.get(params.kernel).launch(params, spec, strides, pdl, constant_b)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return Launch(function, made.shape, stream, made.parameters, addresses)


def laid_out(x: Tensor, major: str) -> Tensor:
    """x (rows, K) in the layout that a letter of `HalfParams.majors` names."""
    return x if major == "k" else x.t().contiguous().t()


def force_half(
    params: HalfParams,
    function: Function,
    tensors: Mapping[str, Tensor],
    num_sms: int,
    stream: int,
    pdl: bool = False,
    constant_b: bool = False,
) -> Launch:
    """Make the launch of a 16-bit kernel for d (M, N) = (c +) a @ b^T on a stream. ``tensors`` are a (M, K) and b (N,
    K), in the layouts of ``params``, d, and c if there is one."""
    (m, k), n = tensors["a"].shape, tensors["b"].shape[0]
    op = half_dense.BF16 if params.dtype == "bf16" else half_dense.FP16
    spec = half_dense.spec(
        op,
        m,
        n,
        k,
        num_sms,
        majors=("k" if params.majors[0] == "k" else "mn", "k" if params.majors[1] == "k" else "mn"),
        wide=params.output == "f32",
        accumulate={"none": "none", "reads": "from c", "reduces": "in place"}[params.accumulate],  # type: ignore[arg-type]
        aligned=params.store == "tma",
    )
    kernel = kernels.get(params.kernel)
    if not kernel.runs(spec, params.config):  # a part of split K without a block would wait forever
        raise ValueError(f"{kernel.entry(params)} cannot compute {m} x {n} x {k} on {num_sms} SMs.")
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    made = kernel.launch(params, spec, strides, pdl, constant_b)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return Launch(function, made.shape, stream, made.parameters, addresses)
