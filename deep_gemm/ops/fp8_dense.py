"""Dense FP8 GEMM with block scales: ``d = (a * scales of a) @ (b * scales of b)^T``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..calls import Operation, Step, Work, entry
from ..errors import InvalidInputError, UnsupportedError
from ..reference import fp8_gemm_reference
from ..spec import SCALE_BLOCK, GemmSpec, Operand, TransposeSpec, align, ceil_div
from . import checks
from .checks import TMA_BYTES, shape_of
from .cublaslt import fp8_by_cublaslt

NAME = "fp8_gemm_nt"

_A, _B = Operand("e4m3", scaling="1x128"), Operand("e4m3", scaling="128x128")

_FP4_CARRIERS = frozenset(
    dtype for name in ("int8", "uint8", "float4_e2m1fn_x2") if (dtype := getattr(torch, name, None)) is not None
)
_PACKED_SCALES = frozenset(
    dtype for name in ("int32", "uint8", "float8_e8m0fnu") if (dtype := getattr(torch, name, None)) is not None
)


def spec(
    m: int,
    n: int,
    k: int,
    num_sms: int,
    whole_gpu: bool = True,
    aligned: bool | None = None,
    compiled_dims: str = "",
) -> GemmSpec:
    """What a call asks for, under the options of this process. ``aligned`` says whether TMA can write D; None stands
    for a freshly allocated one."""
    return GemmSpec(
        m=m,
        n=n,
        k=k,
        a=_A,
        b=_B,
        # Rows of bf16 that start at multiples of 16 bytes.
        d=Operand("bf16", major="mn", aligned=n % 8 == 0 if aligned is None else aligned),
        num_sms=num_sms,
        whole_gpu=whole_gpu,
        block_multiple=options.get_block_size_multiple_of(),
        compiled_dims="" if options.ignore_compile_dims() else compiled_dims,
        batch_invariant=options.get_batch_invariant(),
    )


@dataclass(frozen=True, eq=False)
class FP8GemmOperands:
    """Checked operands. a (m, k) and b (n, k) are E4M3 and K-major; sfa is (m, ceil(k / 128)) and sfb (ceil(n / 128),
    ceil(k / 128)), both float32 of any strides; d (m, n) is bfloat16, row-major."""

    tensors: Mapping[str, Tensor]
    m: int
    n: int
    k: int
    device: torch.device
    compiled_dims: str


class FP8GemmNT(Operation):
    """See `deep_gemm.fp8_gemm_nt`."""

    name = NAME
    parameters = ("a", "b", "d", "c", "recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast")
    operands = {"a": "a[0]", "sfa": "a[1]", "b": "b[0]", "sfb": "b[1]", "d": "d"}  # noqa: RUF012
    output = "d"
    unused = ("c",)
    weights = ("b", "sfb")
    fallbacks = MappingProxyType({"cublaslt": fp8_by_cublaslt})

    def check(
        self,
        a: Any,
        b: Any,
        d: Any,
        c: Any = None,
        recipe: Any = None,
        recipe_a: Any = None,
        recipe_b: Any = None,
        compiled_dims: Any = None,
        disable_ue8m0_cast: Any = False,
    ) -> FP8GemmOperands | None:
        """None for fake tensors, of which only kinds and shapes are checked, and where there is no product to compute.

        ``disable_ue8m0_cast`` makes no difference on Hopper: float32 scales multiply as they are, powers of two or not.
        """
        _check_recipe(recipe, recipe_a, recipe_b)
        dims = checks.check_compiled_dims(compiled_dims or "")
        if not isinstance(disable_ue8m0_cast, bool):
            raise InvalidInputError(f"disable_ue8m0_cast must be True or False, but it is {disable_ue8m0_cast!r}.")
        a, sfa = checks.pair("a", a)
        b, sfb = checks.pair("b", b)
        named = {"a": a, "the scales of a": sfa, "b": b, "the scales of b": sfb, "d": d}
        for name, tensor in named.items():
            checks.check_plain(name, tensor)
        if c is not None:
            raise UnsupportedError(
                "c must be None: adding to an accumulator is not supported by this version. Add c to d after the call."
            )
        device = checks.check_devices(named)
        checks.check_output_gradient("d", d)
        m, n, k = _check_shapes(a, sfa, b, sfb, d)
        if checks.is_fake(named.values()):
            return None
        checks.check_memory(named)
        _check_alignment("a", a)
        _check_alignment("b", b)
        if d.numel():
            checks.check_row_major("d", d)
        checks.check_no_overlap("d", d, {name: tensor for name, tensor in named.items() if name != "d"})
        if m == 0 or n == 0:
            return None
        if k == 0:
            with torch.inference_mode():  # which d may have been made in
                d.zero_()
            return None
        tensors = {"a": a, "sfa": sfa, "b": b, "sfb": sfb, "d": d}
        return FP8GemmOperands(tensors, m, n, k, device, dims)

    def work(self, x: FP8GemmOperands, device: int) -> Work:
        """The GEMM, and before it the transpose of A's scales where TMA cannot read them as they lie."""
        a, sfa, b, sfb, d = x.tensors.values()
        asked = spec(
            x.m,
            x.n,
            x.k,
            num_sms=options.num_sms_for(device),
            whole_gpu=options.whole_gpu(device),
            aligned=checks.tma_writable(d),
            compiled_dims=x.compiled_dims,
        )
        operands = {name: name for name in x.tensors}
        padded, columns = align(x.m, 4), sfa.shape[1]
        ready = checks.tma_readable(sfa)
        strides = {
            "a": (checks.row_stride(a, TMA_BYTES), 1),
            "sfa": (1, sfa.stride(1) if ready and columns > 1 else padded),
            "b": (checks.row_stride(b, TMA_BYTES), 1),
            "sfb": sfb.stride(),
            "d": (checks.row_stride(d, TMA_BYTES), 1),
        }
        if ready:
            return Work((Step(asked, strides, operands),))
        transpose = Step(
            TransposeSpec(rows=x.m, columns=columns),
            {"source": (0, *sfa.stride())},
            {"source": "sfa", "target": "sfa transposed"},
        )
        gemm = Step(asked, strides, operands | {"sfa": "sfa transposed"})
        return Work((transpose, gemm), scratch={"sfa transposed": ((columns, padded), torch.float32)})

    def reference(self, x: FP8GemmOperands) -> None:
        """See `fp8_gemm_reference`."""
        fp8_gemm_reference(*x.tensors.values())


