"""Calls of this library as its clients write them, one row each, for tests without a GPU and with one.

A row computes on a device, and returns pairs: what the library wrote, and what is exact, in float32.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

import deep_gemm
from deep_gemm import utils

Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
M, N, K, G = 200, 256, 512, 3
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32

ROWS: dict[str, Callable[[str], Pairs]] = {}


def row(name: str) -> Callable[[Callable[[str], Pairs]], Callable[[str], Pairs]]:
    """Add a row: the client, and what is particular in how it calls."""

    def add(call: Callable[[str], Pairs]) -> Callable[[str], Pairs]:
        assert name not in ROWS
        ROWS[name] = call
        return call

    return add


def made(*shape: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def tokens(x: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    return deep_gemm.per_token_cast_to_fp8(x, use_ue8m0)


def experts(w: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = zip(*(deep_gemm.per_block_cast_to_fp8(each, False) for each in w.unbind()), strict=True)
    return torch.stack(values), torch.stack(scales)


def dense(device: str, dtype: torch.dtype = BF16) -> tuple[Any, Any, Tensor, Tensor]:
    x, w = made(M, K, device=device), made(N, K, device=device)
    d = torch.empty(M, N, dtype=dtype, device=device)
    return tokens(x), deep_gemm.per_block_cast_to_fp8(w, False), d, x.float() @ w.float().t()


# ------------------------------------------------------------------------------------------------------ dense


@row("vLLM: PDL on, power-of-two scales, ue8m0 cast by keyword")
def _(device: str) -> Pairs:
    x, w = made(M, K, device=device), made(N, K, device=device)
    d = torch.empty(M, N, dtype=BF16, device=device)
    before = deep_gemm.get_pdl()
    getattr(deep_gemm, "set_pdl", None)(True)  # type: ignore[misc]
    try:
        deep_gemm.fp8_gemm_nt(tokens(x, True), deep_gemm.per_block_cast_to_fp8(w, True), d, disable_ue8m0_cast=False)
    finally:
        deep_gemm.set_pdl(before)
    return [(d, x.float() @ w.float().t())]


@row("SGLang: lists, no keyword, column-major scales, a slice of a larger warm-up")
def _(device: str) -> Pairs:
    (a, sfa), b, d, exact = dense(device)
    sfa = utils.layout.get_mn_major_tma_aligned_tensor(sfa)
    assert utils.layout.get_mn_major_tma_aligned_tensor(sfa) is sfa
    deep_gemm.fp8_gemm_nt([a, sfa], list(b), d)  # type: ignore[arg-type]
    part = torch.empty(72, N, dtype=BF16, device=device)
    deep_gemm.fp8_gemm_nt([a[:72], sfa[:72]], list(b), part, recipe=(1, 128, 128))  # type: ignore[arg-type]
    return [(d, exact), (part, exact[:72])]


@row("SGLang and DeepSeek-V3.2 tests: number of SMs set around a step and restored")
def _(device: str) -> Pairs:
    a, b, d, exact = dense(device)
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(before - 4)
    try:
        deep_gemm.fp8_gemm_nt(a, b, d)
    finally:
        deep_gemm.set_num_sms(before)
    assert deep_gemm.get_num_sms() == before
    return [(d, exact)]


@row("SGLang: deterministic mode around each call")
def _(device: str) -> Pairs:
    x, w = made(M, K, device=device), made(N, K, device=device)
    d = torch.empty(M, N, dtype=BF16, device=device)
    assert deep_gemm.get_deterministic_algorithms() is False
    deep_gemm.use_deterministic_algorithms(True)
    try:
        deep_gemm.bf16_gemm_nn(x, w.t(), d)  # B is a transposed view
    finally:
        deep_gemm.use_deterministic_algorithms(False)
    return [(d, x.float() @ w.float().t())]


@row("SGLang: logits of the router, bf16 operands and float32 d")
def _(device: str) -> Pairs:
    x, w = made(M, K, device=device), made(9, K, device=device)
    d = torch.empty(M, 9, dtype=F32, device=device)
    deep_gemm.bf16_gemm_nt(x, w, d)
    return [(d, x.float() @ w.float().t())]


@row("Transformers: fp8_fp4 name, recipe None, float16 d")
def _(device: str) -> Pairs:
    a, b, d, exact = dense(device, torch.float16)
    deep_gemm.fp8_fp4_gemm_nt(a, (b[0], b[1].contiguous()), d, recipe=None)
    return [(d, exact)]


@row("Transformers: scales of E8M0 weights repeated to one per row of B")
def _(device: str) -> Pairs:
    x, w = made(M, K, device=device), made(576, K, device=device)
    d = torch.empty(M, 576, dtype=BF16, device=device)
    b = tokens(w, True)
    deep_gemm.fp8_fp4_gemm_nt(tokens(x), b, d, recipe=None)
    return [(d, x.float() @ w.float().t())]


@row("torchao: recipe_a and recipe_b")
def _(device: str) -> Pairs:
    a, b, d, exact = dense(device)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(128, 128), disable_ue8m0_cast=True)
    return [(d, exact)]


@row("prime-rl: weight gradient in 1D1D that is added to d itself")
def _(device: str) -> Pairs:
    x, y = made(N, K, device=device), made(M, K, device=device)
    d = torch.ones(M, N, device=device)
    deep_gemm.fp8_gemm_nt(tokens(y), tokens(x), d, c=d, recipe=(1, 1, 128))
    return [(d, y.float() @ x.float().t() + 1)]


@row("DeepGEMM 2.8: all arguments by position, alpha and epilogue None")
def _(device: str) -> Pairs:
    a, b, d, exact = dense(device)
    deep_gemm.fp8_gemm_nt(a, b, d, None, None, None, None, "", False, None, None)
    x, w = made(M, K, device=device), made(N, K, device=device)
    half = torch.empty(M, N, dtype=BF16, device=device)
    deep_gemm.bf16_gemm_nt(x, w, half, None, "", None, None)
    return [(d, exact), (half, x.float() @ w.float().t())]


@row("LMDeploy: scales are a transposed slice of a buffer padded to 128 rows")
def _(device: str) -> Pairs:
    (a, sfa), b, d, exact = dense(device)
    buffer = torch.full((K // 128, 256), float("nan"), device=device)
    buffer[:, :M] = sfa.t()
    deep_gemm.fp8_gemm_nt((a, buffer.t()[:M]), b, d)
    return [(d, exact)]


@row("tokenspeed: PDL read and, on a change, set around each product")
def _(device: str) -> Pairs:
    a, b, d, exact = dense(device)
    before = deep_gemm.get_pdl()
    deep_gemm.set_pdl(not before)
    deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.set_pdl(before)
    assert deep_gemm.get_pdl() is before
    return [(d, exact)]


@row("Megatron and slime: nn, and tn that is added")
def _(device: str) -> Pairs:
    x, w = made(M, 64, device=device), made(64, 48, device=device)
    d = torch.empty(M, 48, dtype=BF16, device=device)
    deep_gemm.bf16_gemm_nn(x, w, d)
    y, grad = made(M, N, device=device), torch.ones(64, N, device=device)
    deep_gemm.bf16_gemm_tn(x, y, grad, c=grad)
    return [(d, x.float() @ w.float()), (grad, x.float().t() @ y.float() + 1)]


@row("vLLM and Hugging Face's tests: by cuBLASLt")
def _(device: str) -> Pairs:
    x, w = made(M, K, device=device), made(N, K, device=device)
    d = torch.empty(M, N, dtype=BF16, device=device)
    deep_gemm.cublaslt_gemm_nt(x, w, d, c=None)
    return [(d, x.float() @ w.float().t())]


@row("DeepGEMM's tests: skipping the middle of heads")
def _(device: str) -> Pairs:
    a, b, _, exact = dense(device)
    d = torch.zeros(M, N // 256 * 320, dtype=BF16, device=device)
    deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, (128, 64, 128))
    return [(torch.cat([d[:, :128], d[:, 192:]], 1), exact)]


# ---------------------------------------------------------------------------------------------------- grouped

COUNTS = (70, 0, 129)


def contiguous(device: str, alignment: int = 128) -> tuple[Tensor, Tensor, list[slice], int]:
    """Rows of A, weights, the rows of each group, and the number of rows up to the last group's aligned end."""
    starts = [0]
    for count in COUNTS:
        starts.append(starts[-1] + deep_gemm.align(count, alignment))
    places = [slice(start, start + count) for start, count in zip(starts, COUNTS, strict=False)]
    x = torch.zeros(starts[-1], K, dtype=BF16, device=device)
    for rows in places:
        x[rows] = made(rows.stop - rows.start, K, device=device)
    return x, made(G, N, K, device=device), places, starts[-1]


