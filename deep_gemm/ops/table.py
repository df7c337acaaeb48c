"""The table of products: what each multiplies. The spec of a call, of a layer to compile, and of a survey is made here,
and nowhere else."""

from __future__ import annotations

from typing import Any

import torch

from deep_gemm.ops.reference import BLOCKS, Scalings

from .. import options
from ..parts import Parts, parse
from ..records import record
from ..spec import Accumulate, Dtype, GemmSpec, Grouping, Major, Operand

DTYPES: dict[torch.dtype, Dtype] = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}
TORCH = {dtype: name for name, dtype in DTYPES.items()}

PLAIN: Scalings = ("none", "none")
ROWS_ON_BOTH_SIDES: Scalings = ("1x128", "1x128")
"""1D1D."""
EXPONENTS: Scalings = ("ue8m0", "ue8m0")
"""Powers of two on both sides, four to an int32, of rows as in 1D1D."""
WHOLE_ROWS: Scalings = ("row", "row")
"""One scale for each row of A and of B; one scale may also apply to all rows of an operand."""


@record(frozen=True)
class Use:
    """How a call uses d: its dtype, and what the product is added to. If ``majors`` are given, so are a and b."""

    output: Dtype
    accumulate: Accumulate = "none"
    majors: tuple[Major, Major] | None = None


@record(frozen=True)
class Product:
    """What an operation multiplies. The first of ``outputs``, the dtypes of d, is that of a model's layers; so are
    ``scaling``, ``majors`` and ``accumulate``, which calls may change. ``helpers`` are kernels that may run before it:
    they copy, transpose or cast operands. ``forms`` are the layouts of a and b in the names of public functions.
    ``others`` are the uses of d, besides a layer's, that engines and training frameworks have. b has the ``dtype`` of
    a, or ``dtype_of_b``."""

    dtype: Dtype
    outputs: tuple[Dtype, ...]
    scaling: Scalings = PLAIN
    majors: tuple[Major, Major] = ("k", "k")
    accumulate: Accumulate = "none"
    grouping: Grouping = "none"
    helpers: tuple[str, ...] = ()
    forms: tuple[str, ...] = ("nt",)
    others: tuple[Use, ...] = ()
    dtype_of_b: Dtype | None = None

    @property
    def uses(self) -> tuple[Use, ...]:
        """A layer's use of d first."""
        return Use(self.outputs[0], self.accumulate), *self.others

    @property
    def dtypes(self) -> tuple[Dtype, Dtype]:
        """Those of a and of b."""
        return self.dtype, self.dtype_of_b or self.dtype

    @property
    def is_scaled(self) -> bool:
        """Whether a and b are pairs of values and scales."""
        return self.scaling != PLAIN


FP8, BF16, FP16 = "fp8_gemm_nt", "bf16_gemm_nt", "fp16_gemm_nt"
"""Dense products, in every form."""

DEFAULT = FP8
"""The operation of a model's layer by default."""

WGRAD = "fp8_gemm_nt_1d1d"
"""`fp8_gemm_nt` as weight gradients call it: scales of 1 x 128 on both sides, added to a float32 d."""

ROWWISE = "fp8_gemm_nt_rowwise"
"""`fp8_gemm_nt` with one scale for each row of a and of b."""

E5M2: tuple[tuple[Dtype, Dtype], ...] = (("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"))
ROWWISE_E5M2 = {f"{ROWWISE}_{of_a}_{of_b}": (of_a, of_b) for of_a, of_b in E5M2}
"""The same with a, b or both in E5M2, as gradients are."""

M_FP8, M_FP8_MASKED = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"
M_BF16, M_BF16_MASKED = "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked"
PSUM = "_psum"
"""Ends the names of products grouped by M that are called with the ends of groups (use_psum_layout)."""

K_FP8, K_BF16 = "k_grouped_fp8_gemm_nt_contiguous", "k_grouped_bf16_gemm_tn_contiguous"
K_PADDED = "k_grouped_fp8_gemm_nt_padded"

BMM_FP8, BMM_BF16, BMM_FP16 = "fp8_bmm", "bf16_bmm", "fp16_bmm"
"""Batches of products."""

ABSORBED = "bf16_bhd_hdr_bhr"
"""`bf16_bmm` as `einsum` calls it for "bhd,hdr->bhr": N of b is contiguous."""

SKIP_HEAD_MID = "fp8_gemm_nt_skip_head_mid"
"""A dense product that leaves out columns of d."""

SUM_BF16 = "bf16_bmk_bnk_mn"
"""The sum of a batch of products."""

_FORMS = ("nt", "nn", "tn", "tt")
_TRANSPOSES = ("transpose_scales", "transpose_bytes")


def _by_m(dtype: Dtype, grouping: Grouping) -> Product:
    forms = ("nt",) if grouping == "masked" else ("nt", "nn")
    if dtype == "e4m3":
        return Product(dtype, ("bf16",), BLOCKS, grouping=grouping, helpers=_TRANSPOSES[:1], forms=forms)
    return Product(dtype, ("bf16",), grouping=grouping, forms=forms)


_OF_FP8: tuple[Dtype, ...] = ("bf16", "f32", "f16")
"""What dense FP8 products write, whatever their scales."""

_FLOAT16_MODEL = Use("f16")
_ROUTER = Use("f32", majors=("k", "k"))
_MAIN_GRAD = Use("f32", "in place", majors=("mn", "mn"))
_NEW_GRADIENT = (Use("f32"), Use("bf16"))
"""Of a layer's step that adds to nothing, by the dtype of its weight."""

