"""Indexer logits and the prenorm product on a GPU: against sums in float64, repeated, and in graphs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpu_cases import DEVICE
from logit_cases import KINDS, Decoding, Prompt, decoding, prompt, ranges, schedule

import deep_gemm
from deep_gemm.testing import calc_diff, guarded

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
BF16 = torch.bfloat16
BOUNDS = {torch.float32: 5e-6, BF16: 3e-5}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def whole(x: Prompt, clean: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return deep_gemm.fp8_fp4_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, clean, 0, dtype)


def narrow(x: Prompt, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return deep_gemm.fp8_fp4_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, False, width, dtype)


SIZES = [(8, 256), (5, 300), (64, 4096), (513, 2048), (37, 1000), (1, 40), (2, 20011)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts(kind: str, dtype: torch.dtype) -> None:
    for seed, (rows, keys) in enumerate(SIZES):
        x = prompt(rows, keys, kind=kind, seed=seed, device=DEVICE)
        exact, attended = x.exact(), x.attended
        out = whole(x, dtype=dtype)
        assert torch.equal(out == -torch.inf, ~attended)
        rough = whole(x, clean=False, dtype=dtype)
        assert torch.equal(bits(rough[attended]), bits(out[attended]))
        width = max(1, int((x.end - x.start).max()) - 3)  # some ranges are wider
        found, counts = narrow(x, width, dtype), x.compressed(width)[1]
        at = (torch.arange(width, device=DEVICE) + x.start[:, None]).clamp(max=keys - 1).long()
        assert torch.equal(bits(found[counts]), bits(out.gather(1, at)[counts]))
        if int(attended.sum()) > 100:
            assert calc_diff(out[attended], exact[attended]) < BOUNDS[dtype]


@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (64, 64), (64, 32), (32, 64), (32, 32), (16, 128)])
def test_other_heads(heads: int, dim: int) -> None:
    x = prompt(45, 3000, heads, dim, "random", device=DEVICE)
    out = whole(x)
    assert torch.equal(out == -torch.inf, ~x.attended)
    assert calc_diff(out[x.attended], x.exact()[x.attended]) < BOUNDS[torch.float32]


def test_one_head_at_a_time_is_exact() -> None:
    """Small integers, so that scores are exact in bf16: an error of place would be seen."""
    generator = torch.Generator().manual_seed(1)
    x = prompt(64, 200, kind="causal", device=DEVICE)
    q = torch.randint(-1, 2, x.q.shape, generator=generator).float()
    k = torch.randint(-1, 2, x.k.shape, generator=generator).float()
    weights = torch.zeros(64, 64)
    weights[torch.arange(64), torch.arange(64)] = torch.randint(1, 9, (64,), generator=generator) - 4.5
    small = replace(
        x,
        q=q.to(DEVICE).to(torch.float8_e4m3fn),
        k=k.to(DEVICE).to(torch.float8_e4m3fn),
        weights=weights.to(DEVICE),
        scales=torch.full((200,), 0.5, device=DEVICE),
        end=torch.full((64,), 200, device=DEVICE, dtype=torch.int32),
    )
    assert torch.equal(whole(small).double(), small.exact())


def test_large_scores_and_a_query_of_nans() -> None:
    x = prompt(8, 300, kind="causal", device=DEVICE)
    x.q.fill_(448.0)
    x.k.fill_(448.0)
    x.scales.fill_(1.0)
    out, exact = whole(x), x.exact()
    assert float(exact[x.attended].abs().max()) > 2e7
    assert torch.isfinite(out[x.attended]).all()
    assert calc_diff(out[x.attended], exact[x.attended]) < 5e-4  # sums of one sign and another cancel
    x.q.view(torch.uint8)[3] = 0x7F
    x.weights[5] = torch.inf
    other = whole(x)
    rows = [0, 1, 2, 4, 6, 7]
    assert torch.equal(other[rows], out[rows])
    assert other[3][x.attended[3]].isnan().all()
    assert (other[5][x.attended[5]] == torch.inf).all()


def test_the_last_columns_are_the_end_of_what_is_written() -> None:
    from deep_gemm.ops import logits

    x = prompt(9, 700, kind="random", device=DEVICE)
    for width in (700, 100):
        kept = guarded((9, width), torch.float32, strides=(1024, 1), device=DEVICE)
        rest = (True, 0) if width == 700 else (False, width)
        logits.mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, kept.tensor, *rest)
        kept.check()


def pages(x: Decoding, width: int, page_keys: int, dtype: torch.dtype, slots: int, old: bool = False) -> torch.Tensor:
    lengths = x.lengths[:, -1].contiguous() if old else x.lengths
    meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, page_keys, slots)
    return deep_gemm.fp8_fp4_paged_mqa_logits(
        (x.q, None), x.cache, x.weights, lengths, x.table, meta, width, logits_dtype=dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("next_n", "heads", "dim", "page_keys", "padding"),
    [
        *((next_n, 64, 128, 64, 0) for next_n in (1, 2, 3, 4, 5, 6)),
        *((next_n, 32, 128, 64, 0) for next_n in (1, 2, 7, 9)), (2, 64, 128, 32, 0), (1, 32, 64, 32, 1024),
        (2, 64, 64, 64, 64), (2, 64, 32, 64, 0), (2, 16, 128, 64, 0),
    ],
)  # fmt: skip
def test_pages(next_n: int, heads: int, dim: int, page_keys: int, padding: int, dtype: torch.dtype) -> None:
    # The longest requests have more pages for one CTA than entries of the block table that it loads at a time.
    for last in ([0, 1, 1999, 256, 0, 700, 65], [0, 0], [2000] * 40, list(range(1, 1500, 60)), [9000, 5000]):
        width = max(2000, *last)
        x = decoding(last, next_n, heads, dim, page_keys, width, padding, device=DEVICE)
        for slots, old in ((132, False), (1, True)) if width > 2000 else ((132, False), (17, True)):
            out = pages(x, width, page_keys, dtype, slots, old)
            assert out[x.live].isfinite().all()
            if int(x.live.sum()) > 100:
                assert calc_diff(out[x.live], x.exact()[x.live]) < BOUNDS[dtype]


def test_the_schedule() -> None:
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2, 255, 256, 257, 4096):
        for most in (0, 300, 20000):
            last = torch.randint(0, most + 1, (batch,), generator=generator).int()
            for slots in (1, 66, 132):
                found = deep_gemm.get_paged_mqa_logits_metadata(last.to(DEVICE), 64, slots)
                assert found.tolist() == schedule(last.tolist(), slots)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert deep_gemm.get_paged_mqa_logits_metadata(none, 64, 132).tolist() == [[0, 0]] * 133


def products(x: dict[str, torch.Tensor], splits: int | None) -> None:
    deep_gemm.tf32_hc_prenorm_gemm(x["a"], x["b"], x["d"], x["sqr_sum"], splits)


def prenorm(m: int, n: int, k: int, splits: int | None, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    front = () if splits is None else (splits,)
    return {
        "a": torch.randn(m, k, generator=generator).bfloat16().to(DEVICE),
        "b": torch.randn(n, k, generator=generator).to(DEVICE),
        "d": torch.full((*front, m, n), torch.nan, device=DEVICE),
        "sqr_sum": torch.full((*front, m), torch.nan, device=DEVICE),
    }


@cuda_only
def test_b_is_rounded_to_nearest_even() -> None:
    x = prenorm(64, 8, 64, None)
    x["a"].zero_()[:, 0] = 1
    x["b"].zero_()[:6, 0] = 1 + torch.tensor([0.25, 0.5, 0.75, 1.25, 1.5, 1.75], device=DEVICE) * 2.0**-10
    products(x, None)
    assert ((x["d"][0, :6] - 1) * 2**10).tolist() == [0, 0, 1, 1, 2, 2]


@cuda_only
@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [
        (4096, 24, 7168, None), (137, 24, 28672, None), (13, 24, 28672, 1), (1000, 24, 16384, 4), (300, 24, 7168, 16),
        (65, 8, 1024, None), (2000, 16, 2048, None), (777, 32, 4096, 3), (33, 24, 128, 16), (8193, 24, 1024, None),
        (600, 24, 4096, None),
    ],
)  # fmt: skip
def test_prenorm(m: int, n: int, k: int, splits: int | None) -> None:
    x = prenorm(m, n, k, splits)
    d = guarded(tuple(x["d"].shape), torch.float32, device=DEVICE)
    squares = guarded(tuple(x["sqr_sum"].shape), torch.float32, device=DEVICE)
    x |= {"d": d.tensor.fill_(torch.nan), "sqr_sum": squares.tensor.fill_(torch.nan)}
    products(x, splits)
    d.check()
    squares.check()
    product, total = (t.clone() if splits is None else t.sum(0) for t in (x["d"], x["sqr_sum"]))
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        expected = x["a"].float() @ x["b"].t()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert calc_diff(product, expected) < 1e-8
    assert calc_diff(total, x["a"].double().square().sum(1)) < 1e-8
    x["a"][m // 2, 5] = torch.nan
    products(x, splits)
    after = x["d"] if splits is None else x["d"].sum(0)
    assert after[m // 2].isnan().all()
    others = torch.arange(m, device=DEVICE) != m // 2
    assert torch.equal(after[others], product[others])


@pytest.mark.parametrize("k", [1024, 4160])
def test_prenorm_under_batch_invariance(k: int) -> None:
    """A row has the same bits in any batch, by each tile, in any place of it and beside NaN."""
    x = prenorm(9000, 24, k, None)
    deep_gemm.set_batch_invariant(True)
    try:
        products(x, None)
        for first, last in ((0, 3), (701, 704), (37, 137), (1499, 1500), (20, 520), (50, 1050), (9, 2059), (60, 4120)):
            for before in (0, 1, 8, 61):
                a = torch.cat([x["a"][:1].expand(before, -1) * float("nan"), x["a"][first:last]])
                few = x | {"a": a, "d": x["d"].new_empty(len(a), 24), "sqr_sum": x["d"].new_empty(len(a))}
                products(few, None)
                assert torch.equal(few["d"][before:], x["d"][first:last])
                assert torch.equal(few["sqr_sum"][before:], x["sqr_sum"][first:last])
    finally:
        deep_gemm.set_batch_invariant(False)


def calls() -> dict[str, Callable[[], torch.Tensor]]:
    long, short = prompt(300, 4000, kind="segments", device=DEVICE), prompt(300, 4000, kind="short", device=DEVICE)
    requests = decoding([700, 3, 0, 2000, 1999, 512] * 20, 2, width=2000, device=DEVICE)
    x = prenorm(137, 24, 28672, None)

    def product() -> torch.Tensor:
        products(x, None)
        return torch.cat([x["d"], x["sqr_sum"][:, None]], 1)

    return {
        "long": lambda: whole(long),
        "short": lambda: whole(short),
        "pages": lambda: pages(requests, 2000, 64, torch.float32, 132)[requests.live],
        "prenorm": product,
    }


@pytest.mark.parametrize("name", ["long", "short", "pages", "prenorm"])
def test_repeats_are_the_same(name: str) -> None:
    call = calls()[name]
    first = call().clone()
    for _ in range(20):
        assert torch.equal(call(), first)


@cuda_only
def test_graphs_with_other_ranges_lengths_and_pages() -> None:
    x = prompt(300, 4000, kind="segments", device=DEVICE)
    generator = torch.Generator().manual_seed(7)
    x.k.copy_(torch.randn(4000, 128, generator=generator).to(torch.float8_e4m3fn))
    x.scales.copy_(torch.rand(4000, generator=generator) + 0.1)
    requests = decoding([2000] * 9, 2, width=2000, device=DEVICE)
    meta = deep_gemm.get_paged_mqa_logits_metadata(requests.lengths, 64, 132)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        deep_gemm.get_paged_mqa_logits_metadata(requests.lengths, 64, 132)
        parts = (requests.cache, requests.weights, requests.lengths, requests.table, meta)
        return whole(x), deep_gemm.fp8_paged_mqa_logits(requests.q, *parts, 2000)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = both()
    for kind in ("random", "empty", "causal", "short"):
        start, end = ranges(300, 4000, kind, generator)
        x.start.copy_(start)
        x.end.copy_(end)
        last = torch.randint(0, 2001, (9,), generator=generator).int()
        requests.lengths.copy_((last[:, None] + torch.tensor([-1, 0])).clamp(min=0))
        meta.copy_(deep_gemm.get_paged_mqa_logits_metadata(requests.lengths, 64, 132))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, whole(x))
        live = requests.live
        if int(live.sum()) > 100:
            assert calc_diff(second[live], requests.exact()[live]) < BOUNDS[torch.float32]


@cuda_only
def test_part_of_the_gpu_gives_the_same_bits() -> None:
    x = prompt(200, 3000, kind="random", device=DEVICE)
    before, known = whole(x), deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(20)
    try:
        assert torch.equal(whole(x), before)
    finally:
        deep_gemm.set_num_sms(known)


@cuda_only
def test_the_current_stream_is_used() -> None:
    x = prompt(64, 2000, kind="causal", device=DEVICE)
    before = whole(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        out = whole(x)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(out, before)
