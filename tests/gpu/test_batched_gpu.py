"""Batches of products and einsum on a GPU: numbers, bits, memory, graphs."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import batched_cases
import pytest
import torch
from batched_cases import FORMS, integers, output, product, surrounded
from chosen import kernel_name
from forced import compiled, nvrtc
from gpu_cases import DEVICE, batch_invariant

import deep_gemm
from deep_gemm.jit import Builder
from deep_gemm.kernels.families import B16_BATCHED, B16_SUMMED
from deep_gemm.testing import guarded

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16 = torch.bfloat16
PLAIN, BHR, BHD, SUM = FORMS
CASES = [*B16_BATCHED.cases(), *B16_SUMMED.cases()]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@cuda_only
def test_every_kernel_is_exact_beside_nan(kernels_root: Path) -> None:
    """Rows, columns and K end inside tiles, and NaN follows each row and each matrix."""
    builder = Builder(kernels_root, nvrtc())
    with compiled((params, builder, params) for params in CASES) as binaries:
        wrong = [kernel_name(x) for x in CASES if binaries[x].result() and not batched_cases.is_right(x, builder)]
    assert not wrong


def letters(form: str, rows: int, h: int, d: int, r: int) -> list[tuple[int, ...]]:
    """The shapes of a, b and d."""
    sizes = {"b": rows, "h": h, "d": d, "r": r}
    inputs, out = form.split("->")
    return [tuple(sizes[letter] for letter in each) for each in (*inputs.split(","), out)]


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 300, 65536])
@pytest.mark.parametrize("form", [BHR, BHD])
def test_einsum_is_exact(form: str, rows: int) -> None:
    """Also for a that is stored with h in front, and d that has room between its rows."""
    h, d, r = (2, 64, 72) if rows > 1000 else (5, 136, 200)
    of_a, of_b, of_d = letters(form, rows, h, d, r)
    a, b = integers(*of_a), integers(*of_b, seed=1)
    wanted = torch.einsum(form, a.double(), b.double()).to(BF16)
    for given in (a, a.transpose(0, 1).contiguous().transpose(0, 1)):
        out = guarded(of_d, BF16, DEVICE, (h * (of_d[2] + 8), of_d[2] + 8, 1))
        deep_gemm.einsum(form, given, b, out.tensor)
        out.check("d")
        assert torch.equal(out.tensor, wanted)


@cuda_only
@pytest.mark.parametrize("majors", list(itertools.product(("k", "mn"), repeat=2)))
def test_few_sms_take_tiles_of_several_products(majors: tuple[str, str]) -> None:
    values = integers(37, 200, 128), integers(37, 264, 128, seed=1)
    a, b = (surrounded(x, True, major) for x, major in zip(values, majors, strict=True))
    d = output(37, 200, 264, BF16, True)
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(4)
    try:
        deep_gemm.bf16_bmm(a.tensor, b.tensor, d.tensor)
    finally:
        deep_gemm.set_num_sms(before)
    d.check("d")
    assert torch.equal(d.tensor, product(*values).to(BF16))


@cuda_only
def test_each_product_has_the_bits_of_a_product_alone() -> None:
    """If its K is in one part; see `groups.parts_of_k`."""
    for groups, m, n, k in ((1, 300, 520, 1000), (4, 64, 2560, 4096), (9, 1, 512, 128), (3, 1000, 128, 512)):
        a, b, d = (
            normal(groups, m, k),
            normal(groups, n, k, seed=1),
            torch.empty(groups, m, n, device=DEVICE, dtype=BF16),
        )
        alone = torch.empty_like(d)
        deep_gemm.bf16_bmm(a, b, d)
        with batch_invariant():
            for left, right, out in zip(a, b, alone, strict=True):
                deep_gemm.bf16_gemm_nt(left, right, out)
        assert torch.equal(d, alone), (groups, m, n, k)


@cuda_only
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    a, b, whole = (
        normal(700, 16, 512),
        normal(16, 128, 512, seed=1),
        torch.empty(700, 16, 128, device=DEVICE, dtype=BF16),
    )
    deep_gemm.einsum(BHR, a, b, whole)
    for rows in (1, 3, 64, 65, 500):
        d = torch.empty_like(whole[:rows])
        deep_gemm.einsum(BHR, a[:rows], b, d)
        assert torch.equal(d, whole[:rows]), rows


def calls(form: str) -> tuple[Callable[[], Any], list[torch.Tensor], torch.Tensor]:
    """A call, its inputs, and d."""
    if form == SUM:
        a, b, d = normal(33, 128, 384), normal(33, 256, 384, seed=1), torch.zeros(128, 256, device=DEVICE)
        return functools.partial(deep_gemm.einsum, form, a, b, d, d), [a, b, d], d
    of_a, of_b, of_d = letters(form, 100, 16, 128, 512)
    a, b, d = normal(*of_a), normal(*of_b, seed=1), torch.empty(of_d, device=DEVICE, dtype=BF16)
    return functools.partial(deep_gemm.einsum, form, a, b, d), [a, b], d


@cuda_only
@pytest.mark.parametrize("form", [BHR, BHD, SUM])
def test_repeats_give_the_same_bits(form: str) -> None:
    call, _, d = calls(form)
    found = []
    for _ in range(20):
        d.zero_()
        call()
        found.append(d.clone())
    assert all(torch.equal(each, found[0]) for each in found)


@cuda_only
@pytest.mark.parametrize("form", [BHR, BHD, SUM])
def test_a_graph_is_replayed_with_other_values(form: str) -> None:
    call, inputs, d = calls(form)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in (5, 6):
        for index, x in enumerate(inputs):
            x.copy_(normal(*x.shape, seed=seed + 10 * index))
        before = d.clone()
        graph.replay()
        replayed = d.clone()
        d.copy_(before)
        call()
        assert torch.equal(d, replayed)


@cuda_only
@pytest.mark.parametrize("form", [BHR, BHD])
@pytest.mark.parametrize("rows", [1, 300])
def test_constant_weights_are_read_early(form: str, rows: int) -> None:
    """While the previous kernel writes a."""
    of_a, of_b, of_d = letters(form, rows, 16, 256, 512)
    source, b = integers(*of_a), integers(*of_b, seed=1)
    wanted = torch.einsum(form, source.double(), b.double()).to(BF16)
    a, d = torch.zeros_like(source), torch.empty(of_d, device=DEVICE, dtype=BF16)
    deep_gemm.declare_constant(b)
    try:
        for _ in range(3):
            a.copy_(source)
            deep_gemm.einsum(form, a, b, d)
            assert torch.equal(d, wanted)
            a.zero_()
            d.zero_()
    finally:
        deep_gemm.retract_constant(b)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_sum_of_products_is_exact(dtype: torch.dtype) -> None:
    """In place, with another c, and without."""
    for groups, m, n, k in ((1, 64, 64, 64), (129, 128, 384, 128), (40, 320, 192, 192)):
        a, b = integers(groups, m, k), integers(groups, n, k, seed=1)
        before = integers(m, n, dtype=dtype, seed=2)
        exact = product(a, b).sum(0)
        for adds in (False, True):
            d = before.clone()
            deep_gemm.einsum(SUM, a, b, d, d if adds else None)
            assert torch.equal(d, (exact + before.double() * adds).to(dtype)), (groups, m, n, k, adds)
        d = torch.empty_like(before)
        deep_gemm.einsum(SUM, a, b, d, before)
        assert torch.equal(d, (exact + before.double()).to(dtype))


@pytest.mark.parametrize("form", [BHR, BHD, SUM])
def test_cublaslt_gives_the_same(form: str) -> None:
    call, inputs, d = calls(form)
    call()
    ours = d.clone()
    d.zero_()
    deep_gemm.einsum(form, *inputs[:2], d, d if form == SUM else None, use_cublaslt=True)
    assert deep_gemm.testing.calc_diff(d, ours) < 1e-5
