"""Of DeepSeek's attention: a product into heads (`fp8_gemm_nt_skip_head_mid`), and the indexer's logits, which the rest
of this text is about. Which keys does a query attend?

``logits[i, j] = k_scale[j] * sum over heads h of relu(q[i, h] . k[j]) * weights[i, h]``

Queries and keys are E4M3. Queries have no scales: their caller multiplies weights by them. There are 16, 32 or 64 heads
of 32, 64 or 128 elements; 16 are copied to 32 first, by torch. Scores are rounded to bf16 before the sum over heads,
which the tensor cores make in float32. A logit has the same bits whatever queries and keys are beside it.

Logits are allocated here. Their rows begin at multiples of 1024 bytes, so that they are a view of a wider tensor. All
runs on the current stream, without synchronising. Inside CUDA-graph capture the kernel must have been loaded by an
earlier call; ranges, lengths and pages may differ when the graph is replayed. On a GPU, only DG_CHECK=1 checks them.

Raises InvalidInputError, which names the argument, and UnsupportedError for what Hopper cannot do: FP4, or other sizes
of heads. On the CPU torch computes the same, with sums in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.ops import checks, logits, paged_logits, skip_head_mid

MOST_CTAS = 1 << 16
"""Of a schedule: many times those of any GPU."""


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool | None = None,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Logits of a prompt: each query attends a range of one matrix of keys.

    Args:
        q: E4M3 (M, H, D), contiguous.
        kv: keys E4M3 (N, D) and their scales float32 (N), contiguous.
        weights: float32 (M, H), contiguous along heads.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 (M). Query i attends the keys from start[i] on, before end[i].
            Bounds outside of 0 to N are cut.
        clean_logits: whether columns of other keys are -inf. Otherwise they are undefined. Without ``max_seqlen_k`` it
            is True unless given.
        max_seqlen_k: 0, or the width of a compressed result, whose row i begins with the logit of key start[i]. Columns
            past the range are undefined: ``clean_logits`` must be False.

    Returns:
        float32 (M, N), or (M, max_seqlen_k).

    >>> q, keys = torch.ones(8, 32, 64).to(torch.float8_e4m3fn), torch.ones(16, 64).to(torch.float8_e4m3fn)
    >>> starts, ends = torch.zeros(8, dtype=torch.int32), torch.full((8,), 16, dtype=torch.int32)
    >>> deep_gemm.fp8_mqa_logits(q, (keys, torch.ones(16)), torch.ones(8, 32), starts, ends).shape
    torch.Size([8, 16])
    """
    return _prefill(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, torch.float32)


def fp8_fp4_mqa_logits(
    q: Any,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: Any = None,
    max_seqlen_k: int | None = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: None = None,
) -> Tensor:
    """`fp8_mqa_logits` under the name that newer callers use.

    ``q`` is a tensor, or a pair of it and None. ``logits_dtype`` is float32 or bfloat16. The sixth argument may be
    max_seqlen_k, an int that is no bool; the seventh is then schedule_meta, which must be None.

    >>> q, keys = torch.ones(8, 32, 64).to(torch.float8_e4m3fn), torch.ones(16, 64).to(torch.float8_e4m3fn)
    >>> starts, ends = torch.zeros(8, dtype=torch.int32), torch.full((8,), 16, dtype=torch.int32)
    >>> deep_gemm.fp8_fp4_mqa_logits((q, None), (keys, torch.ones(16)), torch.ones(8, 32), starts, ends).shape
    torch.Size([8, 16])
    """
    if isinstance(clean_logits, int) and not isinstance(clean_logits, bool):
        if not isinstance(max_seqlen_k, (int, type(None))) or max_seqlen_k:
            raise InvalidInputError(
                f"the sixth argument is {clean_logits}, so the seventh is schedule_meta and must "
                f"be None, but it is {checks.shown(max_seqlen_k)}."
            )
        clean_logits, max_seqlen_k = None, clean_logits
    if schedule_meta is not None:
        raise UnsupportedError("schedule_meta must be None: on Hopper the kernel shares out the work itself.")
    q = _without_scales(q)
    width = 0 if max_seqlen_k is None else max_seqlen_k
    return _prefill(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, width, logits_dtype)


