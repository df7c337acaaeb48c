"""GEMMs by torch, that is by cuBLAS. Tests and benchmarks compare with them, and they are a fallback for GPUs without
kernels of ours (DG_FALLBACK=cublaslt)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from deep_gemm.ops.reference import b16_gemm_reference, batched_reference, dequantised, plain_arithmetic
from deep_gemm.runtime import operators
from deep_gemm.runtime.calls import KernelOperation, Parameter

from ..errors import InvalidInputError, UnsupportedError
from ..parts import Parts
from ..spec import Scaling
from ..tensors import refuse_unwritten
from . import checks, layouts
from .checks import shape_of

HALF = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class CublasGemm(KernelOperation):
    """See `deep_gemm.cublaslt_gemm_nt`. It is an operation for its operator: torch launches it."""

    name = "cublaslt_gemm_nt"
    parameters = (
        *(Parameter(name, "Tensor") for name in "abd"),
        Parameter("c", "Tensor | None", None),
        layouts.form(),
    )
    operands: Mapping[str, str] = MappingProxyType({name: name for name in "abd"})
    output = "d"

    def axes(self, form: str | None) -> Mapping[str, str]:
        """See `KernelOperation.axes`."""
        return layouts.axes(form)

    def check(self, *arguments: Any, **named_arguments: Any) -> None:
        """Refuse wrong operands."""
        _checked(**self.given(arguments, named_arguments))

    def launches(self, x: Any, device: int) -> NoReturn:
        """There is none."""
        raise NotImplementedError(f"torch launches {self.name}")

    def reference(self, x: Any) -> NoReturn:
        """There is none: on the CPU it is the reference."""
        raise NotImplementedError(f"torch computes {self.name}")


def gemm(a: Any, b: Any, d: Any, c: Any, form: str) -> None:
    """``d = (c +) a @ b^T``; ``form`` says how a and b are given. See `deep_gemm.cublaslt_gemm_nt`."""
    if torch.compiler.is_dynamo_compiling() or operators.is_recorded((a, b, d, c)):
        operators.record(_OPERATION, (a, b, d, c, form))
        return
    a, b, device = _checked(**_OPERATION[0].given((a, b, d, c, form), {}))
    if checks.is_fake((a, b, d, c)) or d.numel() == 0:
        refuse_unwritten({"d": d}, (a, b, c))
        return
    if device.type == "cpu":
        b16_gemm_reference(a, b, d, c)
        return
    try:
        with plain_arithmetic(device):
            _multiply(a, b.t(), d, c)
    except (RuntimeError, TypeError) as error:  # TypeError: this torch has no `out_dtype`
        text = " ".join(str(error).split())[:300]
        raise UnsupportedError(
            f"torch {torch.__version__} cannot multiply {a.dtype} {shape_of(a)} and {shape_of(b)} into {d.dtype}: "
            f"{text}"
        ) from error


_OPERATION = (CublasGemm(),)
operators.announce(_OPERATION, gemm)


def _checked(a: Any, b: Any, d: Any, c: Any, form: str) -> tuple[Tensor, Tensor, torch.device]:
    """a as (M, K), b as (N, K), and the device of all."""
    named = {"a": a, "b": b, "d": d} | ({} if c is None else {"c": c})
    device = checks.check_tensors(f"cublaslt_gemm_{form}", named, {}, (2,))
    a, b = a.t() if form[0] == "t" else a, b.t() if form[1] == "n" else b
    _check(a, b, d, c)
    if not checks.is_fake(named.values()) and not checks.has_own_elements(d):
        raise InvalidInputError(
            f"elements of d must not share memory, but d is {shape_of(d)} with strides {d.stride()}. Pass a contiguous "
            "d."
        )
    return a, b, device


def _check(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None) -> None:
    if (a.dtype not in HALF or b.dtype != a.dtype) and not (a.dtype in FP8 and b.dtype in FP8):
        raise InvalidInputError(
            "a and b must both be torch.bfloat16, both torch.float16 or both FP8, but they are "
            f"{a.dtype} and {b.dtype}."
        )
    if a.shape[1] != b.shape[1]:
        raise InvalidInputError(
            f"a and b must agree in K, but as M x K and N x K they are {shape_of(a)}, {shape_of(b)}."
        )
    shape = (a.shape[0], b.shape[0])
    if tuple(d.shape) != shape:
        raise InvalidInputError(f"d must have the shape {shape}, but it has {shape_of(d)}.")
    if c is not None and (c.dtype, c.shape) != (d.dtype, d.shape):
        raise InvalidInputError(f"c must be as d is, {d.dtype} {shape_of(d)}, but it is {c.dtype} {shape_of(c)}.")


def _multiply(a: Tensor, b_t: Tensor, d: Tensor, c: Tensor | None) -> None:
    if a.dtype in FP8:
        one = torch.ones((), device=a.device)
        wide = d.dtype if c is None else torch.float32
        product = torch._scaled_mm(a, b_t, scale_a=one, scale_b=one, out_dtype=wide)
        d.copy_(product if c is None else product.add_(c))
    elif a.dtype != d.dtype:
        product = torch.mm(a, b_t, out_dtype=d.dtype)
        d.copy_(product if c is None else product.add_(c))
    elif c is None:
        torch.mm(a, b_t, out=d)
    else:
        torch.addmm(c, a, b_t, out=d)


def half_by_cublaslt(x: Any) -> None:
    """A 16-bit product: d = (c +) a @ b^T. Raises UnsupportedError where torch cannot do it."""
    _refuse_epilogue(x.epilogue)
    gemm(x.tensors["a"], x.tensors["b"], x.tensors["d"], x.tensors.get("c"), "nt")


def batched_by_cublaslt(x: Any) -> None:
    """A batch of products: of 16-bit operands, or as `fp8_by_cublaslt` computes one. Raises UnsupportedError where
    torch cannot do it."""
    a, b, d = (x.tensors[name] for name in "abd")
    if a.dtype in FP8:
        with torch.inference_mode():
            a, b = (
                torch.stack([widened(*each, kind) for each in zip(values, x.tensors[name], strict=True)])
                for values, name, kind in zip((a, b), ("sfa", "sfb"), x.scaling, strict=True)
            )
    if d.dtype != a.dtype:
        raise UnsupportedError(f"d is {d.dtype}, and torch multiplies batches of {a.dtype} into {a.dtype}.")
    with plain_arithmetic(a.device):
        if a.device.type == "cpu":
            batched_reference(a, b, d)
        else:
            d.copy_(torch.bmm(a, b.transpose(1, 2)))


def summed_by_cublaslt(x: Any) -> None:
    """A sum of 16-bit products, as one product of copies of a and b."""
    with plain_arithmetic(x.device):
        a, b = (x.tensors[name].transpose(0, 1).flatten(1) for name in "ab")
    gemm(a, b, x.tensors["d"], x.tensors.get("c"), "nt")


def fp8_by_cublaslt(x: Any) -> None:
    """A product of scaled FP8 operands, computed in bfloat16. Dequantised values and the result are rounded to 8 bits,
    a relative error of at most 2^-8. The dequantised operands need up to six bytes per element while it runs. Raises
    UnsupportedError where torch cannot do it."""
    tensors = x.tensors
    _refuse_epilogue(x.epilogue)
    if tensors["d"].dtype == torch.float16:
        raise UnsupportedError("d is torch.float16, and torch multiplies bfloat16 into bfloat16 or float32.")
    with torch.inference_mode():
        left, right = (
            widened(tensors[name], tensors["sf" + name], kind) for name, kind in zip("ab", x.scaling, strict=True)
        )
        gemm(left, right, tensors["d"], tensors.get("c"), "nt")


def widened(values: Tensor, sf: Tensor, kind: Scaling) -> Tensor:
    """The values of an operand with its scales, in bfloat16."""
    return dequantised(values, sf, kind, torch.float32).bfloat16()


def _refuse_epilogue(epilogue: Parts) -> None:
    if epilogue:
        raise UnsupportedError(f"cuBLAS through torch has no epilogue {epilogue}.")
