"""TF32 products of bf16 rows with a few float32 rows, and the rows' sums of squares: checks, launch and reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deep_gemm.ops.reference import plain_arithmetic
from deep_gemm.runtime.calls import KernelOperation, LaunchSequence, Parameter, Step, make_entry

from .. import options
from ..errors import InvalidInputError, UnsupportedError
from ..records import record
from ..spec import PrenormSpec
from . import checks, layouts
from .checks import shape_of

BLOCK_K, MOST_COLUMNS = PrenormSpec.BLOCK_K, PrenormSpec.MOST_N


@record(frozen=True, eq=False)
class PrenormOperands:
    """Checked operands; d (splits, M, N) and sqr_sum (splits, M)."""

    tensors: Mapping[str, Tensor]
    device: torch.device
    spec: PrenormSpec

    @property
    def flops(self) -> int:
        """Of the product."""
        return 2 * self.spec.m * self.spec.n * self.spec.k


class HcPrenormGemm(KernelOperation):
    """See `deep_gemm.tf32_hc_prenorm_gemm`."""

    name = "tf32_hc_prenorm_gemm"
    parameters = (
        *(Parameter(name, "Tensor") for name in ("a", "b", "d", "sqr_sum")),
        Parameter("num_splits", "int | None", None),
    )
    operands: Mapping[str, str] = MappingProxyType({name: name for name in ("a", "b", "d", "sqr_sum")})
    output = "d"
    outputs = ("d", "sqr_sum")

    def check(self, *arguments: Any, **named_arguments: Any) -> PrenormOperands | None:
        """None for fake tensors and where there is nothing to compute."""
        *tensors, splits = self.given(arguments, named_arguments).values()
        named = dict(zip(self.operands, tensors, strict=True))
        if splits is not None:
            splits = checks.check_index("num_splits", splits, 1, checks.MAX_SIZE, "None or a positive number")
        split = splits is not None
        ranks = {"d": (2 + split,), "sqr_sum": (1 + split,)}
        device = checks.check_tensors(self.name, named, ranks, (2,), self.outputs)
        a, b, d, squares = tensors
        (m, k), n = a.shape, b.shape[0]
        front = (splits,) if split else ()
        wanted = {
            "a": (torch.bfloat16, (m, k)),
            "b": (torch.float32, (n, k)),
            "d": (torch.float32, (*front, m, n)),
            "sqr_sum": (torch.float32, (*front, m)),
        }
        for name, (dtype, shape) in wanted.items():
            x = named[name]
            if x.dtype != dtype or tuple(x.shape) != shape:
                from .. import advice  # here, since first calls that are right shall import little

                raise InvalidInputError(
                    f"{name} must be {dtype} {shape} for a {shape_of(a)}, b {shape_of(b)} and num_splits = {splits}, "
                    f"but it is {x.dtype} {shape_of(x)}.{advice.of_kind(name, x, dtype, shape)}"
                )
        if n % 8 or not 0 < n <= MOST_COLUMNS or k % BLOCK_K:
            raise UnsupportedError(
                f"b must have 8, 16, 24 or {MOST_COLUMNS} rows, and K must be a multiple of {BLOCK_K}, but it is "
                f"{shape_of(b)}. Pad both with zeros."
            )
        if checks.is_fake(tensors):
            return None
        for name in ("a", "b"):
            _check_rows(name, named[name])
        whole = {"d": d if split else d[None], "sqr_sum": squares if split else squares[None]}
        for name, x in whole.items():
            _check_written(name, x, {other: y for other, y in named.items() if other != name})
        if m == 0:
            return None
        if k == 0:
            with torch.inference_mode():  # outputs may be inference tensors
                d.zero_()
                squares.zero_()
            return None
        spec = PrenormSpec(m, n, k, splits or 1, batch_invariant=options.get_batch_invariant())
        return PrenormOperands(named | whole, device, spec)

    def launches(self, x: PrenormOperands, device: int) -> LaunchSequence:
        """One launch."""
        whole = options.whole_gpu(device)
        spec = replace(x.spec, num_sms=options.num_sms_for(device), whole_gpu=whole)
        strides = {name: tensor.stride() for name, tensor in x.tensors.items()}
        for name in ("a", "b"):
            strides[name] = (layouts.row_stride(x.tensors[name]), 1)
        return LaunchSequence((Step(spec, strides, {name: name for name in x.tensors}),))

    def reference(self, x: PrenormOperands) -> None:
        """Each split's part of K, in float64; b rounded to TF32."""
        spec = x.spec
        with torch.inference_mode(), plain_arithmetic(x.device):  # outputs may be inference tensors
            a, b = x.tensors["a"].double(), rounded_to_tf32(x.tensors["b"]).double()
            blocks = spec.k // BLOCK_K
            for split in range(spec.splits):
                first, last = (blocks * (split + i) // spec.splits * BLOCK_K for i in range(2))
                x.tensors["d"][split].copy_(a[:, first:last] @ b[:, first:last].t())
                x.tensors["sqr_sum"][split].copy_(a[:, first:last].square().sum(1))


def rounded_to_tf32(x: Tensor) -> Tensor:
    """float32 with 10 bits of mantissa: to nearest, ties to even."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def _check_rows(name: str, x: Tensor) -> None:
    """Refuse an operand that is not K-major, or that TMA cannot address."""
    rows, columns = x.shape
    stride = x.stride(0) * x.element_size() if rows > 1 else 0
    if x.numel() and (x.stride(1) != 1 or (rows > 1 and x.stride(0) < columns)):
        raise InvalidInputError(
            f"{name} must be contiguous along K, but it is {shape_of(x)} with strides {x.stride()}. Pass .contiguous()."
        )
    if x.numel() and (x.data_ptr() % layouts.TMA_BYTES or stride % layouts.TMA_BYTES):
        raise InvalidInputError(
            f"the rows of {name} must begin at multiples of {layouts.TMA_BYTES} bytes, but it is at {x.data_ptr():#x} "
            f"with strides {x.stride()}. Pass a copy (.clone())."
        )


def _check_written(name: str, x: Tensor, others: Mapping[str, Tensor]) -> None:
    """Refuse an output whose elements overlap, or that shares memory with another operand."""
    if x.numel():
        rows = x.flatten(0, -2) if x.dim() == 3 and x.is_contiguous() else x
        for part in rows if rows.dim() == 3 else (rows,):
            checks.check_row_major(name, part)
            checks.check_no_overlap(name, part, others)


hc_prenorm_gemm = make_entry(HcPrenormGemm())
"""Arguments: a, b, d, sqr_sum, num_splits."""