def _prefill(
    q: Any, kv: Any, weights: Any, starts: Any, ends: Any, clean: Any, max_seqlen_k: Any, logits_dtype: Any
) -> Tensor:
    max_seqlen_k = checks.check_index("max_seqlen_k", max_seqlen_k, 0, checks.MAX_SIZE, "0, or the width of a result")
    clean = max_seqlen_k == 0 if clean is None else clean
    logits.check_logits_dtype(logits_dtype)
    checks.check_tensor("q", q, (3,))
    keys, _ = checks.pair("kv", kv, logits.KEYS)
    checks.check_tensor("kv[0]", keys, (2,))
    q, weights = logits.whole_heads(q, weights)
    out = logits.empty_logits(q.shape[0], max_seqlen_k or keys.shape[0], logits_dtype, q.device)
    logits.mqa_logits(q, kv, weights, starts, ends, out, clean, max_seqlen_k)
    return out


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool | Tensor | None = False,
    indices: None = None,
) -> Tensor:
    """Logits of decoding: a few tokens of each request over the pages of its keys.

    Args:
        q: E4M3 (B, next_n, H, D), contiguous: any number of tokens of each request.
        kv_cache: uint8 (blocks, block_kv, 1, D + 4). A block has the values of 32 or 64 keys, then their float32
            scales. Blocks are contiguous, and begin at multiples of 16 bytes.
        weights: float32 (B * next_n, H), contiguous along heads.
        context_lens: int32 (B, next_n), the length of each token, or (B); the last token's is the largest. Those below
            0 count as 0, and those above max_context_len, or the keys of a row of block_table, are cut.
        block_table: int32 (B, max_blocks), contiguous along blocks. Entries past a length do not matter.
        schedule_meta: of `get_paged_mqa_logits_metadata` for these lengths. The launch has a CTA for each of its slots.
        max_context_len: the width of the result.
        clean_logits: must be False: columns at and past a row's length are undefined.
        indices: must be None on Hopper.

    Returns:
        float32 (B * next_n, max_context_len).

    >>> q, pages = torch.ones(2, 1, 32, 64).to(torch.float8_e4m3fn), torch.zeros(4, 64, 1, 68, dtype=torch.uint8)
    >>> lengths, table = torch.tensor([[5], [90]]).int(), torch.tensor([[0, 0], [1, 2]]).int()
    >>> schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 2)
    >>> deep_gemm.fp8_paged_mqa_logits(q, pages, torch.ones(2, 32), lengths, table, schedule, 128).shape
    torch.Size([2, 128])
    """
    return _paged(
        q,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        torch.float32,
        indices,
    )


def fp8_fp4_paged_mqa_logits(
    q: Any,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool | Tensor | None = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: None = None,
) -> Tensor:
    """`fp8_paged_mqa_logits` under the name that newer callers use.

    ``q`` is a tensor, or a pair of it and None. ``logits_dtype`` is float32 or bfloat16. The eighth argument may be
    indices, which must be None.

    >>> q, pages = torch.ones(2, 1, 32, 64).to(torch.float8_e4m3fn), torch.zeros(4, 64, 1, 68, dtype=torch.uint8)
    >>> lengths, table = torch.tensor([[5], [90]]).int(), torch.tensor([[0, 0], [1, 2]]).int()
    >>> schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 2)
    >>> weights = torch.ones(2, 32)
    >>> deep_gemm.fp8_fp4_paged_mqa_logits((q, None), pages, weights, lengths, table, schedule, 128).shape
    torch.Size([2, 128])
    """
    q = _without_scales(q)
    return _paged(
        q,
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        logits_dtype,
        indices,
    )