def wanted(d: Tensor, x: Tensor, w: Tensor, places: list[slice]) -> Pairs:
    return [(d[rows], x[rows].float() @ w[g].float().t()) for g, rows in enumerate(places) if rows.stop > rows.start]


def labels(places: list[slice], m: int, device: str) -> Tensor:
    found = torch.full((m,), -1, dtype=I32, device=device)
    for group, rows in enumerate(places):
        found[rows] = group
    return found


@row("vLLM: ends of groups, inside get, set and restore of the alignment; the workspace is full of NaN")
def _(device: str) -> Pairs:
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    alignment = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=sum(COUNTS), num_groups=G)
    assert 1 <= alignment <= before
    deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    try:
        x, w, places, m = contiguous(device)
        ends = torch.tensor([rows.stop for rows in places], dtype=I32, device=device)
        a, d = tokens(x), torch.full((m + 128, N), float("nan"), dtype=BF16, device=device)
        a = tuple(torch.cat([part, part[:128]]) for part in a)
        options = {"use_psum_layout": True, "ensure_zero_padding": False, "expected_m_for_psum_layout": 64}
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, experts(w), d, ends, disable_ue8m0_cast=True, **options)
    finally:
        deep_gemm.set_mk_alignment_for_contiguous_layout(before)
    past = torch.isnan(d[m:]).all().float()[None]
    return [*wanted(d, x, w, places), (past, torch.ones_like(past))]