call = entry(FP8GemmNT())
"""`fp8_gemm_nt` with all its arguments by position."""


def as_nt(x: tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """An operand given transposed, with its scales, as views the other way round."""
    if not isinstance(x, (tuple, list)) or len(x) != 2 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in x):
        raise InvalidInputError(f"{name} must be a pair (tensor, scales) of tensors with 2 dimensions.")
    values, scales = x
    if values.shape[0] > 1 and values.stride(0) != 1 and values.dtype == torch.float8_e4m3fn:
        raise UnsupportedError(
            f"{name} is stored with K along its rows' outer dimension ({tuple(values.shape)}, strides "
            f"{values.stride()}), and Hopper multiplies FP8 only where K is contiguous. Store it K-major: pass "
            f"{name}.t().contiguous().t()."
        )
    return values.t(), scales.t()


def _check_recipe(recipe: Any, recipe_a: Any = None, recipe_b: Any = None) -> None:
    """Accept the 1x128 / 128x128 recipe in each of its spellings, and say what is wrong with any other."""
    if (recipe_a is None) != (recipe_b is None):
        given, missing = ("recipe_a", "recipe_b") if recipe_b is None else ("recipe_b", "recipe_a")
        raise InvalidInputError(f"{given} is given and {missing} is not: give both or neither.")
    if recipe is not None and recipe_a is not None:
        raise InvalidInputError("recipe is given together with recipe_a and recipe_b: give one or the other.")
    supported: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
        ("recipe", recipe, (1, SCALE_BLOCK, SCALE_BLOCK)),
        ("recipe_a", recipe_a, (1, SCALE_BLOCK)),
        ("recipe_b", recipe_b, (SCALE_BLOCK, SCALE_BLOCK)),
    )
    for name, given_recipe, expected in supported:
        if given_recipe is None:
            continue
        values = checks.check_granularities(name, given_recipe, len(expected))
        if values != expected:
            raise UnsupportedError(
                f"{name} {values} is not supported by this version: only {expected} is, which means scales per 1 x 128 "
                "of a and per 128 x 128 of b."
            )


