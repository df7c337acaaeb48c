"""Indexer logits: what torch computes on the CPU, every spelling, the schedule, the launches, and what is refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_cases import KINDS, decoding, prompt, schedule
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, kernels
from deep_gemm.arch import SM90
from deep_gemm.kernels.logits import tokens_of
from deep_gemm.spec import LogitsSpec
from deep_gemm.testing import calc_diff

BF16 = torch.bfloat16
P = prompt(9, 300)
D = decoding([100, 0, 300], next_n=2, width=320)
META = deep_gemm.get_paged_mqa_logits_metadata(D.lengths, 64, 4)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt(kind: str, dtype: torch.dtype) -> None:
    x = prompt(9, 300, 32, 64, kind)
    bound = 1e-13 if dtype == torch.float32 else 3e-6
    out = deep_gemm.fp8_fp4_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, True, 0, dtype)
    assert (out.dtype, out.shape) == (dtype, (9, 300))
    assert torch.equal(out == -torch.inf, ~x.attended)
    if kind != "empty":
        assert calc_diff(torch.where(x.attended, out, 0.0), x.exact()) < bound
    narrow = deep_gemm.fp8_fp4_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, False, 40, dtype)
    exact, counts = x.compressed(40)
    if kind != "empty":
        assert calc_diff(narrow[counts], exact[counts]) < bound


@pytest.mark.parametrize(("columns", "dtype"), [(300, torch.float32), (1, torch.float32), (513, BF16)])
def test_rows_begin_at_multiples_of_1024_bytes_and_are_whole(columns: int, dtype: torch.dtype) -> None:
    for rows in (1, 9):
        x = prompt(rows, 300)
        out = deep_gemm.fp8_fp4_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, False, columns, dtype)
        assert out.shape == (rows, columns)
        assert out.stride() == (-(-columns * out.element_size() // 1024) * 1024 // out.element_size(), 1)
        assert out.untyped_storage().nbytes() == rows * out.stride(0) * out.element_size()


def prefill(*args: Any, name: str = "fp8_fp4_mqa_logits", q: Any = P.q, kv: Any = None, **others: Any) -> torch.Tensor:
    kv = (P.k, P.scales) if kv is None else kv
    out: torch.Tensor = getattr(deep_gemm, name)(q, kv, P.weights, P.start, P.end, *args, **others)
    return out


WHOLE: dict[str, Callable[[], torch.Tensor]] = {
    "2.6.1": lambda: prefill(name="fp8_mqa_logits"), "clean": lambda: prefill(True, name="fp8_mqa_logits"),
    "a list": lambda: prefill(kv=[P.k, P.scales]), "a pair": lambda: prefill(True, 0, q=(P.q, None)),
    "by keyword": lambda: deep_gemm.fp8_mqa_logits(q=P.q, kv=(P.k, P.scales), weights=P.weights,
        cu_seq_len_k_start=P.start, cu_seq_len_k_end=P.end, clean_logits=True),
    "dtype by position": lambda: prefill(True, 0, torch.float32),
    "no schedule": lambda: prefill(True, 0, torch.float32, None),
}  # fmt: skip
NARROW: dict[str, Callable[[], torch.Tensor]] = {
    "0.2.3": lambda: prefill(False, 280, logits_dtype=torch.float32),
    "old name": lambda: prefill(False, 280, name="fp8_mqa_logits"),
    "2.8.1": lambda: prefill(280),
    "2.8.1, schedule": lambda: prefill(280, None),
    "2.8.1, by keyword": lambda: prefill(max_seqlen_k=280, schedule_meta=None),
    "2.8.1, pair": lambda: prefill(280, q=[P.q, None]),
}


@pytest.mark.parametrize("spelling", WHOLE)
def test_spellings_of_whole_rows(spelling: str) -> None:
    out = WHOLE[spelling]()
    assert torch.equal(out == -torch.inf, ~P.attended)
    assert torch.equal(out, WHOLE["2.6.1"]())


@pytest.mark.parametrize("spelling", NARROW)
def test_spellings_of_compressed_rows(spelling: str) -> None:
    _, counts = P.compressed(280)
    out = NARROW[spelling]()
    assert out.shape == (9, 280)
    assert torch.equal(out[counts], NARROW["0.2.3"]()[counts])


def decode(*args: Any, name: str = "fp8_fp4_paged_mqa_logits", q: Any = D.q, **others: Any) -> torch.Tensor:
    known = {"context_lens": D.lengths, "block_table": D.table, "cache": D.cache, "weights": D.weights, "meta": META}
    given = known | {key: others.pop(key) for key in list(others) if key in known}
    first = (given["cache"], given["weights"], given["context_lens"], given["block_table"], given["meta"])
    out: torch.Tensor = getattr(deep_gemm, name)(q, *first, *(args or (320,)), **others)
    return out


PAGED: dict[str, Callable[[], torch.Tensor]] = {
    "2.6.1": lambda: decode(320, False, name="fp8_paged_mqa_logits"),
    "no clean": lambda: decode(320, name="fp8_paged_mqa_logits"),
    "0.2.3": lambda: decode(320, False, torch.float32, None, q=(D.q, None)),
    "2.8.1": lambda: decode(320, None),
    "2.8.1, by keyword": lambda: decode(320, indices=None),
    "every second row of a table": lambda: decode(320, block_table=D.table.repeat_interleave(2, 0)[::2]),
}


@pytest.mark.parametrize("spelling", PAGED)
def test_spellings_of_paged_logits(spelling: str) -> None:
    out = PAGED[spelling]()
    assert (out.shape, out.stride()) == ((6, 320), (512, 1))
    assert calc_diff(torch.where(D.live, out, 0.0), D.exact()) < 1e-13


@pytest.mark.parametrize(
    ("next_n", "heads", "dim", "page_keys", "padding"),
    [(1, 64, 128, 64, 0), (3, 32, 64, 32, 64), (2, 64, 32, 32, 0), (6, 64, 128, 64, 1024)],
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_pages(next_n: int, heads: int, dim: int, page_keys: int, padding: int, dtype: torch.dtype) -> None:
    x = decoding([5, 0, 320, 64], next_n, heads, dim, page_keys, 320, padding)
    meta = deep_gemm.get_paged_mqa_logits_metadata(x.lengths, page_keys, 5)
    out = deep_gemm.fp8_fp4_paged_mqa_logits(x.q, x.cache, x.weights, x.lengths, x.table, meta, 320, logits_dtype=dtype)
    assert out.dtype == dtype
    assert calc_diff(torch.where(x.live, out, 0.0), x.exact()) < (1e-13 if dtype == torch.float32 else 3e-6)
    older = deep_gemm.fp8_paged_mqa_logits(
        x.q, x.cache, x.weights, x.lengths[:, -1].contiguous(), x.table, meta, 320, False
    )
    assert torch.equal(older[x.live].to(dtype), out[x.live])


def test_16_heads_are_32_of_which_half_have_no_weight(gpu: FakeGpu) -> None:
    """For kernels; on the CPU it is the formula."""
    x, tokens = prompt(9, 300, 16, 64), decoding([100, 0, 300], next_n=2, heads=16, width=320)
    meta = deep_gemm.get_paged_mqa_logits_metadata(tokens.lengths, 64, 4)
    whole = deep_gemm.fp8_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end)
    paged = [tokens.q, tokens.cache, tokens.weights, tokens.lengths, tokens.table, meta, 320]
    deep_gemm.fp8_paged_mqa_logits(*paged)
    assert [launched.spec.heads for launched in gpu.launched if hasattr(launched.spec, "heads")] == [32, 32]
    assert whole.shape == (9, 300)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_16_heads(dtype: torch.dtype) -> None:
    bound = 1e-13 if dtype == torch.float32 else 3e-6
    x, tokens = prompt(9, 300, 16, 64), decoding([100, 0, 300], next_n=2, heads=16, width=320)
    whole = deep_gemm.fp8_fp4_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end, True, 0, dtype)
    assert calc_diff(torch.where(x.attended, whole, 0.0), x.exact()) < bound
    meta = deep_gemm.get_paged_mqa_logits_metadata(tokens.lengths, 64, 4)
    paged = [tokens.q, tokens.cache, tokens.weights, tokens.lengths, tokens.table, meta, 320]
    out = deep_gemm.fp8_fp4_paged_mqa_logits(*paged, logits_dtype=dtype)
    assert calc_diff(torch.where(tokens.live, out, 0.0), tokens.exact()) < bound
    with pytest.raises(InvalidInputError, match=r"weights must be torch.float32 \(9, 16\)"):
        deep_gemm.fp8_mqa_logits(x.q, (x.k, x.scales), x.weights[:, :8], x.start, x.end)


def test_nothing_to_do() -> None:
    none = decoding([], width=64)
    meta = deep_gemm.get_paged_mqa_logits_metadata(none.lengths, 64, 3)
    assert meta.tolist() == [[0, 0]] * 4
    assert deep_gemm.fp8_paged_mqa_logits(
        none.q, none.cache, none.weights, none.lengths, none.table, meta, 64
    ).shape == (0, 64)
    x = prompt(0, 10)
    assert deep_gemm.fp8_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end).shape == (0, 10)
    x = prompt(3, 0)
    assert deep_gemm.fp8_mqa_logits(x.q, (x.k, x.scales), x.weights, x.start, x.end).shape == (3, 0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=30), st.integers(1, 140), st.integers(1, 3))
def test_the_schedule_is_what_callers_write_themselves(last: list[int], slots: int, next_n: int) -> None:
    lengths = torch.tensor(last, dtype=torch.int32)
    each = (lengths[:, None] + torch.arange(next_n, dtype=torch.int32) - next_n + 1).clamp(min=0).contiguous()
    found = deep_gemm.get_paged_mqa_logits_metadata(each, 64, slots)
    assert (found.dtype, found.is_contiguous()) == (torch.int32, True)
    assert found.tolist() == schedule(last, slots)
    assert torch.equal(deep_gemm.get_paged_mqa_logits_metadata(lengths, 32, slots), found)


def test_fake_tensors_are_not_read() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {name: mode.from_tensor(value) for name, value in vars(P).items()}
        args = (fake["weights"], fake["start"], fake["end"])
        out = deep_gemm.fp8_mqa_logits(fake["q"], (fake["k"], fake["scales"]), *args)
        assert (out.shape, out.stride()) == ((9, 300), (512, 1))
        lengths = mode.from_tensor(D.lengths)
        meta = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132)
        parts = [mode.from_tensor(x) for x in (D.q, D.cache, D.weights)]
        table = mode.from_tensor(D.table)
        assert deep_gemm.fp8_paged_mqa_logits(*parts, lengths, table, meta, 320).shape == (6, 320)


def test_each_function_is_one_launch_and_replays(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    held = functools.cache(torch.empty)
    monkeypatch.setattr(torch, "empty", held)  # as an allocator that gives the same memory again
    for _ in range(3):
        prefill(True)
        decode(320)
    assert [launched.kernel for launched in gpu.launched] == ["logits", "paged logits"] * 3
    first, second = gpu.launched[:2]
    assert first.at["keys"] == P.k.data_ptr()
    assert (first.spec.num_sms, first.spec.clean, first.spec.compressed, first.spec.columns) == (132, True, False, 300)
    assert (second.spec.slots, second.spec.lengths_per_token, second.spec.pages) == (4, True, D.cache.shape[0])
    assert gpu.prepared == 2
    prefill(280)
    assert (gpu.launched[-1].spec.columns, gpu.launched[-1].spec.clean) == (280, False)


@pytest.mark.parametrize("name", ["sm90_fp8_mqa_logits", "sm90_fp8_paged_mqa_logits"])
def test_shared_memory_and_registers_fit(name: str) -> None:
    kernel = kernels.get(name)
    for params in kernel.cases():
        config: Any = params.config
        assert kernel.shared_bytes(params) <= SM90.shared_per_cta
        stages = kernel.constants(params)["num_stages"]
        assert isinstance(stages, int)
        assert stages % config.num_consumers == 0
        assert stages >= 8
        producer, consumer = config.registers
        assert producer + config.num_consumers * consumer <= 512


def test_costs_that_do_not_fit_32_bits_are_refused() -> None:
    kernel = kernels.get("sm90_fp8_mqa_logits")
    rows, keys = 1 << 20, 1 << 19
    assert kernel.refuses(LogitsSpec(rows, keys, 64, 128, 100, compressed=True)) is None
    why = kernel.refuses(LogitsSpec(rows, keys + 1, 64, 128, 100, compressed=True))
    assert why is not None
    assert "1048576 x 524289" in why


@pytest.mark.parametrize(("next_n", "heads", "tokens"), [(1, 64, 1), (4, 64, 4), (5, 64, 3), (6, 64, 3), (8, 32, 8)])
def test_tokens_of_a_product(next_n: int, heads: int, tokens: int) -> None:
    assert tokens_of(next_n, heads) == tokens


def changed(**others: Any) -> Callable[[], Any]:
    """A call with other tensors."""

    def call() -> Any:
        known = {"q": P.q, "k": P.k, "scales": P.scales, "weights": P.weights, "start": P.start, "end": P.end} | others
        kv = known.get("kv", (known["k"], known["scales"]))
        return deep_gemm.fp8_mqa_logits(known["q"], kv, known["weights"], known["start"], known["end"])

    return call


# fmt: off
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "12 heads": (changed(q=P.q[:, :12].contiguous()), UnsupportedError, "q must have 16, 32 or 64 heads of 32, 64"),
    "FP4": (changed(q=P.q.view(torch.uint8)), UnsupportedError, "Packed FP4 needs a GPU after Hopper"),
    "strided queries": (changed(q=P.q.mT.contiguous().mT), InvalidInputError, "q must be contiguous"),
    "queries of rank 2": (changed(q=P.q[0]), InvalidInputError, "q must have 3 dimensions"),
    "keys of another width": (changed(k=P.k[:, :64].contiguous()), InvalidInputError,
                              r"kv\[0\] must be .* \(300, 128\)"),
    "scales of another length": (changed(scales=P.scales[1:]), InvalidInputError,
                                 r"kv\[1\] must be torch.float32 \(300,\)"),
    "transposed weights": (changed(weights=P.weights.t().contiguous().t()), InvalidInputError,
                           "contiguous along heads"),
    "int64 ranges": (changed(start=P.start.long()), InvalidInputError, "cu_seq_len_k_start must be torch.int32"),
    "too few ends": (changed(end=P.end[1:]), InvalidInputError, "cu_seq_len_k_end must be torch.int32"),
    "clean and compressed": (lambda: prefill(True, 280), InvalidInputError,
                             "clean_logits must be False with max_seqlen_k"),
    "width below zero": (lambda: prefill(False, -1), InvalidInputError, "max_seqlen_k must be 0, or the width"),
    "two widths": (lambda: prefill(280, 280), InvalidInputError, "the seventh is schedule_meta"),
    "float16 logits": (lambda: prefill(True, 0, torch.float16), InvalidInputError,
                       "logits_dtype must be torch.float32 or"),
    "clean is a word": (lambda: prefill("yes"), InvalidInputError, "clean_logits must be True or False"),
    "a schedule": (lambda: prefill(280, schedule_meta=META), UnsupportedError, "schedule_meta must be None"),
    "FP4 scales": (lambda: prefill(q=(P.q, P.scales)), UnsupportedError, "q must have no scales"),
    "three of q": (lambda: prefill(q=(P.q, None, None)), InvalidInputError, "but it has 3 elements"),
    "paged, clean": (lambda: decode(320, True), InvalidInputError, "clean_logits must be False"),
    "indices": (lambda: decode(320, P.start), UnsupportedError, "indices must be None"),
    "indices by name": (lambda: decode(320, indices=P.start), UnsupportedError, "indices must be None"),
    "no width": (lambda: decode(True), InvalidInputError, "max_context_len must be the width"),
    "pages of 48": (lambda: decode(cache=torch.zeros(9, 48, 1, 132, dtype=torch.uint8)), UnsupportedError,
                    "blocks of 32, 64 keys"),
    "pages that are not aligned": (lambda: decode(cache=D.cache.as_strided((9, 64, 1, 132), (8452, 132, 132, 1))),
                                   InvalidInputError, "begin at multiples of 16 bytes"),
    "a cache of float8": (lambda: decode(cache=D.cache.view(torch.float8_e4m3fn)), InvalidInputError,
                          "kv_cache must be"),
    "lengths of another batch": (lambda: decode(context_lens=D.lengths[:2].contiguous()), InvalidInputError,
                                 r"context_lens must be torch.int32 \(3, 2\)"),
    "a table of another batch": (lambda: decode(block_table=D.table[:2]), InvalidInputError, "block_table must be"),
    "an int64 table": (lambda: decode(block_table=D.table.long()), InvalidInputError,
                       "block_table must be torch.int32"),
    "a schedule of one row": (lambda: decode(meta=META[:1]), InvalidInputError, "a row for each CTA and one more"),
    "a wide schedule": (lambda: decode(meta=META.repeat(1, 2)), InvalidInputError, "schedule_meta must be"),
    "metadata: pages": (lambda: deep_gemm.get_paged_mqa_logits_metadata(D.lengths, 48, 132), UnsupportedError,
                        "block_kv must be one of"),
    "metadata: indices": (lambda: deep_gemm.get_paged_mqa_logits_metadata(D.lengths, 64, 132, D.lengths),
                          UnsupportedError, "indices must be None"),
}
# fmt: on


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_named(mistake: str) -> None:
    call, kind, words = REFUSED[mistake]
    with pytest.raises(kind, match=words):
        call()
