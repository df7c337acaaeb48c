"""Indexer logits of sparse attention over one matrix of keys: checks, launch and reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import CHUNK_ELEMENTS, plain_arithmetic
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from .. import options
from ..errors import InvalidInputError, UnsupportedError
from ..kernels.logits import DIMS, HEADS
from ..records import record
from ..spec import Dtype, LogitsSpec, align
from . import checks
from .checks import shape_of
from .layouts import TMA_BYTES

OUTPUTS: dict[torch.dtype, Dtype] = {torch.float32: "f32", torch.bfloat16: "bf16"}

PADDED_HEADS = 16
"""Heads that public functions take, and kernels do not."""

ROW_BYTES = 1024
"""Alignment of a result's rows: callers' top-k kernels read wide words, and rely on it."""


@record(frozen=True, eq=False)
class LogitsOperands:
    """Checked operands."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: LogitsSpec

    @property
    def flops(self) -> int:
        """At most: for queries that attend all keys."""
        return self.spec.flops


class MqaLogits(KernelOperation):
    """See `deep_gemm.fp8_mqa_logits`. ``columns`` is 0 for a column for each key."""

    name = "fp8_mqa_logits"
    parameters = (
        Parameter("q", "Tensor"),
        Parameter("kv", "tuple[Tensor, Tensor]"),
        *(Parameter(name, "Tensor") for name in ("weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "out")),
        Parameter("clean_logits", "bool"),
        Parameter("columns", "int"),
    )
    operands: Mapping[str, str] = MappingProxyType(
        {
            "q": "q",
            "keys": "kv[0]",
            "scales": "kv[1]",
            "weights": "weights",
            "starts": "cu_seq_len_k_start",
            "ends": "cu_seq_len_k_end",
            "out": "out",
        }
    )
    output = "out"
    kept = ("out",)  # columns that are no key's

    def check(self, *arguments: Any, **named_arguments: Any) -> LogitsOperands | None:
        """None for fake tensors and where there is nothing to compute."""
        q, kv, weights, starts, ends, out, clean, columns = self.given(arguments, named_arguments).values()
        keys, scales = checks.pair("kv", kv, KEYS)
        named = {
            "q": q,
            "kv[0]": keys,
            "kv[1]": scales,
            "weights": weights,
            "cu_seq_len_k_start": starts,
            "cu_seq_len_k_end": ends,
            "out": out,
        }
        ranks = dict(zip(named, ((3,), (2,), (1,), (2,), (1,), (1,), (2,)), strict=True))
        device = checks.check_tensors(self.name, named, ranks, written=("out",))
        rows, heads, dim = check_queries(q)
        check_dense("kv[0]", keys, torch.float8_e4m3fn, (keys.shape[0], dim), "keys (N, D), as wide as q's heads")
        check_dense("kv[1]", scales, torch.float32, (keys.shape[0],), "a scale for each key")
        check_weights(weights, (rows, heads))
        for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"):
            check_dense(name, named[name], torch.int32, (rows,), "a key's number for each query")
        checks.check_bool("clean_logits", clean)
        if clean and columns:
            raise InvalidInputError(
                "clean_logits must be False with max_seqlen_k: columns past a query's range are undefined."
            )
        check_out(named, (rows, columns or keys.shape[0]), "a row for each query, a column for each key")
        if checks.is_fake(named.values()) or not out.numel() or not keys.shape[0]:
            return None
        for name in ("q", "kv[0]", "out"):
            checks.check_sizes(name, named[name])
        for name in ("q", "kv[0]"):
            check_aligned(name, named[name])
        spec = LogitsSpec(rows, keys.shape[0], heads, dim, out.shape[1], columns > 0, clean, OUTPUTS[out.dtype])
        return LogitsOperands(dict(zip(self.operands, named.values(), strict=True)), device, spec)

    def launches(self, x: LogitsOperands, device: int) -> LaunchSequence:
        """One launch."""
        whole = options.whole_gpu(device)
        spec = replace(x.spec, num_sms=options.num_sms_for(device), whole_gpu=whole)
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        return LaunchSequence((Step(spec, strides, {name: name for name in x.tensors}),))

    def reference(self, x: LogitsOperands) -> None:
        """Sums of heads in float64."""
        t, spec = x.tensors, x.spec
        with torch.inference_mode():
            positions = torch.arange(spec.keys, device=x.device)
            for rows, logits in chunks(t["q"], t["keys"], t["scales"], t["weights"]):
                start = t["starts"][rows].long().clamp(min=0)[:, None]
                end = t["ends"][rows].long().clamp(max=spec.keys)[:, None]
                attended = (positions >= start) & (positions < end)
                out = t["out"][rows]
                if not spec.compressed:
                    out.copy_(
                        torch.where(attended, logits, -torch.inf) if spec.clean else torch.where(attended, logits, out)
                    )
                    continue
                columns = torch.arange(spec.columns, device=x.device) + start
                known = columns < end
                found = logits.gather(1, columns.clamp(max=spec.keys - 1))
                out.copy_(torch.where(known, found.to(out.dtype), out))


KEYS = "Pass keys, E4M3 (N, D), and their scales, float32 (N)."


def chunks(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits (rows, N) in float64 of all keys, for some rows at a time. q (M, H, D), keys (N, D)."""
    _, heads, dim = q.shape
    step = max(1, CHUNK_ELEMENTS // max(1, heads * max(dim, keys.shape[0])))
    with plain_arithmetic(q.device):
        k = keys.double().t()
        for first in range(0, q.shape[0], step):
            rows = slice(first, first + step)
            scores = (q[rows].double().reshape(-1, dim) @ k).view(-1, heads, keys.shape[0]).clamp_(min=0)
            yield rows, (scores * weights[rows].double()[:, :, None]).sum(1) * scales.double()


def whole_heads(q: Tensor, weights: Any) -> tuple[Tensor, Any]:
    """q (..., H, D) and weights (rows, H) for kernels: 16 heads become 32, of which the second half is the first again,
    with the weight 0."""
    if q.shape[-2] != PADDED_HEADS or q.dtype != torch.float8_e4m3fn:
        return q, weights
    checks.check_tensor("weights", weights, (2,))
    check_weights(weights, (q.numel() // (PADDED_HEADS * max(1, q.shape[-1])), PADDED_HEADS))
    if weights.device != q.device:
        return q, weights  # the operation says where each tensor is
    values = q.view(torch.uint8)
    with torch.no_grad():  # nothing is recorded for autograd
        both = torch.cat((values, values), -2).view(q.dtype)
        return both, torch.cat((weights, torch.zeros_like(weights)), 1)


def check_queries(q: Tensor) -> tuple[int, int, int]:
    """Rows, heads and size of heads of q (..., H, D)."""
    *_, heads, dim = q.shape
    if q.dtype != torch.float8_e4m3fn:
        packed = " Packed FP4 needs a GPU after Hopper." if q.dtype in (torch.int8, torch.uint8) else ""
        kind = UnsupportedError if packed else InvalidInputError
        cast = packed or " Cast it, and multiply weights by its scales: per_token_cast_to_fp8 returns both."
        raise kind(f"q must be torch.float8_e4m3fn, but it is {q.dtype}.{cast}")
    if heads == PADDED_HEADS and dim in DIMS:  # an operator is the kernel's
        raise UnsupportedError(
            f"q must have {' or '.join(map(str, sorted(HEADS)))} heads, but it is {shape_of(q)}. Append heads whose "
            "weights are 0, as deep_gemm.fp8_mqa_logits does."
        )
    if heads not in HEADS or dim not in DIMS:
        raise UnsupportedError(
            f"q must have {PADDED_HEADS}, {' or '.join(map(str, sorted(HEADS)))} heads of "
            f"{', '.join(map(str, sorted(DIMS)))} elements "
            f"on Hopper, but it is {shape_of(q)}. With fewer heads, append heads whose weights are 0."
        )
    if not q.is_contiguous():
        raise InvalidInputError(f"q must be contiguous, but it has the strides {q.stride()}. Pass q.contiguous().")
    return q.numel() // (heads * dim), heads, dim


def check_dense(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> None:
    """Refuse a tensor of another dtype or shape, or one that is not contiguous."""
    if x.dtype != dtype or tuple(x.shape) != shape:
        from .. import advice  # here, since first calls that are right shall import little

        instead = advice.of_kind(name, x, dtype, shape)
        raise InvalidInputError(f"{name} must be {dtype} {shape}: {what}, but it is {x.dtype} {shape_of(x)}.{instead}")
    if not x.is_contiguous():
        raise InvalidInputError(f"{name} must be contiguous, but it has the strides {x.stride()}. Pass .contiguous().")


def check_weights(weights: Tensor, shape: tuple[int, int]) -> None:
    """Refuse weights that are not a float32 row for each row of q."""
    if weights.dtype != torch.float32 or tuple(weights.shape) != shape:
        from .. import advice

        raise InvalidInputError(
            f"weights must be torch.float32 {shape}: a weight for each query's head, but they are {weights.dtype} "
            f"{shape_of(weights)}.{advice.of_kind('weights', weights, torch.float32, shape)}"
        )
    if weights.shape[1] > 1 and weights.stride(1) != 1:
        raise InvalidInputError(
            f"weights must be contiguous along heads, but they have the strides {weights.stride()}. Pass "
            "weights.contiguous()."
        )


def check_out(named: Mapping[str, Tensor], shape: tuple[int, int], what: str) -> None:
    """Refuse a result of another dtype, shape or layout, or one that shares memory with an operand. Its rows begin at
    multiples of 16 bytes, since kernels write so much at once."""
    out = named["out"]
    if out.dtype not in OUTPUTS or tuple(out.shape) != shape:
        known = " or ".join(map(str, OUTPUTS))
        raise InvalidInputError(f"out must be {known} {shape}: {what}, but it is {out.dtype} {shape_of(out)}.")
    if checks.is_fake(named.values()) or not out.numel():
        return
    checks.check_row_major("out", out)
    checks.check_no_overlap("out", out, {name: x for name, x in named.items() if name != "out"})
    check_aligned("out", out)
    if out.shape[0] > 1 and out.stride(0) * out.element_size() % TMA_BYTES:
        raise InvalidInputError(
            f"rows of out must begin at multiples of {TMA_BYTES} bytes, but its strides are {out.stride()}. Allocate "
            "them with padding."
        )


def check_aligned(name: str, x: Tensor) -> None:
    """Refuse tensors that TMA cannot address."""
    if x.numel() and x.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"{name} must begin at a multiple of {TMA_BYTES} bytes, but it is at {x.data_ptr():#x}. Pass a copy "
            "(.clone()), or slice at other rows."
        )


def check_logits_dtype(logits_dtype: Any) -> None:
    """Refuse results that are not float32 or bfloat16."""
    if not isinstance(logits_dtype, torch.dtype) or logits_dtype not in OUTPUTS:
        known = " or ".join(map(str, OUTPUTS))
        raise InvalidInputError(f"logits_dtype must be {known}, but it is {checks.shown(logits_dtype)}.")


def empty_logits(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A result whose rows begin at multiples of 1024 bytes. The rows are whole, so that wide reads of the last one
    stay inside."""
    width = align(max(columns, 1), ROW_BYTES // dtype.itemsize)
    return torch.empty((rows, width), dtype=dtype, device=device)[:, :columns]


mqa_logits = make_entry(MqaLogits())
"""Arguments: q, kv, weights, starts, ends, out, clean_logits, columns."""
