"""The accuracy of a result, in common measures, and whether it is within its bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ULP_EDGES = (0.5, 1.0, 2.0, 4.0, 16.0)
SLACK = 1.001
"""Slightly more than half a unit counts as half, because a result that was float32 before has been rounded twice."""
ULP_LABELS = (*(f"<= {edge:g}" for edge in ULP_EDGES), f"> {ULP_EDGES[-1]:g}")


@dataclass(frozen=True)
class Accuracy:
    """A result compared with the exact one in float64. Measures are of finite elements; `not_finite` counts others."""

    max_abs: float
    max_rel: float
    """The largest relative error, of elements whose exact value is not 0."""
    l2_rel: float
    """The norm of the errors divided by the norm of the exact result."""
    cosine: float
    ulps: tuple[float, ...]
    """The fractions of elements by error in units in the last place, see `ULP_LABELS`. Rounding alone is off by up to
    half a unit."""
    of_allowed: float
    """The largest error divided by the allowed error: at most 1 if the result is right."""
    outside: int
    """Elements with a larger error than is allowed."""
    not_finite: int
    """Elements that are wrongly NaN or infinite. Among them are those that were never written."""
    elements: int

    @property
    def right(self) -> bool:
        return not self.outside and not self.not_finite

    @property
    def fault(self) -> str:
        """What is wrong, as a clause; "" if nothing is."""
        parts = [f"{self.not_finite} of {self.elements} elements are NaN or infinite, or were not written"]
        parts.append(
            f"{self.outside} of {self.elements} elements are off by up to {self.of_allowed:.3g} times the bound"
        )
        return "; ".join(text for text, count in zip(parts, (self.not_finite, self.outside), strict=True) if count)


def examine(result: Tensor, exact: Tensor, allowed: Tensor) -> Accuracy:
    """Compare a result with the exact one. ``exact`` and the allowed error ``allowed`` are float64 of its shape."""
    given = result.double()
    same = (given == exact) | (given.isnan() & exact.isnan())
    finite = given.isfinite()
    not_finite = int((~finite & ~same).sum())
    given, exact, allowed = given[finite], exact[finite], allowed[finite]
    error = (given - exact).abs()
    nonzero = exact != 0
    norm, other = float(exact.norm()), float(given.norm())
    ratio = error / allowed
    bins = _bins(error, exact, result.dtype)
    return Accuracy(
        max_abs=_largest(error),
        max_rel=_largest((error / exact.abs())[nonzero]),
        l2_rel=float(error.norm()) / norm if norm else float(error.norm()),
        cosine=float(given @ exact) / (norm * other) if norm and other else float(norm == other),
        ulps=tuple(int((bins == index).sum()) / max(1, bins.numel()) for index in range(len(ULP_LABELS))),
        of_allowed=_largest(ratio),
        outside=int((ratio > 1).sum()),
        not_finite=not_finite,
        elements=result.numel(),
    )


def _bins(error: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The index of each error in `ULP_LABELS`."""
    info = torch.finfo(dtype)
    magnitude = exact.abs().clamp(min=info.smallest_normal)
    unit = torch.exp2(magnitude.log2().floor()) * info.eps * SLACK
    edges = torch.tensor(ULP_EDGES, dtype=torch.float64, device=error.device)
    return torch.bucketize(error / unit, edges)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0
