"""GEMMs grouped by M, of FP8 with scales and of BF16: each row of A is multiplied by the matrix B of its group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from .. import options
from ..calls import Operation, Step, Work, entry
from ..errors import InvalidInputError
from ..reference import m_grouped_reference
from ..spec import Dtype, GemmSpec, Major, Operand
from . import checks, grouped_checks
from .fp8_checks import BLOCKS
from .fp8_dense import Preparation

Form: TypeAlias = Literal["contiguous", "psum", "masked"]
"""How rows are assigned to groups; see `GemmSpec`."""

FP8, FP8_MASKED = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"
BF16, BF16_MASKED = "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked"
"""Names of the operations. The index form and the psum form share one."""


def spec(
    dtype: Dtype,
    grouping: Form,
    m: int,
    n: int,
    k: int,
    groups: int,
    num_sms: int,
    whole_gpu: bool = True,
    alignment: int = 1,
    expected_m: int = 0,
    major_b: Major = "k",
    aligned: bool | None = None,
    compiled_dims: str = "",
) -> GemmSpec:
    """The spec of a call, under the options of this process. ``dtype`` is that of A and B, "e4m3" or "bf16". ``m`` are
    all rows of A, or in the masked form those of one group. ``aligned`` says whether TMA can write D; None means that
    it is freshly allocated."""
    scaling = BLOCKS if dtype == "e4m3" else ("none", "none")
    return GemmSpec(
        m=m,
        n=n,
        k=k,
        a=Operand(dtype, scaling=scaling[0]),
        b=Operand(dtype, major_b, scaling=scaling[1]),
        d=Operand("bf16", major="mn", aligned=n % 8 == 0 if aligned is None else aligned),
        num_sms=num_sms,
        whole_gpu=whole_gpu,
        block_multiple=options.get_block_size_multiple_of(),
        compiled_dims="" if options.ignore_compile_dims() else compiled_dims,
        groups=groups,
        grouping=grouping,
        alignment=1 if grouping == "masked" else alignment,
        expected_m=min(expected_m, m) if grouping == "masked" else 0,
        batch_invariant=options.get_batch_invariant(),
    )


@dataclass(frozen=True, eq=False)
class MGroupedOperands:
    """Checked operands. a and d are (m, k) and (m, n), in the masked form with the group in front. b is a view
    (groups, n, k). ``size`` is the alignment of groups, or in the masked form the expected rows of a group."""

    tensors: Mapping[str, Tensor]
    m: int
    n: int
    k: int
    groups: int
    size: int
    device: torch.device
    compiled_dims: str


class _MGrouped(Operation):
    """What FP8 and BF16 share. Arguments after the options are ``size`` (see `MGroupedOperands`) and ``form``: "nn" for
    b given as (G, K, N)."""

    output = "d"
    dtype: Dtype

    def __init__(self, name: str, grouping: Form) -> None:
        self.name, self.grouping = name, grouping
        self.layout = "masked_m" if grouping == "masked" else "grouped_layout"

    @property
    def is_masked(self) -> bool:
        """Whether a and d have the group in front."""
        return self.grouping == "masked"

    def checked(self, named: dict[str, Any], compiled_dims: str, size: int, form: str) -> MGroupedOperands | None:
        """The operands, once all but their values' and scales' dtypes and scales' shapes are checked. ``named`` are the
        tensors in the order of `operands`, under the names that messages use."""
        dims = 3 if self.is_masked else 2
        of_layout = {self.layout: 1, "b": 3, "the scales of b": 3}
        for name, tensor in named.items():
            checks.check_plain(name, tensor, dims=(of_layout.get(name, dims),))
        device = checks.check_devices(named)
        checks.check_output_gradient("d", named["d"])
        if form == "nn":
            named |= {name: named[name].transpose(1, 2) for name in ("b", "the scales of b") if name in named}
        a, b, layout, d = (named[name] for name in ("a", "b", self.layout, "d"))
        self.check_dtypes(named)
        grouped_checks.check_layout(self.layout, layout)
        grouped_checks.check_output_dtype(d)
        grouped_checks.check_shapes(a, b, d, self.layout, layout, form, self.grouping == "psum")
        self.check_scales(named)
        if checks.is_fake(named.values()):
            return None
        checks.check_memory(named)
        (groups, n, k), m = b.shape, a.shape[-2]
        if 0 in (m, n, groups):
            return None
        grouped_checks.check_k_major("a", a)
        self.weights_layout(b)
        grouped_checks.check_places(named)
        tensors = dict(zip(self.operands, named.values(), strict=True))
        return MGroupedOperands(tensors, m, n, k, groups, size, device, compiled_dims)

    @abstractmethod
    def check_dtypes(self, named: Mapping[str, Tensor]) -> None:
        """Check the dtypes of a, b and their scales."""

    def check_scales(self, named: Mapping[str, Tensor]) -> None:
        """Check the shapes of the scales, if there are any."""

    @abstractmethod
    def weights_layout(self, b: Tensor) -> tuple[Major, tuple[int, int]]:
        """The contiguous dimension of the view b (G, N, K), and its strides as one matrix of all groups' rows. Refuses
        what TMA cannot read."""

    def work(self, x: MGroupedOperands, device: int) -> Work:
        """The GEMM, after a transpose of the scales of a if TMA cannot read them as they are."""
        a, d = x.tensors["a"], x.tensors["d"]
        found = Preparation({name: name for name in x.tensors})
        found.strides["a"] = (grouped_checks.check_k_major("a", a), 1)
        major_b, found.strides["b"] = self.weights_layout(x.tensors["b"])
        if "sfa" in x.tensors:
            scales = x.tensors["sfa"]
            (found.grouped_row_scales if self.is_masked else found.row_scales)("sfa", scales)
            found.strides["sfb"] = x.tensors["sfb"].stride()
        flat = grouped_checks.flat(d)
        found.strides["d"] = (flat.stride(0), 1)
        asked = spec(
            self.dtype,
            self.grouping,
            x.m,
            x.n,
            x.k,
            x.groups,
            num_sms=options.num_sms_for(device),
            whole_gpu=options.whole_gpu(device),
            alignment=x.size,
            expected_m=x.size,
            major_b=major_b,
            aligned=checks.tma_writable(flat),
            compiled_dims=x.compiled_dims,
        )
        return Work((*found.steps, Step(asked, found.strides, found.operands)), found.scratch)

    def reference(self, x: MGroupedOperands) -> None:
        """See `m_grouped_reference`."""
        m_grouped_reference(**x.tensors, grouping=self.grouping, alignment=x.size)

    def shape(self, x: MGroupedOperands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.m}x{x.n}x{x.k} in {x.groups} groups"

    def flops(self, x: MGroupedOperands) -> int:
        """Floating-point operations, for reports: of all rows, or in the masked form of those that are expected."""
        rows = x.groups * min(x.size, x.m) if self.is_masked else x.m
        return 2 * rows * x.n * x.k


class MGroupedFP8(_MGrouped):
    """See `deep_gemm.m_grouped_fp8_gemm_nt_contiguous`."""

    weights = ("b", "sfb")
    unsigned = ("a", "b", "layout")
    dtype = "e4m3"

    def __init__(self, grouping: Form) -> None:
        super().__init__(FP8_MASKED if grouping == "masked" else FP8, grouping)
        tensors = ("a", "b", "d", self.layout)
        self.parameters = (
            *(*tensors, "recipe", "recipe_a", "recipe_b", "compiled_dims", "disable_ue8m0_cast"),
            *("size", "form"),
        )
        self.operands = {"a": "a[0]", "sfa": "a[1]", "b": "b[0]", "sfb": "b[1]", "layout": self.layout, "d": "d"}

    def check(self, *arguments: Any) -> MGroupedOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        a, b, d, layout, recipe, recipe_a, recipe_b, compiled_dims, disabled, size, form = arguments
        grouped_checks.check_1d2d(recipe, recipe_a, recipe_b)
        dims = checks.check_compiled_dims(compiled_dims or "")
        if not isinstance(disabled, bool):
            raise InvalidInputError(f"disable_ue8m0_cast must be True or False, but it is {disabled!r}.")
        (a, sfa), (b, sfb) = checks.pair("a", a), checks.pair("b", b)
        named = {"a": a, "the scales of a": sfa, "b": b, "the scales of b": sfb, self.layout: layout, "d": d}
        return self.checked(named, dims, size, form)

    def check_dtypes(self, named: Mapping[str, Tensor]) -> None:
        """E4M3 with float32 scales."""
        for name in ("a", "b"):
            grouped_checks.check_e4m3(name, named[name], named[f"the scales of {name}"])

    def check_scales(self, named: Mapping[str, Tensor]) -> None:
        """Scales of 1 x 128 for a and of 128 x 128 for b."""
        grouped_checks.check_scale_shapes(*(named[x] for x in ("a", "the scales of a", "b", "the scales of b")))

    def weights_layout(self, b: Tensor) -> tuple[Major, tuple[int, int]]:
        """K must be contiguous."""
        return grouped_checks.check_fp8_weights(b)


class MGroupedBF16(_MGrouped):
    """See `deep_gemm.m_grouped_bf16_gemm_nt_contiguous`."""

    weights = ("b",)
    unsigned = ("layout",)
    dtype = "bf16"

    def __init__(self, grouping: Form) -> None:
        super().__init__(BF16_MASKED if grouping == "masked" else BF16, grouping)
        self.parameters = ("a", "b", "d", self.layout, "compiled_dims", "size", "form")
        self.operands = {"a": "a", "b": "b", "layout": self.layout, "d": "d"}

    def check(self, *arguments: Any) -> MGroupedOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        a, b, d, layout, compiled_dims, size, form = arguments
        dims = checks.check_compiled_dims(compiled_dims or "")
        return self.checked({"a": a, "b": b, self.layout: layout, "d": d}, dims, size, form)

    def check_dtypes(self, named: Mapping[str, Tensor]) -> None:
        """bfloat16."""
        for name in ("a", "b"):
            if (dtype := named[name].dtype) != torch.bfloat16:
                raise InvalidInputError(
                    f"{name} of {self.name} must be torch.bfloat16, but it is {dtype}. Pass {name}.to(torch.bfloat16)."
                )

    def weights_layout(self, b: Tensor) -> tuple[Major, tuple[int, int]]:
        """K or N must be contiguous."""
        return grouped_checks.check_half_weights(b)


@dataclass(frozen=True)
class Entries:
    """The functions behind the public ones, with all arguments by position."""

    index: Callable[..., None]
    psum: Callable[..., None]
    masked: Callable[..., None]

    @classmethod
    def of(cls, operation: type[MGroupedFP8] | type[MGroupedBF16]) -> Entries:
        """The entries of an operation in its three forms."""
        return cls(entry(operation("contiguous")), entry(operation("psum")), entry(operation("masked")))


fp8, bf16 = Entries.of(MGroupedFP8), Entries.of(MGroupedBF16)
