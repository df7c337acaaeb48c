"""FP8 batches and fp8_einsum on a GPU: numbers, bits, memory, graphs."""

from pathlib import Path

import batched_cases
import pytest
import torch
from batched_cases import FORMS, scaled, scaled_product, surrounded
from chosen import kernel_name
from forced import compiled, nvrtc
from gpu_cases import DEVICE

import deep_gemm
from deep_gemm.jit import Builder
from deep_gemm.kernels.families import FP8_BATCHED, FP8_BATCHED_SWAPPED
from deep_gemm.testing import guarded, random_operands

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16 = torch.bfloat16
BHR = FORMS[1]
CASES = [*FP8_BATCHED.cases(), *FP8_BATCHED_SWAPPED.cases()]


@cuda_only
def test_every_kernel_is_exact_beside_nan(kernels_root: Path) -> None:
    """Rows, columns and K end inside tiles, and NaN follows each row and each matrix, of scales too."""
    builder = Builder(kernels_root, nvrtc())
    with compiled((params, builder, params) for params in CASES) as binaries:
        wrong = [kernel_name(x) for x in CASES if binaries[x].result() and not batched_cases.is_right(x, builder)]
    assert not wrong


@pytest.mark.parametrize("rows", [0, 1, 7, 64, 300, 65536])
def test_einsum_is_exact(rows: int) -> None:
    """Also for a and scales that are stored with h in front, and d that has room between its rows."""
    h, d, r = (2, 72, 80) if rows > 1000 else (5, 136, 400)
    x = scaled(h, rows, d, r)
    wanted = scaled_product(x).transpose(0, 1).to(BF16)
    a, sfa = (x[name].transpose(0, 1) for name in ("a", "sfa"))
    major = surrounded(x["sfa"], major="mn").tensor.transpose(0, 1)
    for given in ((a, sfa), (a.contiguous(), sfa.contiguous()), (a, major)):
        out = guarded((rows, h, d), BF16, DEVICE, (h * (d + 8), d + 8, 1))
        deep_gemm.fp8_einsum(BHR, given, (x["b"], x["sfb"]), out.tensor)
        out.check("d")
        assert torch.equal(out.tensor, wanted)


@cuda_only
def test_few_sms_take_tiles_of_several_products() -> None:
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(4)
    try:
        for rows in (5, 200):
            values = scaled(37, rows, 264, 272)
            x = {name: surrounded(each, True).tensor for name, each in values.items()}
            d = batched_cases.output(37, rows, 264, BF16, True)
            deep_gemm.fp8_bmm((x["a"], x["sfa"]), (x["b"], x["sfb"]), d.tensor)
            d.check("d")
            assert torch.equal(d.tensor, scaled_product(values).to(BF16))
    finally:
        deep_gemm.set_num_sms(before)


def normal(groups: int, m: int, n: int, k: int) -> dict[str, torch.Tensor]:
    """FP8 operands with scales like those of a model."""
    made = [random_operands(m, n, k, DEVICE, seed=group)[:2] for group in range(groups)]
    found = {name: torch.stack([each[index][0] for each in made]) for index, name in enumerate("ab")}
    return found | {f"sf{name}": torch.stack([each[index][1] for each in made]) for index, name in enumerate("ab")}


def multiply(x: dict[str, torch.Tensor], rows: slice = slice(None)) -> torch.Tensor:
    a, sfa = x["a"][:, rows], x["sfa"][:, rows]
    d = torch.empty(*a.shape[:2], x["b"].shape[1], device=DEVICE, dtype=BF16)
    deep_gemm.fp8_bmm((a, sfa), (x["b"], x["sfb"]), d)
    return d


@cuda_only
def test_each_product_has_the_bits_of_a_product_alone() -> None:
    """If its K is in one part; see `groups.parts_of_k`."""
    for groups, m, n, k in ((1, 300, 520, 1008), (4, 64, 2560, 4096), (9, 1, 512, 128), (3, 1000, 128, 512)):
        x = normal(groups, m, n, k)
        d, alone = multiply(x), torch.empty(groups, m, n, device=DEVICE, dtype=BF16)
        deep_gemm.set_batch_invariant(True)
        try:
            for index, out in enumerate(alone):
                left, right = ((x[name][index], x["sf" + name][index]) for name in "ab")
                deep_gemm.fp8_gemm_nt(left, right, out)
        finally:
            deep_gemm.set_batch_invariant(False)
        assert torch.equal(d, alone), (groups, m, n, k)


@cuda_only
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x = normal(8, 700, 256, 1024)
    whole = multiply(x)
    for rows in (1, 3, 17, 64, 65, 500):
        assert torch.equal(multiply(x, slice(rows)), whole[:, :rows]), rows
    assert all(torch.equal(multiply(x), whole) for _ in range(20))


@cuda_only
@pytest.mark.parametrize("rows", [1, 300])
def test_a_graph_is_replayed_with_other_values(rows: int) -> None:
    """Scales that are transposed first, too."""
    x, other = normal(4, rows, 256, 512), normal(4, rows, 256, 512)
    d = torch.empty(rows, 4, 256, device=DEVICE, dtype=BF16)
    a = x["a"].transpose(0, 1).contiguous(), x["sfa"].transpose(0, 1).contiguous()
    b = x["b"], x["sfb"]
    deep_gemm.fp8_einsum(BHR, a, b, d)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_einsum(BHR, a, b, d)
    a[0].copy_(other["a"].transpose(0, 1).flip(0))
    a[1].copy_(other["sfa"].transpose(0, 1).flip(0))
    b[1].mul_(2)
    graph.replay()
    replayed = d.clone()
    d.zero_()
    deep_gemm.fp8_einsum(BHR, a, b, d)
    assert torch.equal(d, replayed)
    assert bool(d.any())


@cuda_only
@pytest.mark.parametrize("rows", [1, 300])
def test_constant_weights_are_read_early(rows: int) -> None:
    """While the previous kernel writes a."""
    x = scaled(16, rows, 256, 512)
    wanted, source = scaled_product(x).to(BF16), x["a"].clone()
    sfa = surrounded(x["sfa"], major="mn").tensor
    for name in ("b", "sfb"):
        deep_gemm.declare_constant(x[name])
    d = torch.empty(16, rows, 256, device=DEVICE, dtype=BF16)
    try:
        for _ in range(3):
            x["a"].copy_(source)
            deep_gemm.fp8_bmm((x["a"], sfa), (x["b"], x["sfb"]), d)
            assert torch.equal(d, wanted)
            x["a"].zero_()
            d.zero_()
    finally:
        for name in ("b", "sfb"):
            deep_gemm.retract_constant(x[name])
