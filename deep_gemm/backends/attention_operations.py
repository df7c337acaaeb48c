"""Indexer logits and the prenorm product of hyper-connections, to be compared: operands, exact result, allowed error.

The bound of a logit, the sum over heads h of weights w_h times scores s_h: a score may be rounded to bfloat16, and its
128 products lose bits as those of a GEMM do (`testing.accuracy`), where R_h is the root of the sum of their squares::

    E = 4 sqrt(sum over h of w_h^2 ((2^-8 s_h)^2 + 132 (2^-13 R_h)^2)) + 2^-15 sum over h of |w_h s_h|

Errors of heads have random signs. The last term is for weights of 16 bits, and for the sum. A missing head causes an
error of about an eighth of the root of 64 heads' squares, and E is a sixtieth of that root.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import get_paged_mqa_logits_metadata
from ..ops.paged_logits import SCALE_BYTES, pages_of
from ..options import get_num_sms
from ..spec import ceil_div
from ..testing.accuracy import ACCUMULATOR_FRACTION_BITS, CUTS_PER_BLOCK, half_accumulation_bound, tolerance
from .operations import normal
from .registry import Dims, Operation, operation

E4M3 = torch.float8_e4m3fn
HEADS, DIM, PAGE = 64, 128, 64


def logits_and_bounds(q: Tensor, k: Tensor, scales: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (M, N) of all keys and E of this module's docstring, in float64, a head at a time."""
    keys, exact = k.double().t(), torch.zeros(q.shape[0], k.shape[0], dtype=torch.float64, device=q.device)
    squares, sizes = torch.zeros_like(exact), torch.zeros_like(exact)
    cut = CUTS_PER_BLOCK * 4.0**-ACCUMULATOR_FRACTION_BITS
    for head in range(q.shape[1]):
        queries, weight = q[:, head].double(), weights[:, head, None].double()
        scores = (queries @ keys).clamp_(min=0).mul_(weight)
        exact += scores
        sizes += scores.abs()
        squares += scores.square_().mul_(2.0**-16)
        squares += (queries.square() @ keys.square()).mul_(cut * weight.square())
    return exact * scales.double(), (4 * squares.sqrt_() + 2.0**-15 * sizes) * scales.double()


class LogitsOperation(Operation):
    """64 heads of 128 elements, float32 results."""

    rate = "fp8"

    def attended(self, dims: Dims) -> int:
        """Pairs of a query and a key that it attends."""
        raise NotImplementedError

    def flops(self, dims: Dims) -> int:
        return 2 * HEADS * DIM * self.attended(dims)


@operation
class MqaLogitsOperation(LogitsOperation):
    """``fp8_mqa_logits(q, (keys, scales), weights, start, end)``, cleaned. Queries are the last of the keys, and attend
    all before them."""

    name = "fp8_mqa_logits"
    dims = ("queries", "keys")
    examples = ((2048, 65536), (300, 8192))
    host_examples = ((64, 512),)

    def refuses(self, dims: Dims) -> str:
        return "" if dims[0] <= dims[1] else f"there must be as many keys as queries, but there are {dims[1]}"

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        (m, n), data = dims, normal(device, seed, torch.float32)
        kv = (data(n, DIM).to(E4M3), data(n).abs() + 0.1)
        end = torch.arange(n - m + 1, n + 1, dtype=torch.int32, device=device)
        out = torch.empty(m, n, device=device)
        return data(m, HEADS, DIM).to(E4M3), kv, data(m, HEADS), torch.zeros_like(end), end, out

    def exact(self, q: Tensor, kv: Any, weights: Tensor, start: Tensor, end: Tensor, out: Tensor) -> Tensor:
        """Minus infinity where a key is not attended."""
        found, _ = logits_and_bounds(q, kv[0], kv[1], weights)
        return found.masked_fill_(torch.arange(len(kv[0]), device=q.device) >= end[:, None], -torch.inf)

    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        q, kv, weights, *_, out = operands
        return tolerance(exact.nan_to_num(neginf=0.0), logits_and_bounds(q, kv[0], kv[1], weights)[1], out.dtype)

    def attended(self, dims: Dims) -> int:
        m, n = dims
        return m * (n - m) + m * (m + 1) // 2

    def bytes_moved(self, dims: Dims) -> int:
        """All logits, also of keys that are not attended."""
        m, n = dims
        return m * HEADS * (DIM + 4) + n * (DIM + 4) + 8 * m + 4 * m * n

    def elements(self, dims: Dims) -> int:
        return dims[0] * dims[1]