def _check_shapes(a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, d: Tensor) -> tuple[int, int, int]:
    """Kinds and shapes of all; returns M, N and K."""
    (m, k), (n, k_of_b) = _check_values("a", a), _check_values("b", b)
    if k != k_of_b:
        raise InvalidInputError(
            f"a and b must agree in K, their last dimension, but a is {shape_of(a)} and b is {shape_of(b)}. "
            "b is N x K, the transpose of the usual weight-times-input order."
        )
    blocks_n, blocks_k = ceil_div(n, SCALE_BLOCK), ceil_div(k, SCALE_BLOCK)
    _check_scales("a", sfa, (m, blocks_k), f"one per row per {SCALE_BLOCK} of K")
    _check_scales("b", sfb, (blocks_n, blocks_k), f"one per {SCALE_BLOCK} x {SCALE_BLOCK} block of b")
    if d.dtype == torch.float32:
        raise UnsupportedError("d is torch.float32, which this version cannot write. Pass torch.bfloat16.")
    if d.dtype != torch.bfloat16:
        raise InvalidInputError(f"d must be torch.bfloat16, but it is {d.dtype}.")
    if tuple(d.shape) != (m, n):
        raise InvalidInputError(f"d must have the shape {(m, n)}, rows of a by rows of b, but it has {shape_of(d)}.")
    checks.check_sizes("d", d)
    return m, n, k


def _check_values(name: str, x: Tensor) -> tuple[int, int]:
    """A or B: E4M3, K-major, rows that TMA can step through. Returns its sizes."""
    rows, k = x.shape
    if x.dtype in _FP4_CARRIERS:
        raise UnsupportedError(
            f"{name} is {x.dtype}, as packed FP4 operands are: FP4 is not supported by this version or on Hopper. "
            "Pass torch.float8_e4m3fn."
        )
    if x.dtype != torch.float8_e4m3fn:
        raise InvalidInputError(f"{name} must be torch.float8_e4m3fn (E4M3), but it is {x.dtype}.")
    checks.check_sizes(name, x)
    if k % TMA_BYTES:
        raise InvalidInputError(
            f"K must be a multiple of {TMA_BYTES}, because rows of FP8 are read in pieces of {TMA_BYTES} bytes, but "
            f"{name} is {shape_of(x)}. Pad a and b with zero columns up to K = {align(k, TMA_BYTES)}."
        )
    if rows == 0 or k == 0:
        return rows, k
    if k > 1 and x.stride(1) != 1:
        raise InvalidInputError(
            f"{name} must be K-major (stride 1 along its last dimension), but it is {shape_of(x)} with strides "
            f"{x.stride()}. Call .contiguous() on it, or use the nn, tn or tt form that fits how it is stored."
        )
    if rows > 1 and x.stride(0) < k:
        raise InvalidInputError(
            f"the rows of {name} overlap: it is {shape_of(x)} with strides {x.stride()}. Pass .contiguous()."
        )
    if rows > 1 and x.stride(0) % TMA_BYTES:
        raise InvalidInputError(
            f"the row stride of {name} must be a multiple of {TMA_BYTES} bytes, but it is {x.stride(0)}. "
            "Pass .contiguous(), or allocate its rows with padding."
        )
    return rows, k


def _check_alignment(name: str, x: Tensor) -> None:
    if x.numel() == 0:
        return
    if past := x.data_ptr() % TMA_BYTES:
        raise InvalidInputError(
            f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
            "It is probably a view into a larger tensor: pass a copy (.clone())."
        )


def _check_scales(name: str, sf: Tensor, shape: tuple[int, int], meaning: str) -> None:
    if sf.dtype in _PACKED_SCALES:
        raise UnsupportedError(
            f"the scales of {name} are {sf.dtype}, as packed UE8M0 scales are, which Hopper cannot use. "
            "Pass them as torch.float32; their values may be powers of two."
        )
    if sf.dtype != torch.float32:
        raise InvalidInputError(
            f"the scales of {name} must be torch.float32, but they are {sf.dtype}. Call .float() on them."
        )
    if tuple(sf.shape) != shape:
        raise InvalidInputError(
            f"the scales of {name} must have the shape {shape}, {meaning}, but they have {shape_of(sf)}."
        )
