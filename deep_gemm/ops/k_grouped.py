"""GEMMs grouped along K, of FP8 with scales and of BF16: the weight gradients of experts. Each group multiplies its own
part of K, and has its own matrix D."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..calls import Operation, Step, Work, entry
from ..errors import InvalidInputError, UnsupportedError
from ..reference import k_grouped_reference
from ..spec import SCALE_BLOCK, Accumulate, Dtype, GemmSpec, KGroupMapsSpec, Operand, ceil_div
from . import checks, fp8_checks, grouped_checks
from .checks import TMA_BYTES, shape_of
from .fp8_dense import Preparation

FP8, BF16 = "k_grouped_fp8_gemm_nt_contiguous", "k_grouped_bf16_gemm_tn_contiguous"
"""Names of the operations."""

LAYOUT = "grouped_layout"
"""The argument with K of each group, on the device."""

_OUTPUTS: dict[torch.dtype, Dtype] = {torch.float32: "f32", torch.bfloat16: "bf16"}


def spec(
    dtype: Dtype,
    m: int,
    n: int,
    k: int,
    groups: int,
    num_sms: int,
    whole_gpu: bool = True,
    output: Dtype = "f32",
    accumulate: Accumulate = "in place",
    aligned: bool | None = None,
    compiled_dims: str = "",
) -> GemmSpec:
    """The spec of a call, under the options of this process. ``k`` is the sum over all groups. ``aligned`` says whether
    TMA can write D (and read C); None means that they are freshly allocated."""
    scaling = fp8_checks.ROWS_ON_BOTH_SIDES if dtype == "e4m3" else ("none", "none")
    fresh = n % (4 if output == "f32" else 8) == 0
    return GemmSpec(
        m=m,
        n=n,
        k=k,
        a=Operand(dtype, "k" if dtype == "e4m3" else "mn", scaling[0]),
        b=Operand(dtype, "k" if dtype == "e4m3" else "mn", scaling[1]),
        d=Operand(output, major="mn", aligned=fresh if aligned is None else aligned),
        num_sms=num_sms,
        whole_gpu=whole_gpu,
        block_multiple=options.get_block_size_multiple_of(),
        compiled_dims="" if options.ignore_compile_dims() else compiled_dims,
        groups=groups,
        grouping="k",
        accumulate=accumulate,
        batch_invariant=options.get_batch_invariant(),
    )


@dataclass(frozen=True, eq=False)
class KGroupedOperands:
    """Checked operands. d, and c if there is one, are (groups, m, n). ``k`` is the sum over all groups."""

    tensors: Mapping[str, Tensor]
    m: int
    n: int
    k: int
    groups: int
    device: torch.device
    compiled_dims: str
    accumulate: Accumulate


class _KGrouped(Operation):
    """The common part of the FP8 and the BF16 operation. ``accumulates``: there is a c."""

    output = "d"
    dtype: Dtype

    def __init__(self, name: str, tensors: Mapping[str, str], accumulates: bool) -> None:
        self.name = name
        c = ("c",) if accumulates else ()
        self.parameters = ("a", "b", *c, "d", LAYOUT, "compiled_dims")
        self.operands = {**tensors, "layout": LAYOUT, **{name: name for name in (*c, "d")}}
        self.in_place = "c" if accumulates else ""

    def check(self, *arguments: Any) -> KGroupedOperands | None:
        """None for fake tensors, of which only types and shapes are checked, and where there is nothing to compute."""
        given = dict(zip(self.parameters, arguments, strict=True))
        dims = checks.check_compiled_dims(given["compiled_dims"] or "")
        named = self.named(given)
        named[LAYOUT] = given[LAYOUT]
        named |= {name: given[name] for name in ("c", "d") if name in given}
        of_layout = {LAYOUT: (1,), "c": (3,), "d": (3,)}
        for name, tensor in named.items():
            checks.check_plain(name, tensor, dims=of_layout.get(name, self.dims))
        device = checks.check_devices(named)
        checks.check_output_gradient("d", named["d"])
        grouped_checks.check_layout(LAYOUT, named[LAYOUT])
        self._check_outputs(named)
        groups, m, n = named["d"].shape
        if tuple(named[LAYOUT].shape) != (groups,):
            raise InvalidInputError(
                f"{LAYOUT} must have the shape {(groups,)}, K of each group of d, but it has {shape_of(named[LAYOUT])}."
            )
        k = self.check_inputs(named, groups, m, n)
        if checks.is_fake(named.values()):
            return None
        checks.check_memory(named)
        flat = {name: grouped_checks.flat(x) for name, x in named.items() if name in ("c", "d")}
        accumulate = checks.check_places(named | flat)
        if 0 in (m, n, groups):
            return None
        if k == 0:
            checks.write_empty_sum(flat["d"], flat.get("c"), accumulate)
            return None
        self.check_readable(named)
        tensors = dict(zip(self.operands, named.values(), strict=True))
        return KGroupedOperands(tensors, m, n, k, groups, device, dims, accumulate)

    dims: tuple[int, ...] = (2,)
    """Dimensions of the inputs."""

    @abstractmethod
    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs by the names that messages use, in the order of `operands`."""

    @abstractmethod
    def check_inputs(self, named: Mapping[str, Tensor], groups: int, m: int, n: int) -> int:
        """Check dtypes and shapes of the inputs. Returns the sum of K."""

    @abstractmethod
    def check_readable(self, named: Mapping[str, Tensor]) -> None:
        """Refuse inputs that TMA cannot read."""

    @abstractmethod
    def place(self, found: Preparation, x: KGroupedOperands) -> None:
        """Add the inputs, and the launches that prepare them."""

    def _check_outputs(self, named: Mapping[str, Tensor]) -> None:
        d = named["d"]
        if d.dtype not in _OUTPUTS:
            raise InvalidInputError(f"d of {self.name} must be torch.float32 or torch.bfloat16, but it is {d.dtype}.")
        if "c" in named and (named["c"].dtype != d.dtype or named["c"].shape != d.shape):
            c = named["c"]
            raise InvalidInputError(
                f"c must have d's dtype and shape, {d.dtype} {shape_of(d)}, but it has {c.dtype} {shape_of(c)}."
            )
        for name in ("c", "d"):
            if name in named and named[name].numel() and grouped_checks.flat_stride(named[name]) is None:
                raise InvalidInputError(
                    f"{name} must be row-major, with each group right after the one before, but it is "
                    f"{shape_of(named[name])} with strides {named[name].stride()}. Pass .contiguous()."
                )

    def work(self, x: KGroupedOperands, device: int) -> Work:
        """The GEMM, after the launches that prepare its inputs."""
        flat = {name: grouped_checks.flat(x.tensors[name]) for name in ("c", "d") if name in x.tensors}
        asked = spec(
            self.dtype,
            x.m,
            x.n,
            x.k,
            x.groups,
            num_sms=options.num_sms_for(device),
            whole_gpu=options.whole_gpu(device),
            output=_OUTPUTS[flat["d"].dtype],
            accumulate=x.accumulate,
            aligned=all(checks.tma_writable(tensor) for tensor in flat.values()),
            compiled_dims=x.compiled_dims,
        )
        found = Preparation({name: name for name in x.tensors})
        self.place(found, x)
        for name, tensor in flat.items():
            row = checks.row_stride(tensor, TMA_BYTES // tensor.element_size())
            found.strides[name] = (x.m * row, row, 1)
        return Work((*found.steps, Step(asked, found.strides, found.operands)), found.scratch)

    def reference(self, x: KGroupedOperands) -> None:
        """See `k_grouped_reference`."""
        k_grouped_reference(**x.tensors)

    def shape(self, x: KGroupedOperands) -> str:
        """The sizes of a call, for reports."""
        return f"{x.m}x{x.n}x{x.k} in {x.groups} groups along K"


class KGroupedFP8(_KGrouped):
    """See `deep_gemm.k_grouped_fp8_gemm_nt_contiguous`. Values are flat: a group's matrix lies after the one before."""

    dtype = "e4m3"
    unsigned = ("a", "b", "layout")
    dims: tuple[int, ...] = (1, 2)

    def __init__(self, accumulates: bool, name: str = FP8) -> None:
        super().__init__(name, {"a": "a[0]", "sfa": "a[1]", "b": "b[0]", "sfb": "b[1]"}, accumulates)

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """a and b are pairs."""
        (a, sfa), (b, sfb) = checks.pair("a", given["a"]), checks.pair("b", given["b"])
        return {"a": a, "the scales of a": sfa, "b": b, "the scales of b": sfb}

    def check_inputs(self, named: Mapping[str, Tensor], groups: int, m: int, n: int) -> int:
        """K follows from the number of values."""
        sums = {}
        for name, rows in (("a", m), ("b", n)):
            x, sf = named[name], named[f"the scales of {name}"]
            grouped_checks.check_values(name, x, sf)
            if not x.is_contiguous():
                raise InvalidInputError(f"{name} must be contiguous, each group's matrix after the one before it.")
            if rows and x.numel() % rows:
                raise InvalidInputError(
                    f"{name} has {x.numel()} values, not {rows} whole rows, as d {shape_of(named['d'])} needs."
                )
            sums[name] = x.numel() // max(1, rows)
        k = sums["a"]
        if m and n and sums["b"] != k:
            raise InvalidInputError(f"a and b must agree in the sum of K, but it is {k} in a and {sums['b']} in b.")
        if k % TMA_BYTES:
            raise InvalidInputError(f"K of each group must be a multiple of {TMA_BYTES}, but their sum is {k}.")
        for name, rows in (("a", m), ("b", n)):
            sf, least = named[f"the scales of {name}"], ceil_div(k, SCALE_BLOCK)
            if sf.dim() != 2 or sf.shape[0] != rows or not least <= sf.shape[1] <= least + groups:
                raise InvalidInputError(
                    f"the scales of {name} must have the shape ({rows}, {least}), one per row per {SCALE_BLOCK} of K "
                    f"of each group, or more columns where groups end inside a block, but they have {shape_of(sf)}."
                )
        return k

    def check_readable(self, named: Mapping[str, Tensor]) -> None:
        """Groups begin at multiples of 16 bytes if the operand does."""
        for name in ("a", "b"):
            if past := named[name].data_ptr() % TMA_BYTES:
                raise InvalidInputError(
                    f"{name} must start at a multiple of {TMA_BYTES} bytes, but its address is {past} past one. "
                    "Pass a copy (.clone())."
                )

    def place(self, found: Preparation, x: KGroupedOperands) -> None:
        """Tensor maps of all groups are made first, and scales transposed if TMA cannot read them."""
        for name in ("sfa", "sfb"):
            found.row_scales(name, x.tensors[name])
        found.strides["blocks"] = x.tensors["sfa"].shape[1], x.tensors["sfb"].shape[1]
        maps, strides = self.maps(x)
        names = ("a", "b", "layout", "maps")
        found.scratch["maps"] = ((maps.bytes,), torch.uint8)
        found.operands["maps"] = "maps"
        found.steps.append(Step(maps, strides, {name: found.operands[name] for name in names}))

    def maps(self, x: KGroupedOperands) -> tuple[KGroupMapsSpec, dict[str, tuple[int, ...]]]:
        """The tensor maps, and the strides that they need."""
        return KGroupMapsSpec(x.groups, x.m, x.n), {}


class KGroupedBF16(_KGrouped):
    """See `deep_gemm.k_grouped_bf16_gemm_tn_contiguous`."""

    dtype = "bf16"
    unsigned = ("layout",)

    def __init__(self, accumulates: bool) -> None:
        super().__init__(BF16, {"a": "a", "b": "b"}, accumulates)

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """a and b are tensors."""
        return {"a": given["a"], "b": given["b"]}

    def check_inputs(self, named: Mapping[str, Tensor], groups: int, m: int, n: int) -> int:
        """a is (K, M), b is (K, N)."""
        k = named["a"].shape[0]
        for name, columns in (("a", m), ("b", n)):
            x = named[name]
            if x.dtype != torch.bfloat16:
                raise InvalidInputError(f"{name} of {self.name} must be torch.bfloat16, but it is {x.dtype}.")
            if tuple(x.shape) != (k, columns):
                raise InvalidInputError(
                    f"{name} must have the shape {(k, columns)}, the sum of K by {'M' if name == 'a' else 'N'} of d, "
                    f"but it has {shape_of(x)}."
                )
        return k

    def check_readable(self, named: Mapping[str, Tensor]) -> None:
        """Rows, of M or N elements, are contiguous and 16-byte aligned."""
        for name in ("a", "b"):
            grouped_checks.check_k_major(name, named[name])

    def place(self, found: Preparation, x: KGroupedOperands) -> None:
        """Both operands are read as they are."""
        for name in ("a", "b"):
            found.strides[name] = (1, grouped_checks.check_k_major(name, x.tensors[name]))


@dataclass(frozen=True)
class Entries:
    """The functions behind a public one, with all arguments by position."""

    without_c: Callable[..., None]
    """Its arguments are a, b, d, grouped_layout, compiled_dims."""
    with_c: Callable[..., None]
    """Its arguments are a, b, c, d, grouped_layout, compiled_dims."""

    multiple: int
    """K of each group is a multiple of this."""

    def check_sizes(self, ks: Sequence[Any], a: Any, d: Any) -> None:
        """Check sizes that are given on the host."""
        if not all(isinstance(k, int) and k >= 0 for k in ks):
            raise InvalidInputError(f"ks_cpu must be a list of K of each group, integers from 0 on, but it is {ks!r}.")
        if isinstance(d, Tensor) and d.dim() == 3 and len(ks) != d.shape[0]:
            raise InvalidInputError(f"ks_cpu has {len(ks)} groups, but d has {d.shape[0]}.")
        if odd := [k for k in ks if k % self.multiple]:
            raise InvalidInputError(f"K of each group must be a multiple of {self.multiple}, but ks_cpu has {odd[0]}.")
        values = a[0] if isinstance(a, (tuple, list)) and a else a
        if isinstance(values, Tensor) and isinstance(d, Tensor) and d.dim() == 3 and values.dim() > 0:
            k = values.numel() // max(1, d.shape[1])
            if sum(ks) != k:
                raise InvalidInputError(f"ks_cpu must add up to the K of a, {k}, but adds up to {sum(ks)}.")

    def call(self, a: Any, b: Any, d: Any, ks: Any, layout: Any, c: Any, compiled_dims: Any, psum: Any) -> None:
        """Call the operation with or without c, with K of each group on the device."""
        if psum:
            raise UnsupportedError("use_psum_layout is not supported by GEMMs grouped along K. Pass K of each group.")
        if isinstance(ks, (list, tuple)):
            self.check_sizes(ks, a, d)
        layout = sizes_on_device(ks, layout, d)
        if c is None:
            self.without_c(a, b, d, layout, compiled_dims)
        else:
            self.with_c(a, b, c, d, layout, compiled_dims)


def sizes_on_device(ks: Any, layout: Any, d: Any) -> Any:
    """K of each group as a tensor beside d. Sizes that are given on the host are checked, and copied if there is no
    tensor."""
    if ks is None:
        if layout is None:
            raise InvalidInputError(f"ks_cpu or {LAYOUT} must be given: K of each group.")
        return layout
    if isinstance(ks, Tensor):
        return ks if layout is None else layout
    if not isinstance(ks, (list, tuple)):
        raise InvalidInputError(f"ks_cpu must be a list of K of each group, but it is {ks!r}.")
    if layout is not None:
        return layout
    device = d.device if isinstance(d, Tensor) else None
    return torch.tensor(ks, dtype=torch.int32, device=device)


fp8 = Entries(entry(KGroupedFP8(accumulates=False)), entry(KGroupedFP8(accumulates=True)), TMA_BYTES)
bf16 = Entries(entry(KGroupedBF16(accumulates=False)), entry(KGroupedBF16(accumulates=True)), 1)