@row("SGLang: label of each row, lists")
def _(device: str) -> Pairs:
    x, w, places, m = contiguous(device)
    d = torch.empty(m, N, dtype=BF16, device=device)
    lhs: Any = list(tokens(x))
    rhs: Any = list(experts(w))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, d, labels(places, m, device))
    return wanted(d, x, w, places)


@row("Transformers: fp8_fp4 name, M no multiple of the alignment, padding after the last group")
def _(device: str) -> Pairs:
    x, w, places, m = contiguous(device)
    more = torch.cat([x, x[:57]])
    d = torch.empty(m + 57, N, dtype=BF16, device=device)
    grouped = labels(places, m + 57, device)
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
        tokens(more), experts(w), d, grouped, recipe=None, use_psum_layout=False
    )
    return wanted(d, x, w, places)


@row("Transformers and slime: bf16 experts, nt and nn")
def _(device: str) -> Pairs:
    x, w, places, m = contiguous(device)
    nt, nn = (torch.empty(m, N, dtype=BF16, device=device) for _ in range(2))
    grouped = labels(places, m, device)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w, nt, grouped, use_psum_layout=False)
    deep_gemm.m_grouped_bf16_gemm_nn_contiguous(x, w.mT.contiguous(), nn, grouped)
    return [*wanted(nt, x, w, places), *wanted(nn, x, w, places)]


@row("SGLang, vLLM, LMDeploy: masked groups, both names, a wrong estimate")
def _(device: str) -> Pairs:
    x, w = made(G, 96, K, device=device), made(G, N, K, device=device)
    a, sfa = zip(*map(tokens, x.unbind()), strict=True)
    lhs: Any = [torch.stack(a), torch.stack(sfa)]
    masked_m = torch.tensor([96, 0, 5], dtype=I32, device=device)
    pairs: Pairs = []
    for call in (deep_gemm.m_grouped_fp8_gemm_nt_masked, deep_gemm.fp8_m_grouped_gemm_nt_masked):
        d = torch.empty(G, 96, N, dtype=BF16, device=device)
        call(lhs, experts(w), d, masked_m, 96)
        pairs += [(d[g, :count], x[g, :count].float() @ w[g].float().t()) for g, count in ((0, 96), (2, 5))]
    return pairs


@row("SGLang and LMDeploy: masked bf16 groups by keyword")
def _(device: str) -> Pairs:
    x, w = made(G, 96, K, device=device), made(G, N, K, device=device)
    d = torch.empty(G, 96, N, dtype=BF16, device=device)
    masked_m = torch.tensor([96, 0, 5], dtype=I32, device=device)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a=x, b=w, d=d, masked_m=masked_m, expected_m=4)
    return [(d[g, :count], x[g, :count].float() @ w[g].float().t()) for g, count in ((0, 96), (2, 5))]