def _paged(
    q: Any,
    kv_cache: Any,
    weights: Any,
    context_lens: Any,
    block_table: Any,
    schedule_meta: Any,
    max_context_len: Any,
    clean: Any,
    logits_dtype: Any,
    indices: Any,
) -> Tensor:
    if indices is not None or isinstance(clean, Tensor):
        raise UnsupportedError("indices must be None: requests of varying numbers of tokens need a GPU after Hopper.")
    if clean is not None and (not isinstance(clean, (bool, int)) or clean):
        raise InvalidInputError(
            f"clean_logits must be False: columns at and past a row's length are undefined, but it "
            f"is {checks.shown(clean)}."
        )
    max_context_len = checks.check_index(
        "max_context_len", max_context_len, 0, checks.MAX_SIZE, "the width of the result, an integer from 0"
    )
    logits.check_logits_dtype(logits_dtype)
    checks.check_tensor("q", q, (4,))
    q, weights = logits.whole_heads(q, weights)
    out = logits.empty_logits(q.shape[0] * q.shape[1], max_context_len, logits_dtype, q.device)
    paged_logits.paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, out)
    return out


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: None = None) -> Tensor:
    """How the work of `fp8_paged_mqa_logits` is shared out among ``num_sms`` CTAs.

    A request's keys, as many as its last token attends, are cut into splits of 256, and all splits are put in order.
    Each CTA has total // num_sms of them, the last total % num_sms CTAs one more.

    Args:
        context_lens: int32 (B, next_n) or (B), contiguous.
        block_kv: keys of a page: 32 or 64. It does not change the result.
        indices: must be None on Hopper.

    Returns:
        int32 (num_sms + 1, 2). Row s is the request and the split in it that CTA s begins with. The last row is (B, 0).

    >>> deep_gemm.get_paged_mqa_logits_metadata(torch.tensor([[5], [90]]).int(), 64, num_sms=2).tolist()
    [[0, 0], [1, 0], [2, 0]]
    """
    if indices is not None:
        raise UnsupportedError("indices must be None: requests of varying numbers of tokens need a GPU after Hopper.")
    known = f"one of {', '.join(map(str, paged_logits.PAGE_KEYS))}"
    if checks.check_index("block_kv", block_kv, 1, checks.MAX_SIZE, known) not in paged_logits.PAGE_KEYS:
        raise UnsupportedError(f"block_kv must be {known}, but it is {block_kv}.")
    num_sms = checks.check_index("num_sms", num_sms, 1, MOST_CTAS, f"a positive number of CTAs, {MOST_CTAS} at most")
    checks.check_tensor("context_lens", context_lens, (1, 2))
    out = torch.empty((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)
    paged_logits.metadata(context_lens, out)
    return out


def _without_scales(q: Any) -> Any:
    """The tensor of a pair (q, None)."""
    if not isinstance(q, (tuple, list)):
        return q
    if len(q) != 2:
        raise InvalidInputError(f"q must be a tensor or a pair of it and None, but it has {len(q)} elements.")
    if q[1] is not None:
        raise UnsupportedError("q must have no scales: FP4 queries need a GPU after Hopper. Pass E4M3 and None.")
    return q[0]


def fp8_gemm_nt_skip_head_mid(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    head_splits: tuple[int, int, int],
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """`fp8_gemm_nt` into heads that have columns more in the middle, which stay as they are.

    Args:
        a, b: as for `fp8_gemm_nt`, with scales of 1 x 128 and 128 x 128. N is a multiple of left + right.
        d: (M, N + N / (left + right) * mid) bfloat16, row-major, with any row stride. Of each left + mid + right
            columns the first ``left`` and the last ``right`` are written, with the product's left + right.
        head_splits: (left, mid, right), such as (128, 64, 128). Where left and right are multiples of 64, and rows and
            mid of 16 bytes, TMA stores d; otherwise each element is stored alone, which is slower.
        recipe: None or (1, 128, 128).
        compiled_dims, disable_ue8m0_cast: as for `fp8_gemm_nt`.

    Raises:
        InvalidInputError, UnsupportedError, NotWarmError, CompileError, DriverError: as `fp8_gemm_nt`.

    >>> a, b = deep_gemm.quantize.rows(torch.ones(8, 256)), deep_gemm.quantize.blocks(torch.ones(32, 256))
    >>> deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, torch.empty(8, 48).bfloat16(), head_splits=(8, 8, 8))
    """
    skip_head_mid.fp8(a, b, d, head_splits, recipe, compiled_dims, disable_ue8m0_cast)
