"""A test of the tests: kernels of logits and of the prenorm product that are broken on purpose give wrong results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from forced import compiled, load, nvrtc
from gpu_cases import DEVICE
from logit_cases import decoding, prompt, schedule
from logits_mutations import KERNELS, MUTATIONS, SPECS, Mutation, mutants

import deep_gemm
from deep_gemm import kernels
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function
from deep_gemm.ops.prenorm import rounded_to_tf32
from deep_gemm.runtime import engine
from deep_gemm.testing import calc_diff

LAST = [5000, 3, 0, 4100, 257, 2048, 65]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mutation | None, str], Function]]:
    """Functions by mutation (None for sound ones) and kernel."""
    root, compiler = tmp_path_factory.mktemp("mutants"), nvrtc()
    builders = {
        m.name: Builder(root / f"mutant{i}", compiler, m.headers(root / f"headers{i}")) for i, m in enumerate(MUTATIONS)
    }
    sound = Builder(root / "sound", compiler)
    jobs = [((m.name, kernel), builders[m.name], KERNELS[kernel]) for m, kernel in mutants()]
    jobs += [(("", kernel), sound, params) for kernel, params in KERNELS.items()]
    with compiled(jobs) as binaries:
        yield lambda mutation, kernel: load(
            KERNELS[kernel], binaries[mutation.name if mutation else "", kernel].result()
        )


def launch(name: str, function: Function, tensors: Mapping[str, torch.Tensor]) -> None:
    """Launch a kernel, and wait for it."""
    strides = {operand: tensor.stride() for operand, tensor in tensors.items()}
    made = kernels.get(KERNELS[name].kernel).launch(KERNELS[name], SPECS[name], strides)
    addresses = {operand: tensor.data_ptr() for operand, tensor in tensors.items()}
    Launch(function, made.shape, engine.raw_stream(torch.cuda.current_device()), made.parameters, addresses)()
    torch.cuda.synchronize()


def is_right(name: str, function: Function) -> bool:
    """Whether a kernel's result is within its bound."""
    return CHECKS[name](SPECS[name], function)


def prompt_is_right(spec: Any, function: Function) -> bool:
    x = prompt(spec.rows, spec.keys, kind="segments", device=DEVICE)
    out = torch.full((spec.rows, 3072), torch.nan, device=DEVICE)[:, : spec.keys]
    tensors = {"q": x.q, "keys": x.k, "scales": x.scales, "weights": x.weights, "starts": x.start, "ends": x.end}
    launch("prompt", function, {**tensors, "out": out})
    masked = torch.equal(out == -torch.inf, ~x.attended)
    return masked and bool(calc_diff(out[x.attended], x.exact()[x.attended]) < 5e-6)


def pages_are_right(spec: Any, function: Function) -> bool:
    x = decoding(LAST, spec.next_n, page_keys=spec.page_keys, width=spec.columns, device=DEVICE)
    meta = deep_gemm.get_paged_mqa_logits_metadata(x.lengths, spec.page_keys, spec.slots)
    out = torch.full((len(LAST) * spec.next_n, 5120), torch.nan, device=DEVICE)[:, : spec.columns]
    assert (spec.pages, spec.table_width) == (x.cache.shape[0], x.table.shape[1])
    tensors = {"q": x.q, "cache": x.cache, "weights": x.weights, "lengths": x.lengths, "table": x.table}
    launch("pages", function, {**tensors, "schedule": meta, "out": out})
    return bool(calc_diff(out[x.live], x.exact()[x.live]) < 5e-6)


def schedule_is_right(spec: Any, function: Function) -> bool:
    last = torch.randint(0, 5000, (spec.batch,), generator=torch.Generator().manual_seed(0)).int()
    lengths = torch.stack([last - 1, last], 1).to(DEVICE)
    out = torch.full((spec.slots + 1, 2), -1, dtype=torch.int32, device=DEVICE)
    launch("schedule", function, {"lengths": lengths, "schedule": out})
    return bool(out.tolist() == schedule(last.tolist(), spec.slots))


def product_is_right(spec: Any, function: Function) -> bool:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(spec.m, spec.k, generator=generator).bfloat16().to(DEVICE)
    b = torch.randn(spec.n, spec.k, generator=generator).to(DEVICE)
    d = torch.full((1, spec.m, spec.n), torch.nan, device=DEVICE)
    squares = torch.full((1, spec.m), torch.nan, device=DEVICE)
    launch("product", function, {"a": a, "b": b, "d": d, "sqr_sum": squares})
    exact = a.double() @ rounded_to_tf32(b).double().t()
    return bool(calc_diff(d[0], exact) < 1e-8) and bool(calc_diff(squares[0], a.double().square().sum(1)) < 1e-8)


CHECKS: dict[str, Callable[[Any, Function], bool]] = {
    "prompt": prompt_is_right,
    "pages": pages_are_right,
    "schedule": schedule_is_right,
    "product": product_is_right,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_sound_kernels_pass(loaded: Callable[[Mutation | None, str], Function], kernel: str) -> None:
    assert is_right(kernel, loaded(None, kernel))


@pytest.mark.parametrize(("mutation", "kernel"), mutants(), ids=lambda x: x if isinstance(x, str) else x.name)
def test_broken_ones_are_found(
    loaded: Callable[[Mutation | None, str], Function], mutation: Mutation, kernel: str
) -> None:
    assert not is_right(kernel, loaded(mutation, kernel))
