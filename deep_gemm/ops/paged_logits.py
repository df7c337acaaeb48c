"""Indexer logits of decoding, over pages of keys, and their schedule: checks, launches and references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from ..errors import InvalidInputError, UnsupportedError
from ..records import record
from ..runtime.operation import Fault
from ..spec import LogitsScheduleSpec, PagedLogitsSpec, ceil_div
from . import checks, device_values
from .checks import shape_of
from .layouts import TMA_BYTES
from .logits import OUTPUTS, check_aligned, check_dense, check_out, check_queries, check_weights, chunks

SCALE_BYTES = 4
PAGE_KEYS = (32, 64)
SPLIT_KEYS = 256
"""Keys of a request that one CTA computes at least."""


@record(frozen=True, eq=False)
class PagedLogitsOperands:
    """Checked operands."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: PagedLogitsSpec


class PagedMqaLogits(KernelOperation):
    """See `deep_gemm.fp8_paged_mqa_logits`."""

    name = "fp8_paged_mqa_logits"
    parameters = tuple(
        Parameter(name, "Tensor")
        for name in ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "out")
    )
    operands: Mapping[str, str] = MappingProxyType(
        {
            "q": "q",
            "cache": "kv_cache",
            "weights": "weights",
            "lengths": "context_lens",
            "table": "block_table",
            "schedule": "schedule_meta",
            "out": "out",
        }
    )
    output = "out"
    kept = ("out",)  # columns that are no key's
    settings = ("check",)

    def check(self, *arguments: Any, **named_arguments: Any) -> PagedLogitsOperands | None:
        """None for fake tensors and where there is nothing to compute."""
        named = self.given(arguments, named_arguments)
        q, cache, weights, lengths, table, schedule, out = named.values()
        ranks = dict(zip(named, ((4,), (4,), (2,), (1, 2), (2,), (2,), (2,)), strict=True))
        device = checks.check_tensors(self.name, named, ranks, written=("out",))
        rows, heads, dim = check_queries(q)
        batch, next_n = q.shape[:2]
        pages, page_keys = check_cache(cache, dim)
        check_weights(weights, (rows, heads))
        if lengths.dim() == 2 or lengths.shape != (batch,):
            check_dense("context_lens", lengths, torch.int32, (batch, next_n), "the length of each token")
        else:
            check_dense("context_lens", lengths, torch.int32, (batch,), "the length of each request")
        if table.dtype != torch.int32 or table.shape[0] != batch or (table.shape[1] > 1 and table.stride(1) != 1):
            raise InvalidInputError(
                f"block_table must be torch.int32 ({batch}, blocks), contiguous along blocks: the pages of each "
                f"request, but it is {table.dtype} {shape_of(table)} with strides {table.stride()}. Pass "
                ".to(torch.int32).contiguous() of such a table."
            )
        if schedule.shape[0] < 2:
            raise InvalidInputError(
                f"schedule_meta must have a row for each CTA and one more, not {shape_of(schedule)}. Pass what "
                "get_paged_mqa_logits_metadata returns."
            )
        check_dense("schedule_meta", schedule, torch.int32, (schedule.shape[0], 2), "of get_paged_mqa_logits_metadata")
        check_out(named, (rows, out.shape[1]), "a row for each token")
        if checks.is_fake(named.values()) or not out.numel() or not cache.numel() or not table.numel():
            return None
        for name in ("q", "kv_cache", "out"):
            checks.check_sizes(name, named[name])
        for name in ("q", "kv_cache"):
            check_aligned(name, named[name])
        spec = PagedLogitsSpec(
            batch,
            next_n,
            heads,
            dim,
            page_keys,
            pages,
            table.shape[1],
            schedule.shape[0] - 1,
            out.shape[1],
            OUTPUTS[out.dtype],
            lengths.dim() == 2,
        )
        return PagedLogitsOperands(dict(zip(self.operands, named.values(), strict=True)), device, spec)

    def launches(self, x: PagedLogitsOperands, device: int) -> LaunchSequence:
        """One launch."""
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        return LaunchSequence((Step(x.spec, strides, {name: name for name in x.tensors}),))

    def faults(self, x: PagedLogitsOperands) -> Sequence[Fault]:
        """Lengths, pages and the schedule."""
        t, spec = x.tensors, x.spec
        last = t["lengths"].view(spec.batch, -1)[:, -1]
        return [
            *device_values.pages(t["lengths"], t["table"], spec.pages, spec.page_keys, spec.columns),
            *device_values.schedule(t["schedule"], last, SPLIT_KEYS),
        ]

    def reference(self, x: PagedLogitsOperands) -> None:
        """Each request's keys, gathered from its pages; sums of heads in float64."""
        t, spec = x.tensors, x.spec
        with torch.inference_mode():
            for request in range(spec.batch):
                lengths = t["lengths"][request].expand(spec.next_n).tolist()
                for token, given in enumerate(lengths):
                    length = min(given, spec.columns, spec.table_width * spec.page_keys)
                    row = request * spec.next_n + token
                    if length > 0:
                        blocks = t["table"][request, : ceil_div(length, spec.page_keys)].long()
                        keys, scales = pages_of(t["cache"], blocks)
                        q, weights = t["q"][request, token][None], t["weights"][row][None]
                        for _, logits in chunks(q, keys[:length], scales[:length], weights):
                            t["out"][row, :length] = logits[0].to(t["out"].dtype)


