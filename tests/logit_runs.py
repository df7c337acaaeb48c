"""One call of each kernel of indexer logits and of the prenorm product with given device code, whose result is
checked."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from k_grouped_cases import DEVICE
from logit_cases import decoding, prompt, schedule

import deep_gemm
from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.sm90_tf32_hc_prenorm_gemm import PRENORM
from deep_gemm.ops.prenorm import rounded_to_tf32
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import LogitsScheduleSpec, LogitsSpec, PagedLogitsSpec, PrenormSpec, Spec
from deep_gemm.testing import calc_diff

LAST = [5000, 3, 0, 4100, 257, 2048, 65]
DTYPES = {"f32": (torch.float32, 5e-6), "bf16": (torch.bfloat16, 3e-5)}
"""A result's type, and its bound."""


def params_of(spec: Spec) -> KernelParams:
    """The kernel that a call runs."""
    kernel = kernels.for_helper(spec, SM90)
    return kernel.params(spec, kernel.config_of(spec, SM90), SM90)


def pages(next_n: int, page_keys: int, heads: int = 64) -> PagedLogitsSpec:
    """Requests of `LAST`, on so few CTAs that each has several."""
    width = -(-max(LAST) // page_keys)
    return PagedLogitsSpec(len(LAST), next_n, heads, 128, page_keys, len(LAST) * width + 3, width, 9, max(LAST))


PRODUCT = PrenormSpec(300, 24, 4096, 1, 132)
SPECS: tuple[Spec, ...] = (
    LogitsSpec(300, 3000, 64, 128, 3000, clean=True, num_sms=7),
    LogitsSpec(300, 3000, 32, 64, 3000, clean=True, num_sms=7),
    LogitsSpec(300, 3000, 64, 128, 3000, clean=True, output="bf16", num_sms=7),
    *(pages(next_n, 32 if next_n == 2 else 64) for next_n in (1, 2, 4)),
    pages(3, 64, 32),
    LogitsScheduleSpec(40, 9, 1),
)
RUNS: dict[KernelParams, Spec] = {params_of(spec): spec for spec in SPECS}
RUNS |= {PRENORM.params(PRODUCT, config, SM90): PRODUCT for config in (*PRENORM.configs(SM90), *PRENORM.ordered())}
"""Each number of consumers, both ways that they take turns, each type of result; all tiles of the product."""


class Run:
    """A kernel with its spec, which is launched once, or again right behind itself as a dependent launch."""

    def __init__(self, params: KernelParams, spec: Any, function: Function, launches: int = 1) -> None:
        self.params, self.spec, self.function, self.launches = params, spec, function, launches

    def launch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Launch the kernel, and wait for it."""
        strides = {operand: tensor.stride() for operand, tensor in tensors.items()}
        addresses = {operand: tensor.data_ptr() for operand, tensor in tensors.items()}
        stream, kernel = engine.raw_stream(torch.cuda.current_device()), kernels.get(self.params.kernel)
        for early in (False, True)[: self.launches]:
            made = kernel.launch_plan(self.params, self.spec, strides, early)
            Launch(self.function, made.shape, stream, made.parameters, addresses)()
        torch.cuda.synchronize()

    def is_right(self) -> bool:
        """Whether the result is within its bound."""
        return CHECKS[type(self.spec)](self, self.spec)


def prompt_is_right(run: Run, spec: LogitsSpec) -> bool:
    x = prompt(spec.rows, spec.keys, spec.heads, spec.dim, "segments", device=DEVICE)
    dtype, bound = DTYPES[spec.output]
    out = torch.full((spec.rows, 3072), torch.nan, dtype=dtype, device=DEVICE)[:, : spec.keys]
    tensors = {"q": x.q, "keys": x.k, "scales": x.scales, "weights": x.weights, "starts": x.start, "ends": x.end}
    run.launch({**tensors, "out": out})
    masked = torch.equal(out == -torch.inf, ~x.attended)
    return masked and bool(calc_diff(out[x.attended], x.exact()[x.attended]) < bound)


def pages_are_right(run: Run, spec: PagedLogitsSpec) -> bool:
    x = decoding(LAST, spec.next_n, spec.heads, spec.dim, spec.page_keys, spec.columns, device=DEVICE)
    meta = deep_gemm.get_paged_mqa_logits_metadata(x.lengths, spec.page_keys, spec.slots)
    out = torch.full((len(LAST) * spec.next_n, 5120), torch.nan, device=DEVICE)[:, : spec.columns]
    assert (spec.pages, spec.table_width) == (x.cache.shape[0], x.table.shape[1])
    tensors = {"q": x.q, "cache": x.cache, "weights": x.weights, "lengths": x.lengths, "table": x.table}
    run.launch({**tensors, "schedule": meta, "out": out})
    return bool(calc_diff(out[x.live], x.exact()[x.live]) < 5e-6)


def schedule_is_right(run: Run, spec: LogitsScheduleSpec) -> bool:
    last = torch.randint(0, 5000, (spec.batch,), generator=torch.Generator().manual_seed(0)).int()
    lengths = torch.stack([last - 1, last], 1).to(DEVICE)
    out = torch.full((spec.slots + 1, 2), -1, dtype=torch.int32, device=DEVICE)
    run.launch({"lengths": lengths, "schedule": out})
    return bool(out.tolist() == schedule(last.tolist(), spec.slots))


def product_is_right(run: Run, spec: PrenormSpec) -> bool:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(spec.m, spec.k, generator=generator).bfloat16().to(DEVICE)
    b = torch.randn(spec.n, spec.k, generator=generator).to(DEVICE)
    d = torch.full((1, spec.m, spec.n), torch.nan, device=DEVICE)
    squares = torch.full((1, spec.m), torch.nan, device=DEVICE)
    run.launch({"a": a, "b": b, "d": d, "sqr_sum": squares})
    exact = a.double() @ rounded_to_tf32(b).double().t()
    return bool(calc_diff(d[0], exact) < 1e-8) and bool(calc_diff(squares[0], a.double().square().sum(1)) < 1e-8)


CHECKS: dict[type[Any], Callable[[Run, Any], bool]] = {
    LogitsSpec: prompt_is_right,
    PagedLogitsSpec: pages_are_right,
    LogitsScheduleSpec: schedule_is_right,
    PrenormSpec: product_is_right,
}
