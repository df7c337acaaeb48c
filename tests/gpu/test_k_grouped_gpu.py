"""GEMMs grouped along K on a GPU: numbers, bits, memory, graphs."""

import random
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE
from k_grouped_cases import MIXED_RECIPE, exact, in_one_matrix, operands, sizes

import deep_gemm
from deep_gemm.ops.table import K_BF16, K_FP8
from deep_gemm.testing import guarded, guarded_copy

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
KINDS = ("fp8", "mixed", "bf16")
MIXED = [128, 0, 384, 16, 240, 0]
"""Groups without K, of whole blocks, and that end inside one. FP8 takes multiples of 16."""


def call(kind: str, a: Any, b: Any, d: torch.Tensor, layout: torch.Tensor, c: torch.Tensor | None = None) -> None:
    recipe = {"recipe": MIXED_RECIPE} if kind == "mixed" else {}
    getattr(deep_gemm, K_BF16 if kind == "bf16" else K_FP8)(a, b, d, None, layout, c, **recipe)


@pytest.mark.parametrize("adds", ["nothing", "in place", "c"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_exact(kind: str, dtype: torch.dtype, adds: str) -> None:
    """Any wrong row, column, scale or group shows; D is guarded. Edges of tiles are crossed."""
    for m, n, ks in (
        (200, 328, MIXED),
        (128, 256, [512, 128]),
        (64, 72, [0, 0]),
        (520, 136, [1024]),
        (24, 24, [48] * 9),
    ):
        a, b = operands(kind, m, n, ks, seed=m)
        before = torch.randint(-9, 10, (len(ks), m, n), device=DEVICE).to(dtype)
        buffer = guarded_copy(before) if adds == "in place" else guarded((len(ks), m, n), dtype, DEVICE)
        d = buffer.tensor
        c = {"nothing": None, "in place": d, "c": before}[adds]
        call(kind, a, b, d, sizes(ks), c)
        wanted = exact(kind, a, b, ks, m, n, None if adds == "nothing" else before)
        assert torch.equal(d, wanted.to(dtype)), (m, n, ks)
        buffer.check("d")


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_other_groups_does_not_matter(kind: str) -> None:
    """Not even NaN beside a group's last rows of K, in one operand or in both."""
    m, n, ks = 136, 264, [48, 80, 160, 32]
    a, b = operands(kind, m, n, ks)
    wanted = exact(kind, a, b, ks, m, n).float()
    starts = [sum(ks[:group]) for group in range(len(ks))]
    for poisoned in (1, 3):
        for rows, x in ((m, a), (n, b)):
            where = slice(starts[poisoned], starts[poisoned] + ks[poisoned])
            if kind == "bf16":
                x[where] = float("nan")
            else:
                x[0][where.start * rows : where.stop * rows] = float("nan")
    d = torch.empty(len(ks), m, n, device=DEVICE)
    call(kind, a, b, d, sizes(ks))
    for group in (0, 2):
        assert torch.equal(d[group], wanted[group]), group
    assert bool(d[1].isnan().all())
    assert bool(d[3].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups(kind: str) -> None:
    rng = random.Random(5)
    ks = [16 * rng.randint(0, 9) for _ in range(200)]
    a, b = operands(kind, 72, 136, ks)
    d = torch.empty(len(ks), 72, 136, device=DEVICE)
    call(kind, a, b, d, sizes(ks))
    assert torch.equal(d, exact(kind, a, b, ks, 72, 136).float())


def test_bf16_takes_any_size() -> None:
    ks = [1, 63, 65, 127, 0, 200]
    a, b = operands("bf16", 136, 264, ks)
    d = torch.empty(len(ks), 136, 264, device=DEVICE)
    call("bf16", a, b, d, sizes(ks))
    assert torch.equal(d, exact("bf16", a, b, ks, 136, 264).float())


@cuda_only
@pytest.mark.parametrize("kind", KINDS)
def test_repeats_give_the_same_bits(kind: str) -> None:
    ks = [640, 128, 1024]
    make = torch.randn(sum(ks), 768, device=DEVICE)
    if kind == "bf16":
        a = b = make.bfloat16()
    else:
        values = make.t().contiguous().to(torch.float8_e4m3fn).flatten()
        a = b = (values, torch.rand(768, sum(ks) // 128, device=DEVICE))
        b = (values, b[1][::128]) if kind == "mixed" else b
    found = []
    for _ in range(20):
        d = torch.ones(len(ks), 768, 768, device=DEVICE)
        call(kind, a, b, d, sizes(ks), d)
        found.append(d)
    assert all(torch.equal(d, found[0]) for d in found)


@cuda_only
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_replayed_with_other_sizes(kind: str) -> None:
    m, n, total = 256, 384, 768
    layout = sizes([256, 256, 256])
    a, b = operands(kind, m, n, [256, 256, 256])
    d = torch.empty(3, m, n, device=DEVICE)
    call(kind, a, b, d, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(kind, a, b, d, layout)
    for ks in ([256, 256, 256], [0, 768, 0], [128, 128, 512], [768, 0, 0]):
        assert sum(ks) == total
        layout.copy_(sizes(ks))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(d, exact(kind, a, b, ks, m, n).float()), ks


@pytest.mark.parametrize("kind", ["fp8", "mixed"])
@pytest.mark.parametrize("adds", [False, True])
def test_parts_of_one_matrix_give_the_same_bits(adds: bool, kind: str) -> None:
    """Padding, of values and of scales, is NaN. Sizes need not be multiples of anything."""
    for ks in (MIXED, [5, 0, 131, 1, 128], [0, 0], [300]):
        m, n = 200, 328
        a, b = operands(kind, m, n, ks)
        one_a, one_b = (in_one_matrix(x, rows, ks) for x, rows in ((a, m), (b, n)))
        before = torch.randint(-9, 10, (len(ks), m, n), device=DEVICE).float()
        d = guarded_copy(before)
        c = d.tensor if adds else None
        recipe = {"recipe": MIXED_RECIPE} if kind == "mixed" else {}
        deep_gemm.k_grouped_fp8_gemm_nt_padded(one_a, one_b, d.tensor, sizes(ks), c, **recipe)
        d.check("d")
        assert torch.equal(d.tensor, exact(kind, a, b, ks, m, n, before if adds else None).float())


@cuda_only
def test_a_graph_is_replayed_with_other_parts() -> None:
    m, n, ks = 136, 264, ([128, 100, 0], [0, 0, 256], [1, 2, 3])
    pairs = [operands("fp8", m, n, k, seed=3) for k in ks]
    parts = [
        [in_one_matrix(x, rows, k, 4 - sum(-(-size // 128) for size in k)) for x, rows in ((a, m), (b, n))]
        for k, (a, b) in zip(ks, pairs, strict=True)
    ]
    held = [tuple(tensor.clone() for tensor in pair) for pair in parts[0]]
    layout, d = sizes(ks[0]), torch.empty(3, m, n, device=DEVICE)

    def run() -> None:
        deep_gemm.k_grouped_fp8_gemm_nt_padded(held[0], held[1], d, layout)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for k, (a, b), new in zip(ks, pairs, parts, strict=True):
        for to, source in zip(held, new, strict=True):
            for target, x in zip(to, source, strict=True):
                target.view(torch.uint8).copy_(x.view(torch.uint8))
        layout.copy_(sizes(k))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(d, exact("fp8", a, b, k, m, n).float()), k
