"""Calls that users get wrong: each message ends with what to do. `tests/house.json` has those where one argument of a
right call has another dtype, shape, rank or layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import quantize

M, N, K = 32, 384, 512
BF16, I32 = torch.bfloat16, torch.int32
Pair = tuple[torch.Tensor, torch.Tensor]


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=BF16)


def by_token(*shape: int) -> Pair:
    return deep_gemm.per_token_cast_to_fp8(bf16(*shape), use_ue8m0=False)


def by_block(*shape: int) -> Pair:
    return deep_gemm.per_block_cast_to_fp8(bf16(*shape), use_ue8m0=False)


def fp8(**changes: Any) -> Callable[[], object]:
    """A product of FP8, right but for ``changes``. ``sfa`` and ``sfb`` change only scales, ``xa`` and ``xb`` values."""

    def call() -> None:
        given, (a, sfa), (b, sfb) = dict(changes), by_token(M, K), by_block(N, K)
        pairs = {"a": (given.pop("xa", a), given.pop("sfa", sfa)), "b": (given.pop("xb", b), given.pop("sfb", sfb))}
        deep_gemm.fp8_gemm_nt(**{**pairs, "d": bf16(M, N), **given})

    return call


def half(**changes: Any) -> Callable[[], object]:
    return lambda: deep_gemm.bf16_gemm_nt(**{"a": bf16(M, K), "b": bf16(N, K), "d": bf16(M, N), **changes})


def grouped(**changes: Any) -> Callable[[], object]:
    """Two experts, with a label for each row."""
    labels = torch.zeros(256, dtype=I32)
    right = {"a": bf16(256, K), "b": bf16(2, N, K), "d": bf16(256, N), "grouped_layout": labels}
    return lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(**right | changes)


def masked(**changes: Any) -> Callable[[], object]:
    counts = torch.zeros(2, dtype=I32)
    right = {"a": bf16(2, 64, K), "b": bf16(2, N, K), "d": bf16(2, 64, N), "masked_m": counts, "expected_m": 9}
    return lambda: deep_gemm.m_grouped_bf16_gemm_nt_masked(**right | changes)


def batch(**changes: Any) -> Callable[[], object]:
    right = {"a": bf16(2, M, K), "b": bf16(2, N, K), "d": bf16(2, M, N)}
    return lambda: deep_gemm.bf16_bmm(**right | changes)


def einsum(**changes: Any) -> Callable[[], object]:
    right = {"a": bf16(M, 3, K), "b": bf16(3, N, K), "d": bf16(M, 3, N)}
    return lambda: deep_gemm.einsum(**{"expr": "bhr,hdr->bhd", **right, **changes})


def heads(**changes: Any) -> Callable[[], object]:
    """FP8 of two heads, as DeepSeek-V4's output projection."""
    x, wo_a = torch.ones(M, 2, K).to(torch.float8_e4m3fn), torch.ones(2, N, K).to(torch.float8_e4m3fn)
    b = changes.get("wo_a", wo_a), changes.get("scales", torch.ones(2, N // 128, K // 128))
    return lambda: deep_gemm.fp8_einsum("bhr,hdr->bhd", (x, torch.ones(M, 2, K // 128)), b, bf16(M, 2, N))


def ends(rows: int) -> torch.Tensor:
    return torch.full((rows,), 8, dtype=I32)


def logits(**changes: Any) -> Callable[[], object]:
    right = {"q": E4M3, "kv": (E4M3[:, 0].contiguous(), torch.ones(M)), "weights": torch.ones(M, 32)}
    right |= {"cu_seq_len_k_start": ends(M), "cu_seq_len_k_end": ends(M)}
    return lambda: deep_gemm.fp8_mqa_logits(**right | changes)


def prenorm(**changes: Any) -> Callable[[], object]:
    right = {"a": bf16(M, 64), "b": torch.ones(24, 64), "d": torch.ones(M, 24), "sqr_sum": torch.ones(M)}
    return lambda: deep_gemm.tf32_hc_prenorm_gemm(**right | changes)


def name(old: str) -> Callable[[], object]:
    return lambda: getattr(deep_gemm, old)


class Array:
    """As one of numpy, which need not be installed."""


Array.__module__ = "numpy"
NUMPY: Any = Array()


class Many:
    """As an array of several numbers, which has no truth."""

    ndim = 1

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


Many.__module__ = "numpy"
ARRAY: Any = Many()
E4M3 = torch.ones(M, 32, 64).to(torch.float8_e4m3fn)
BIAS = "A bias is an epilogue: bf16_gemm_nt and its like take epilogue=deep_gemm.Epilogue(bias=bias)."
CASTS = "per_token_cast_to_fp8 and per_block_cast_to_fp8 return such pairs."
PLACE = "It is written in place: pass torch.empty of the result's shape, dtype and device."
SCALES: Any = by_token(M, K)

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    # what is no tensor
    "numpy x": (half(a=NUMPY), "Pass torch.from_numpy(a), on the device of the others."),
    "numpy scales": (fp8(sfb=NUMPY), "Pass torch.from_numpy(it), on the device of the others."),
    "numpy, rows": (lambda: quantize.rows(NUMPY), "Pass torch.from_numpy(x), on the device of the others."),
    "numpy, cast": (
        lambda: deep_gemm.per_token_cast_to_fp8(NUMPY, use_ue8m0=False),
        "Pass torch.from_numpy(x), on the device of the others.",
    ),
    "counts in a list": (masked(masked_m=[10, 20]), "Pass torch.tensor(masked_m)."),
    "a layer": (half(b=torch.nn.Linear(4, 4)), "Pass b.weight."),
    "a dtype for d": (half(d=BF16), PLACE),
    "pairs for bfloat16": (half(a=by_token(M, K)), "Only FP8 functions take pairs of values and scales."),
    "a tensor for a pair": (fp8(a=bf16(M, K)), CASTS),
    "a pair to a layout": (
        lambda: deep_gemm.get_mn_major_tma_aligned_tensor(SCALES),
        "Pass the scales alone, the second of a pair.",
    ),
    "a pair declared constant": (lambda: deep_gemm.declare_constant(SCALES), "Unpack a pair: declare_constant(*b)."),
    # c and d
    "bias of one row as c": (half(c=bf16(1, N)), BIAS),
    "FP8 d": (fp8(d=by_token(M, N)[0]), "Cast d after the call."),
    # order, form, dtype
    "a and b swapped, FP8": (fp8(a=by_block(N, K), b=by_token(M, K)), "They fit b and a: swap the two."),
    "float16 x": (half(a=bf16(M, K).half()), "fp16_gemm_nt takes torch.float16."),
    "FP8 for bfloat16": (half(a=by_token(M, K)[0]), "fp8_gemm_nt, with scales, takes torch.float8_e4m3fn."),
    "E5M2": (
        fp8(xb=bf16(N, K).to(torch.float8_e5m2)),
        "a scale for each 128 of a row, which keep the range of gradients.",
    ),
    "bytes of E4M3": (fp8(xa=by_token(M, K)[0].view(torch.uint8)), "E4M3 with .view(torch.float8_e4m3fn)."),
    # scales and recipes
    "scales of whole rows, with a recipe": (
        fp8(sfa=torch.ones(M, 1), sfb=torch.ones(1, N), recipe=(1, 128, 128)),
        "Scales of whole rows have no recipe: leave it out.",
    ),
    "packed scales": (fp8(sfa=torch.ones((M, 1), dtype=I32)), "packed_ue8m0_tensor packs those of rows."),
    "exponents": (fp8(sfa=torch.ones(M, 2).to(torch.float8_e8m0fnu)), "their values may be powers of two."),
    "recipe of two": (fp8(recipe=(1, 128)), "as (1, 128, 128), but it is (1, 128)."),
    "a number for scales": (
        fp8(sfa=0.5),
        "One scale for all is torch.tensor(0.5, dtype=torch.float32) on its device, for a and for b.",
    ),
    "d first": (half(a=bf16(M, N), b=bf16(M, K), d=bf16(N, K)), "If a is the result: d is the third argument."),
    "d first, nn": (
        lambda: deep_gemm.bf16_gemm_nn(bf16(M, N), bf16(M, K), bf16(K, N)),
        "They agree as d, a, b: d is the third argument.",
    ),
    "dequantise, swapped": (
        lambda: deep_gemm.dequantise(*by_token(M, K)[::-1]),
        "Swap the two: values come first, then their scales.",
    ),
    "dequantise, blocks": (lambda: deep_gemm.dequantise(*by_block(N, K)), "They fit granularity=(128, 128)."),
    "dequantise, no E4M3": (lambda: deep_gemm.dequantise(bf16(M, K), SCALES[1]), "Only values of FP8 have scales."),
    "dequantise, a number": (
        lambda: deep_gemm.dequantise(by_token(M, K)[0], 0.5),  # type: ignore[arg-type]
        "sf must be a torch.Tensor, but it is of type float.",
    ),
    # batches
    "a of M x B x K": (batch(a=bf16(M, 2, K)), "They agree with a.transpose(0, 1): pass that."),
    "d of a batch first": (
        batch(a=bf16(2, M, N), b=bf16(2, M, K), d=bf16(2, N, K)),
        "They agree as d, a, b: d is the third of them.",
    ),
    "float16 in a bfloat16 batch": (batch(a=bf16(2, M, K).half()), "fp16_bmm takes torch.float16."),
    "flat b, einsum": (einsum(b=bf16(3 * N, K)), "Pass b.unflatten(0, (3, -1))."),
    "flat d, einsum": (einsum(d=bf16(M, 3 * N)), "Pass d.unflatten(1, (3, -1))."),
    "flat a, batch": (batch(a=bf16(2 * M, K)), "Pass a.unflatten(0, (2, -1))."),
    "flat wo_a": (heads(wo_a=by_block(2 * N, K)[0]), "Pass b.unflatten(0, (2, -1))."),
    "flat experts": (grouped(b=bf16(2 * N, K)), f"Pass b.unflatten(0, (-1, {N}))."),
    "flat rows, masked": (masked(a=bf16(2 * 64, K)), "Pass a.unflatten(0, (2, -1))."),
    "a number for scales of a batch": (
        lambda: deep_gemm.fp8_bmm((E4M3, 0.5), (E4M3, torch.ones(M, 1, 1)), bf16(M, 32, 32)),
        "The casts of deep_gemm.quantize return values and scales.",
    ),
    "an array for the expression": (einsum(expr=ARRAY), "but it is of type numpy.Many. Use torch.einsum."),
    "an array for FP8's expression": (
        lambda: deep_gemm.fp8_einsum(ARRAY, SCALES, SCALES, bf16(1, 1, 1)),
        "or bfloat16 to einsum.",
    ),
    "FP8 in a batch": (
        batch(a=torch.ones(2, M, K).to(torch.float8_e4m3fn)),
        "fp8_bmm, with scales, takes torch.float8_e4m3fn.",
    ),
    # sparse attention
    "keys without scales": (
        logits(kv=E4M3[:, 0].contiguous()),
        "Pass keys, E4M3 (N, D), and their scales, float32 (N).",
    ),
    "scales of keys in a column": (
        logits(kv=(E4M3[:, 0].contiguous(), torch.ones(M, 1))),
        "kv[1] must have 1 dimension, but it has 2: (32, 1). Pass kv[1].flatten(0, 1).",
    ),
    "bfloat16 queries": (
        logits(q=bf16(M, 32, 64)),
        "Cast it, and multiply weights by its scales: per_token_cast_to_fp8 returns both.",
    ),
    "bfloat16 weights": (logits(weights=bf16(M, 32)), "Pass weights.to(torch.float32)."),
    "weights of heads by queries": (
        logits(weights=torch.ones(32, 8), q=E4M3[:8], cu_seq_len_k_start=ends(8), cu_seq_len_k_end=ends(8)),
        "It is transposed: pass weights.t().contiguous().",
    ),
    "ranges of int64": (logits(cu_seq_len_k_end=ends(M).long()), "Pass cu_seq_len_k_end.to(torch.int32)."),
    "lengths of int64": (
        lambda: deep_gemm.get_paged_mqa_logits_metadata(ends(4).long(), 64, 132),
        "Pass .to(torch.int32).contiguous().",
    ),
    "a billion CTAs": (lambda: deep_gemm.get_paged_mqa_logits_metadata(ends(4), 64, 10**9), "but it is 1000000000."),
    "float32 residual": (prenorm(a=torch.ones(M, 64)), "Pass a.to(torch.bfloat16)."),
    # names
    "DeepGEMM 1, dense": (name("gemm_fp8_fp8_bf16_nt"), "Call deep_gemm.fp8_gemm_nt."),
    "DeepGEMM 1, grouped": (
        name("m_grouped_gemm_fp8_fp8_bf16_nt_masked"),
        "Call deep_gemm.m_grouped_fp8_gemm_nt_masked.",
    ),
    "DeepGEMM 1, weight gradient": (
        name("wgrad_gemm_fp8_fp8_fp32_nt"),
        "Call deep_gemm.fp8_gemm_nt with c=d and recipe=(1, 1, 128).",
    ),
    "DeepGEMM 1, scales": (name("get_col_major_tma_aligned_tensor"), "deep_gemm.get_mn_major_tma_aligned_tensor."),
    "batched": (
        lambda: name("fp8_einsum")()("bhd,hdr->bhr", None, None, None),  # type: ignore[operator]
        "or bfloat16 to einsum.",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_message_says_what_to_do(what: str) -> None:
    call, ending = WRONG[what]
    with pytest.raises((deep_gemm.DeepGemmError, AttributeError)) as caught:
        call()
    assert str(caught.value).endswith(ending)


def test_what_is_advised_is_right() -> None:
    bias, d = torch.arange(N).to(BF16), bf16(M, N)
    d.copy_(bias)
    half(c=d, d=d)()
    assert torch.equal(d, (K + bias.float()).to(BF16).expand(M, N))
    swapped = bf16(N, M)
    half(a=bf16(N, K), b=bf16(M, K), d=swapped)()
    assert torch.equal(swapped, torch.full((N, M), K).to(BF16))
    deep_gemm.fp8_gemm_nn(by_token(M, K), by_block(K, N), d)
    torch.testing.assert_close(d, torch.full((M, N), K).to(BF16))
    fp8(b=by_token(N, K), recipe=(1, 1, 128))()


def test_old_names_are_absent_and_their_new_ones_exist() -> None:
    """Clients ask for names to choose between versions."""
    from deep_gemm.unsupported import RENAMED

    for old, new in RENAMED.items():
        assert not hasattr(deep_gemm, old)
        found: Any = deep_gemm
        for part in new.split()[0].split("."):
            found = getattr(found, part)
