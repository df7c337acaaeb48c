"""Cases of GEMMs grouped by M for the unit tests and the GPU tests: routings, operands, calls in each form."""

from dataclasses import dataclass, field
from typing import Any

import torch

import deep_gemm
from deep_gemm.spec import align
from deep_gemm.testing import guarded, integer_operands, random_operands

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = ("fp8", "bf16")
FORMS = ("contiguous", "psum", "masked")


@dataclass(frozen=True)
class Routing:
    """The number of rows of each group. ``rows`` are those of A in all, 0 for up to the last group's aligned end."""

    counts: tuple[int, ...]
    rows: int = 0
    alignment: int = 128

    @property
    def starts(self) -> list[int]:
        """The first row of each group."""
        found = [0]
        for count in self.counts:
            found.append(found[-1] + align(count, self.alignment))
        return found[:-1]

    @property
    def end(self) -> int:
        """The aligned end of the last group."""
        return sum(align(count, self.alignment) for count in self.counts)

    @property
    def m(self) -> int:
        """Rows of A."""
        return self.rows or self.end

    def slices(self) -> list[slice]:
        """The rows of each group."""
        return [slice(start, start + count) for start, count in zip(self.starts, self.counts, strict=True)]

    def index(self, device: str) -> torch.Tensor:
        """The label of each row, -1 for padding."""
        labels = torch.full((self.m,), -1, dtype=torch.int32)
        for group, rows in enumerate(self.slices()):
            labels[rows] = group
        return labels.to(device)

    def psum(self, device: str) -> torch.Tensor:
        """The end of each group, without padding."""
        return torch.tensor([rows.stop for rows in self.slices()], dtype=torch.int32, device=device)

    def masked(self, device: str) -> torch.Tensor:
        """The number of rows of each group."""
        return torch.tensor(self.counts, dtype=torch.int32, device=device)

    def layout(self, form: str, device: str) -> torch.Tensor:
        """The layout of a form."""
        return {"contiguous": self.index, "psum": self.psum, "masked": self.masked}[form](device)


@dataclass
class Case:
    """Operands of a grouped GEMM. a (M, K) is routed by ``routing``; its padding, and that of sfa, is NaN."""

    kind: str
    routing: Routing
    n: int
    k: int
    device: str
    integers: bool = False
    seed: int = 0
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    sfa: torch.Tensor = field(init=False)
    sfb: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        groups, m, padded_n = len(self.routing.counts), self.routing.m, align(self.n, 128)
        make: Any = integer_operands if self.integers else random_operands
        (self.a, self.sfa), (b, sfb), *_ = make(m, groups * padded_n, self.k, self.device, seed=self.seed)
        self.b = b.view(groups, padded_n, self.k)[:, : self.n].contiguous()
        self.sfb = sfb.view(groups, padded_n // 128, -1)
        if self.kind == "bf16":
            self.a, self.b = self.a.to(BF16), self.b.to(BF16)
        padding = self.routing.index(self.device) < 0
        bits, nan = (torch.uint8, 0x7F) if self.kind == "fp8" else (torch.int16, 0x7FFF)
        self.a.view(bits)[padding] = nan
        self.sfa[padding] = float("nan")

    @property
    def weights(self) -> Any:
        """The argument b."""
        return (self.b, self.sfb) if self.kind == "fp8" else self.b

    def exact(self) -> torch.Tensor:
        """The product of each group, in a loop, (M, N) float64; NaN in padding."""
        out = torch.full((self.routing.m, self.n), float("nan"), dtype=torch.float64, device=self.device)
        for group, rows in enumerate(self.routing.slices()):
            x, y = self.a[rows].double(), self.b[group].double()
            if self.kind == "fp8":
                x *= self.sfa[rows].repeat_interleave(128, 1)[:, : self.k]
                scales = self.sfb[group].repeat_interleave(128, 0).repeat_interleave(128, 1)
                y *= scales[: self.n, : self.k]
            out[rows] = x @ y.t()
        return out

    def spread(self, x: torch.Tensor, max_m: int) -> torch.Tensor:
        """Rows as the masked form has them, (G, max_m, columns); the others are NaN."""
        nan = torch.full((), float("nan"), device=x.device).to(x.dtype)
        out = nan.expand(len(self.routing.counts), max_m, x.shape[1]).contiguous()
        for group, rows in enumerate(self.routing.slices()):
            out[group, : rows.stop - rows.start] = x[rows]
        return out

    def gathered(self, d: torch.Tensor) -> torch.Tensor:
        """The rows of all groups, one after the other, without padding; d has the shape of any form."""
        slices = self.routing.slices()
        if d.dim() == 3:
            return torch.cat([d[group, : rows.stop - rows.start] for group, rows in enumerate(slices)])
        return torch.cat([d[rows] for rows in slices])

    def arguments(self, form: str, max_m: int = 0) -> tuple[Any, Any, torch.Tensor]:
        """a, b and the layout as a form takes them."""
        max_m = max_m or max(1, *self.routing.counts)
        a, sfa = (self.spread(x, max_m) for x in (self.a, self.sfa)) if form == "masked" else (self.a, self.sfa)
        return (a, sfa) if self.kind == "fp8" else a, self.weights, self.routing.layout(form, self.device)

    def run(self, form: str, max_m: int = 0, pad_d: int = 0, **options: Any) -> torch.Tensor:
        """Make the call with NaN around d, and in it before. Check that nothing was written where nothing may be."""
        a, b, layout = self.arguments(form, max_m)
        rows = (a[0] if self.kind == "fp8" else a).shape[:-1]
        d = guarded((*rows, self.n), BF16, self.device, strides(rows, self.n + pad_d))
        call(self.kind, form, a, b, d.tensor, layout, **options)
        d.check(f"d of {form} {self.routing}")
        bits = d.tensor.view(torch.int16)
        if form == "psum":
            assert bool((bits[self.routing.end :] == -1).all()), "rows past the last group were written"
        elif form == "masked":
            for group, count in enumerate(self.routing.counts):
                assert bool((bits[group, count:] == -1).all()), f"rows past masked_m of group {group} were written"
        else:
            assert bool((bits != -1).all()), "rows of padding were left as they were"
        return d.tensor


def strides(rows: Any, stride: int) -> tuple[int, ...]:
    """Strides of rows that are ``stride`` elements apart, groups right after one another."""
    return (stride, 1) if len(rows) == 1 else (rows[1] * stride, stride, 1)


def call(kind: str, form: str, a: Any, b: Any, d: Any, layout: torch.Tensor, **options: Any) -> None:
    """The public function of a form. ``expected_m`` is max_m unless it is given."""
    if form == "masked":
        expected_m = options.pop("expected_m", a[0].shape[-2] if kind == "fp8" else a.shape[1])
        getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_masked")(a, b, d, layout, expected_m, **options)
    else:
        function = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_contiguous")
        function(a, b, d, layout, use_psum_layout=form == "psum", **options)