@operation
class PagedMqaLogitsOperation(LogitsOperation):
    """``fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, width)``: the last tokens
    of each request, over pages of 64 keys in random order."""

    name = "fp8_paged_mqa_logits"
    dims = ("requests", "tokens", "keys")
    examples = ((256, 1, 8192), (256, 2, 8192))
    host_examples = ((3, 2, 200),)

    def refuses(self, dims: Dims) -> str:
        return "" if dims[1] <= dims[2] else f"there must be as many keys as tokens, but there are {dims[2]}"

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        (batch, tokens, keys), data = dims, normal(device, seed, torch.float32)
        pages = ceil_div(keys, PAGE)
        cache = torch.empty(batch * pages, PAGE, 1, DIM + SCALE_BYTES, dtype=torch.uint8, device=device)
        flat = cache.view(batch * pages, -1)
        flat[:, : PAGE * DIM] = data(batch * pages, PAGE * DIM).to(E4M3).view(torch.uint8)
        flat[:, PAGE * DIM :] = (data(batch * pages, PAGE).abs() + 0.1).view(torch.uint8)
        order = data(batch * pages).argsort().view(batch, pages).int()
        lengths = torch.arange(keys - tokens + 1, keys + 1, dtype=torch.int32, device=device).repeat(batch, 1)
        schedule = get_paged_mqa_logits_metadata(lengths, PAGE, get_num_sms())
        q, weights = data(batch, tokens, HEADS, DIM).to(E4M3), data(batch * tokens, HEADS)
        return q, cache, weights, lengths, order, schedule, torch.empty(batch * tokens, keys, device=device)

    def result(self, operands: tuple[Any, ...]) -> Tensor:
        """The columns before each token's length; others are undefined."""
        lengths, out = operands[3], operands[-1]
        return self.output(operands)[torch.arange(out.shape[1], device=out.device) < lengths.reshape(-1, 1)]

    def exact(self, *operands: Any) -> Tensor:
        return self._both(operands)[0]

    def allowed(self, exact: Tensor, *operands: Any) -> Tensor:
        return tolerance(exact, self._both(operands)[1], operands[-1].dtype)

    def _both(self, operands: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        q, cache, weights, lengths, table, _, out = operands
        found = []
        for tokens, own, ends, blocks in zip(q, weights.split(q.shape[1]), lengths, table, strict=True):
            live = torch.arange(out.shape[1], device=q.device) < ends[:, None]
            k, scales = (x[: out.shape[1]] for x in pages_of(cache, blocks.long()))
            found.append([x[live] for x in logits_and_bounds(tokens, k, scales, own)])
        exact, bounds = (torch.cat(parts) for parts in zip(*found, strict=True))
        return exact, bounds

    def attended(self, dims: Dims) -> int:
        batch, tokens, keys = dims
        return batch * (tokens * keys - tokens * (tokens - 1) // 2)

    def bytes_moved(self, dims: Dims) -> int:
        """Whole pages, and all of the result."""
        batch, tokens, keys = dims
        pages, rows = batch * ceil_div(keys, PAGE), batch * tokens
        read = pages * (PAGE * (DIM + SCALE_BYTES) + 4) + rows * (HEADS * (DIM + 4) + 4)
        return read + 8 * (get_num_sms() + 1) + 4 * rows * keys

    def elements(self, dims: Dims) -> int:
        return self.attended(dims)


@operation
class PrenormOperation(Operation):
    """``tf32_hc_prenorm_gemm(a, b, d, sqr_sum)``: d (M, 24) and sqr_sum (M) lie one after the other in one operand."""

    name = "tf32_hc_prenorm_gemm"
    dims = ("M", "K")
    examples = ((4096, 7168), (137, 28672))
    host_examples = ((64, 1024),)
    rate = "half"
    COLUMNS = 24

    def refuses(self, dims: Dims) -> str:
        return "" if dims[1] % 64 == 0 else f"K must be a multiple of 64, but it is {dims[1]}"

    def make(self, dims: Dims, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
        (m, k), n = dims, self.COLUMNS
        return (
            normal(device, seed)(m, k),
            normal(device, seed, torch.float32)(n, k),
            torch.empty(m * (n + 1), device=device),
        )

    @staticmethod
    def arguments(a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of the function."""
        m, n = a.shape[0], b.shape[0]
        return a, b, out[: m * n].view(m, n), out[m * n :]

    def exact(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Of b as it is, before it is rounded or cut to TF32."""
        x = a.double()
        return torch.cat([(x @ b.double().t()).flatten(), x.square().sum(1)])

    def allowed(self, exact: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Cutting b to 10 bits makes products smaller by up to 2^-10, of random signs; squares add up in float32."""
        product, squares = exact[: len(a) * len(b)].view(len(a), len(b)), exact[len(a) * len(b) :]
        root = (a.double().square() @ b.double().square().t()).sqrt()
        bound = 2.0**-10 * (product.abs() + 4 * root) + half_accumulation_bound(a, b)
        return tolerance(exact, torch.cat([bound.flatten(), a.shape[1] * 2.0**-24 * squares]), out.dtype)

    def flops(self, dims: Dims) -> int:
        return 2 * self.COLUMNS * dims[0] * dims[1]

    def bytes_moved(self, dims: Dims) -> int:
        (m, k), n = dims, self.COLUMNS
        return 2 * m * k + 4 * n * k + 4 * m * (n + 1)

    def elements(self, dims: Dims) -> int:
        return dims[0] * (self.COLUMNS + 1)