# ------------------------------------------------------------------------------------------------- K-grouped

KS = [128, 0, 256]


def k_grouped(device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, y = made(sum(KS), M // 8 * 8, device=device), made(sum(KS), N, device=device)
    parts = zip(x.split(KS), y.split(KS), strict=True)
    return x, y, torch.stack([a.float().t() @ b.float() for a, b in parts])


def flat(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values of each group, one K-major block after the other, and scales (M, sum of K / 128)."""
    casts = [deep_gemm.per_channel_cast_to_fp8(part, False) for part in x.split(KS) if part.numel()]
    values = torch.cat([values.t().contiguous().flatten() for values, _ in casts])
    return values, torch.cat([scales for _, scales in casts]).t()


@row("torchao: c another zeroed tensor, scales columns of a wider one")
def _(device: str) -> Pairs:
    x, y, exact = k_grouped(device)
    (a, sfa), (b, sfb) = flat(x), flat(y)
    wide = torch.full((sfa.shape[0], 9), float("nan"), device=device)
    wide[:, 2:5] = sfa
    sizes = torch.tensor(KS, dtype=I32, device=device)
    d, c = torch.empty_like(exact), torch.zeros_like(exact)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous((a, wide[:, 2:5]), (b, sfb.contiguous()), d, KS, sizes, c)
    return [(d, exact)]


@row("prime-rl: c is d, scales transposed, ks_tensor")
def _(device: str) -> Pairs:
    x, y, exact = k_grouped(device)
    d = torch.ones_like(exact)
    sizes = torch.tensor(KS, dtype=I32, device=device)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(flat(x), flat(y), d, ks_cpu=KS, ks_tensor=sizes, c=d)
    return [(d, exact + 1)]


@row("Megatron and slime: sizes a tuple, d and c one bf16 tensor; 2.8 calls them ks")
def _(device: str) -> Pairs:
    x, y, exact = k_grouped(device)
    sizes = torch.tensor(KS, dtype=I32, device=device)
    d = torch.zeros(exact.shape, dtype=BF16, device=device)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x, y, d, tuple(KS), sizes, d)
    other = torch.zeros(exact.shape, device=device)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(x, y, other, ks=KS, grouped_layout=sizes, c=other, epilogue=None)
    return [(d, exact), (other, exact)]


# ------------------------------------------------------------------------------------------- batches and others


@row("vLLM, SGLang, tokenspeed: output projection of DeepSeek-V4, group-major storage")
def _(device: str) -> Pairs:
    x, w = made(G, 40, K, device=device), made(G, N, K, device=device)
    a, sfa = (torch.stack(parts) for parts in zip(*map(tokens, x.unbind()), strict=True))
    d = torch.empty(G, 40, N, dtype=BF16, device=device)
    operands: Any = ((a.transpose(0, 1), sfa.transpose(0, 1)), experts(w), d.transpose(0, 1))
    deep_gemm.fp8_einsum("bhr,hdr->bhd", *operands, recipe=(1, 128, 128))
    again = torch.empty_like(d)
    padded = torch.empty(G, K // 128, 40, device=device)  # dots3: scales a slice of (h, r / 128, b)
    padded.copy_(sfa.mT)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", (operands[0][0], padded.permute(2, 0, 1)), experts(w), again.transpose(0, 1))
    exact = x.float() @ w.float().mT
    return [(d, exact), (again, exact)]


@row("DeepGEMM's tests: einsum")
def _(device: str) -> Pairs:
    x, w = made(40, G, K, device=device), made(G, N, K, device=device)
    d = torch.empty(40, G, N, dtype=BF16, device=device)
    deep_gemm.einsum("bhr,hdr->bhd", x, w, d)
    return [(d, torch.einsum("bhr,hdr->bhd", x.float(), w.float()))]


@row("vLLM, SGLang, tokenspeed: hyper-connections, splits of K that the caller adds")
def _(device: str) -> Pairs:
    x, w = made(M, K, device=device), torch.randn(24, K, device=device)
    d, squares = torch.empty(4, M, 24, device=device), torch.empty(4, M, device=device)
    deep_gemm.tf32_hc_prenorm_gemm(x, w, d, squares, 4)
    return [(d.sum(0), x.float() @ w.t()), (squares.sum(0), x.float().square().sum(1))]