_BY_K: dict[str, Any] = {"outputs": ("f32", "bf16"), "accumulate": "in place", "grouping": "k"}
_K_FP8 = Product("e4m3", scaling=ROWS_ON_BOTH_SIDES, others=(*_NEW_GRADIENT, Use("f32", "from c")), **_BY_K)
_K_BF16 = Product("bf16", majors=("mn", "mn"), forms=("tn",), others=(Use("bf16", "in place"),), **_BY_K)

PRODUCTS: dict[str, Product] = {
    FP8: Product("e4m3", _OF_FP8, BLOCKS, helpers=_TRANSPOSES, forms=_FORMS, others=(_FLOAT16_MODEL,)),
    WGRAD: Product(
        "e4m3",
        ("f32", "bf16", "f16"),
        ROWS_ON_BOTH_SIDES,
        accumulate="in place",
        helpers=(*_TRANSPOSES, "quantize"),
        others=_NEW_GRADIENT,
    ),
    ROWWISE: Product("e4m3", _OF_FP8, WHOLE_ROWS, helpers=_TRANSPOSES),
    **{
        name: Product(of_a, _OF_FP8, WHOLE_ROWS, helpers=_TRANSPOSES, dtype_of_b=of_b)
        for name, (of_a, of_b) in ROWWISE_E5M2.items()
    },
    BF16: Product("bf16", ("bf16", "f32"), helpers=("copy_rows",), forms=_FORMS, others=(_ROUTER, _MAIN_GRAD)),
    FP16: Product("f16", ("f16", "f32"), helpers=("copy_rows",), forms=_FORMS),
    M_FP8: _by_m("e4m3", "contiguous"),
    M_FP8 + PSUM: _by_m("e4m3", "psum"),
    M_FP8_MASKED: _by_m("e4m3", "masked"),
    M_BF16: _by_m("bf16", "contiguous"),
    M_BF16 + PSUM: _by_m("bf16", "psum"),
    M_BF16_MASKED: _by_m("bf16", "masked"),
    K_FP8: _K_FP8,
    K_PADDED: _K_FP8,
    K_BF16: _K_BF16,
    BMM_FP8: Product("e4m3", ("bf16",), BLOCKS, grouping="batched", helpers=_TRANSPOSES[:1]),
    BMM_BF16: Product("bf16", ("bf16", "f32"), grouping="batched"),
    BMM_FP16: Product("f16", ("f16", "f32"), grouping="batched"),
    ABSORBED: Product("bf16", ("bf16", "f32"), majors=("k", "mn"), grouping="batched"),
    SKIP_HEAD_MID: Product("e4m3", ("bf16",), BLOCKS, grouping="heads", helpers=_TRANSPOSES),
    SUM_BF16: Product("bf16", ("f32", "bf16"), accumulate="in place", grouping="summed", others=(Use("bf16"),)),
}
NAMES = tuple(name for name, product in PRODUCTS.items() if product.grouping not in ("k", "summed", "heads"))
"""Operations that layers can run."""

M_GROUPED = tuple(name for name in NAMES if PRODUCTS[name].grouping not in ("none", "batched"))
"""Operations with groups along M."""


def spec(
    m: int,
    n: int,
    k: int,
    num_sms: int,
    op: str = DEFAULT,
    whole_gpu: bool = True,
    *,
    groups: int = 1,
    alignment: int = 128,
    expected_m: int = 0,
    scaling: Scalings | None = None,
    majors: tuple[Major, Major] | None = None,
    dtypes: tuple[Dtype, Dtype] | None = None,
    output: Dtype | None = None,
    accumulate: Accumulate | None = None,
    epilogue: Parts | str = "none",
    aligned: bool | None = None,
    compiled_dims: str = "",
) -> GemmSpec:
    """The spec of a call of ``op``, a name of `PRODUCTS`, under the options of this process.

    What is None is as in a layer's call with freshly allocated tensors. ``m`` are all rows of A, in the masked form
    those of one group; ``k`` is the sum over all groups along K. ``alignment`` is for groups along M, ``expected_m``
    for the masked form. ``dtypes`` are those of a and b. ``aligned`` says whether TMA can write D (and read C). An
    epilogue may be its text. Raises KeyError for an unknown operation.
    """
    product = PRODUCTS[op]
    (of_a, of_b), (major_a, major_b) = scaling or product.scaling, majors or product.majors
    dtype_a, dtype_b = dtypes or product.dtypes
    output = output or product.outputs[0]
    fresh = n % (4 if output == "f32" else 8) == 0  # rows that start at multiples of 16 bytes
    return GemmSpec(
        m=m,
        n=n,
        k=k,
        a=Operand(dtype_a, major_a, of_a),
        b=Operand(dtype_b, major_b, of_b),
        d=Operand(output, "mn", "1x128" if output == "e4m3" else "none", fresh if aligned is None else aligned),
        num_sms=num_sms,
        whole_gpu=whole_gpu,
        block_multiple=options.get_block_size_multiple_of(),
        compiled_dims="" if options.ignore_compile_dims() else compiled_dims,
        groups=groups if product.grouping != "none" else 1,
        grouping=product.grouping,
        alignment=alignment if product.grouping in ("contiguous", "psum") else 1,
        expected_m=min(expected_m, m) if product.grouping == "masked" else 0,
        accumulate=accumulate or product.accumulate,
        epilogue=parse(epilogue) if isinstance(epilogue, str) else epilogue,
        batch_invariant=options.get_batch_invariant(),
    )


def helpers(op: str) -> tuple[str, ...]:
    """The kernels that may run before the GEMM of ``op``."""
    return PRODUCTS[op].helpers