def pages_of(cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (n, D) and scales (n) of pages of a cache (pages, page_keys, 1, D + 4)."""
    page_keys, dim = cache.shape[1], cache.shape[3] - SCALE_BYTES
    found = cache[blocks].flatten(1)
    keys = found[:, : page_keys * dim].reshape(-1, dim).view(torch.float8_e4m3fn)
    return keys, found[:, page_keys * dim :].contiguous().view(torch.float32).flatten()


def check_cache(cache: Tensor, dim: int) -> tuple[int, int]:
    """The number of pages of a cache, and keys of a page."""
    pages, page_keys, one, width = cache.shape
    if cache.dtype != torch.uint8 or one != 1 or width != dim + SCALE_BYTES:
        raise InvalidInputError(
            f"kv_cache must be torch.uint8 (blocks, block_kv, 1, {dim + SCALE_BYTES}): the bytes of {dim} values and a "
            f"scale for each key, but it is {cache.dtype} {shape_of(cache)}."
        )
    if page_keys not in PAGE_KEYS:
        raise UnsupportedError(
            f"kv_cache must have blocks of {', '.join(map(str, PAGE_KEYS))} keys, but they have {page_keys}."
        )
    stride = cache.stride(0) if pages > 1 else page_keys * width
    if cache.stride(1) != width or cache.stride(3) != 1 or stride < page_keys * width or stride % TMA_BYTES:
        raise InvalidInputError(
            f"kv_cache must have contiguous blocks that begin at multiples of {TMA_BYTES} bytes, but it is "
            f"{shape_of(cache)} with strides {cache.stride()}."
        )
    return pages, page_keys


@record(frozen=True, eq=False)
class ScheduleOperands:
    """Checked operands."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: LogitsScheduleSpec


class PagedMqaLogitsMetadata(KernelOperation):
    """See `deep_gemm.get_paged_mqa_logits_metadata`."""

    name = "get_paged_mqa_logits_metadata"
    parameters = (Parameter("context_lens", "Tensor"), Parameter("out", "Tensor"))
    operands: Mapping[str, str] = MappingProxyType({"lengths": "context_lens", "schedule": "out"})
    output = "schedule"

    def check(self, *arguments: Any, **named_arguments: Any) -> ScheduleOperands | None:
        """None for fake tensors. A batch without requests has no memory: its schedule is all zeros."""
        named = self.given(arguments, named_arguments)
        lengths, out = named.values()
        device = checks.check_tensors(self.name, named, {"context_lens": (1, 2), "out": (2,)}, written=("out",))
        if lengths.dtype != torch.int32 or not lengths.is_contiguous():
            raise InvalidInputError(
                f"context_lens must be torch.int32 and contiguous, but it is {lengths.dtype} with strides "
                f"{lengths.stride()}. Pass .to(torch.int32).contiguous()."
            )
        if out.shape[0] < 2:
            raise InvalidInputError(f"out must have a row for each CTA and one more, not {shape_of(out)}.")
        check_dense("out", out, torch.int32, (out.shape[0], 2), "where each CTA begins")
        if checks.is_fake(named.values()):
            return None
        checks.check_no_overlap("out", out, {"context_lens": lengths})
        if not lengths.numel():
            out.zero_()
            return None
        last = lengths.shape[1] - 1 if lengths.dim() == 2 else 0
        spec = LogitsScheduleSpec(lengths.shape[0], out.shape[0] - 1, last)
        return ScheduleOperands({"lengths": lengths, "schedule": out}, device, spec)

    def launches(self, x: ScheduleOperands, device: int) -> LaunchSequence:
        """One launch."""
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        return LaunchSequence((Step(x.spec, strides, {name: name for name in x.tensors}),))

    def reference(self, x: ScheduleOperands) -> None:
        """The same table with torch."""
        lengths, out, slots = x.tensors["lengths"], x.tensors["schedule"], x.spec.slots
        last = lengths.view(x.spec.batch, -1)[:, -1].long().clamp(min=0)
        ends = torch.cumsum((last + SPLIT_KEYS - 1) // SPLIT_KEYS, 0)
        total = int(ends[-1])
        slot = torch.arange(slots + 1, device=out.device)
        begins = slot * (total // slots) + (slot - (slots - total % slots)).clamp(min=0)
        requests = torch.searchsorted(ends, begins, right=True)
        before = torch.cat([ends.new_zeros(1), ends])[requests]
        out.copy_(torch.stack([requests, begins - before], 1))


paged_mqa_logits = make_entry(PagedMqaLogits())
"""Arguments: q, kv_cache, weights, context_lens, block_table, schedule_meta, out."""
metadata = make_entry(PagedMqaLogitsMetadata())
"""Arguments: context_lens, out."""
