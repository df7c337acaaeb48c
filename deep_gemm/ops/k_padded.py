"""FP8 GEMMs grouped along K whose operands are one matrix each, in which groups begin at multiples of 128. Casts write
them so from rows that are padded for GEMMs grouped along M."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..calls import entry
from ..errors import InvalidInputError
from ..reference import k_grouped_reference
from ..spec import SCALE_BLOCK, KGroupMapsSpec, align, ceil_div
from . import grouped_checks
from .checks import shape_of
from .k_grouped import LAYOUT, KGroupedFP8, KGroupedOperands

NAME = "k_grouped_fp8_gemm_nt_padded"
"""Name of the operation."""


class KPaddedFP8(KGroupedFP8):
    """See `deep_gemm.k_grouped_fp8_gemm_nt_padded`."""

    dims = (2,)

    def __init__(self, accumulates: bool) -> None:
        super().__init__(accumulates, NAME)

    def check_inputs(self, named: Mapping[str, Tensor], groups: int, m: int, n: int) -> int:
        """a is (M, K), b is (N, K), and their scales have a column for each 128 of K."""
        k = named["a"].shape[1]
        for name, rows in (("a", m), ("b", n)):
            x, sf = named[name], named[f"the scales of {name}"]
            grouped_checks.check_values(name, x, sf)
            for of, tensor, shape in (
                (name, x, (rows, k)),
                (f"the scales of {name}", sf, (rows, ceil_div(k, SCALE_BLOCK))),
            ):
                if tuple(tensor.shape) != shape:
                    raise InvalidInputError(
                        f"{of} must have the shape {shape}, as d {shape_of(named['d'])} and a {shape_of(named['a'])} "
                        f"need, but it has {shape_of(tensor)}."
                    )
        return k

    def check_readable(self, named: Mapping[str, Tensor]) -> None:
        """Rows, of K elements, are contiguous and 16-byte aligned."""
        for name in ("a", "b"):
            grouped_checks.check_k_major(name, named[name])

    def maps(self, x: KGroupedOperands) -> tuple[KGroupMapsSpec, dict[str, tuple[int, ...]]]:
        """The strides of matrices that are parts of one matrix."""
        strides: dict[str, tuple[int, ...]] = {
            name: (grouped_checks.check_k_major(name, x.tensors[name]), 1) for name in ("a", "b")
        }
        return KGroupMapsSpec(x.groups, x.m, x.n, x.k), strides

    def reference(self, x: KGroupedOperands) -> None:
        """See `k_grouped_reference`, which takes each group's matrix by itself."""
        tensors: dict[str, Any] = dict(x.tensors)
        parts, begin = [], 0
        for size in tensors["layout"].tolist():
            parts.append(slice(begin, begin + max(0, size)))
            begin = align(parts[-1].stop, SCALE_BLOCK)
        if parts and parts[-1].stop > x.k:
            raise InvalidInputError(f"{LAYOUT} says that groups end at {parts[-1].stop} of K, but K of a is {x.k}.")
        for name in ("a", "b"):
            flat = [tensors[name][:, part].reshape(-1).view(torch.uint8) for part in parts]
            tensors[name] = torch.cat(flat).view(torch.float8_e4m3fn)
        k_grouped_reference(**tensors)


without_c, with_c = (entry(KPaddedFP8(accumulates)) for accumulates in (False, True))
"""The functions behind the public one: a, b, d, sizes, compiled_dims; and a, b, c, d, sizes, compiled_dims."""
