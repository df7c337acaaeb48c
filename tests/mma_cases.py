"""Exact checks of kernels with mma.sync, on a CPU in emulation and on a GPU."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from deep_gemm import arch
from deep_gemm.expression import Expression
from deep_gemm.kernels.portable import PORTABLE
from deep_gemm.layout import get_mn_major_tma_aligned_packed_ue8m0_tensor
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts
from deep_gemm.spec import SCALINGS, GemmSpec, Operand, Scaling

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}
SMS = 3
"""Fewer than tiles, so that CTAs have several."""
ALL = "alpha+rows+bias:f32+relu+residual"
"""An epilogue whose steps are exact."""


OWN = Expression("own", "return x * (column > row ? v : w);", ("v",), ("w",))
"""A user's expression of the place, a vector of rows and one of columns."""


class Run(Protocol):
    """A kernel that can be run; ``operands`` are on the CPU."""

    params: KernelParams

    def __call__(
        self,
        spec: GemmSpec,
        operands: Mapping[str, Tensor],
        numbers: Mapping[str, Any] | None = None,
        backwards: bool = False,
    ) -> None: ...


def integers(rows: int, columns: int, dtype: str, major: str = "k", padding: int = 8) -> Tensor:
    """A matrix of small integers, whose sums of products are exact, with NaN in the padding of rows. 8-bit elements are
    padded to 16."""
    inner, outer = (columns, rows) if major == "k" else (rows, columns)
    step = 16 if dtype == "e4m3" else 8
    line = -(-inner // step) * step + padding * step // 8
    whole = torch.full((outer, line), float("nan")).to(DTYPES[dtype])
    whole[:, :inner] = torch.randint(-3, 4, (outer, inner)).to(DTYPES[dtype])
    return whole[:, :inner] if major == "k" else whole[:, :inner].t()


def sentinel(rows: int, columns: int, dtype: str, aligned: bool) -> Tensor:
    """A D of NaN, with or without rows of whole pieces of 16 bytes."""
    return torch.full((rows, columns + (8 if aligned else 3)), float("nan")).to(DTYPES[dtype])


def case(family: str, tile: tuple[Any, ...], target: str = "sm_80", **options: Any) -> KernelParams:
    known, spec = next(each for each in PORTABLE if each.name == family), arch.get(target)
    return known.case(known.config(*tile, arch=spec), spec, **options)


def memory() -> Tensor:
    """What splits of K write their sums to; nothing clears it."""
    return torch.full((1 << 20,), 0xCD, dtype=torch.uint8)


def scales(rows: int, blocks: int) -> Tensor:
    """Of A: powers of two, so that all steps are exact; with NaN between the blocks of K."""
    whole = torch.full((blocks, rows + 5), float("nan"))
    whole[:, :rows] = 2.0 ** torch.randint(-2, 3, (blocks, rows))
    return whole[:, :rows].t()


def exponents(rows: int, blocks: int, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Scales of 1x128 that are powers of two, (groups, rows, blocks), and their exponents as kernels take them. Those
    of blocks that are not there would make products infinite."""
    sf = 2.0 ** torch.randint(-2, 3, (groups, rows, blocks))
    whole = torch.nn.functional.pad(sf, (0, -blocks % 4), value=2.0**127)
    return sf, get_mn_major_tma_aligned_packed_ue8m0_tensor(whole)


def scalings(params: KernelParams) -> tuple[Scaling, Scaling]:
    """Those of A and B."""
    return next(pair for pair, name in SCALINGS.items() if name == params.scaling)


def dense_spec(params: KernelParams, m: int, n: int, k: int) -> GemmSpec:
    a, b = (
        Operand(params.dtype, major, scaling)  # type: ignore[arg-type]
        for major, scaling in zip(params.majors, scalings(params), strict=True)
    )
    d = Operand(params.output, "mn", aligned=params.store == "tma")  # type: ignore[arg-type]
    accumulate = "none" if params.adds_c == "none" else "from c"
    return GemmSpec(m, n, k, a, b, d, num_sms=SMS, accumulate=accumulate, epilogue=params.epilogue)  # type: ignore[arg-type]


def check_dense(run: Run, m: int, n: int, k: int, backwards: bool = False) -> None:
    """Compares D with the exact result, rounded once; what is not D's stays as it is."""
    torch.manual_seed(m * n + k)
    p = run.params
    spec = dense_spec(p, m, n, k)
    aligned = p.store == "tma"
    a, b = (
        integers(m, k, p.dtype, p.majors[0]),
        integers(n, k, p.dtype, p.majors[1]),
    )
    whole = sentinel(m, n, p.output, aligned)
    operands = {"a": a, "b": b, "d": whole[:, :n]}
    left, right, numbers = a.double(), b.double(), {}
    blocks = -(-k // 128)
    if p.scaling == "ue8m0":
        for name, rows in (("a", m), ("b", n)):
            sf, packed = exponents(rows, blocks)
            operands[f"sf{name}"] = packed[0]
            each = sf[0].double().repeat_interleave(128, 1)[:, :k]
            left, right = (left * each, right) if name == "a" else (left, right * each)
    elif p.dtype == "e4m3":
        operands |= {"sfa": scales(m, blocks), "sfb": 2.0 ** torch.randint(-2, 3, (-(-n // 128), blocks))}
        left = left * operands["sfa"].double().repeat_interleave(128, 1)[:, :k]
        right = right * operands["sfb"].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    if p.gemm.parts:
        operands["memory"] = memory()
    exact = left @ right.t()
    parts: Parts = p.epilogue
    if parts.alpha:
        numbers["alpha"] = 0.5
        exact = exact * 0.5
    if parts.row_factor:
        operands["row_factor"] = torch.randint(1, 4, (m,)).float()
        exact = exact * operands["row_factor"].double()[:, None]
    if p.adds_c == "threads":
        operands["c"] = integers(m, n, p.output, padding=8 if aligned else 3)
        exact = exact + operands["c"].double()
    if parts.bias:
        operands["bias"] = torch.randint(-9, 9, (n,)).to(DTYPES[parts.bias])
        exact = exact + operands["bias"].double()
    if parts.activation == "relu":
        exact = exact.relu()
    if parts.expression == OWN:
        v, w = (torch.randint(-9, 9, (count,)).float() for count in (m, n))
        operands |= {"vector_0": v, "vector_1": w}
        later = torch.arange(n) > torch.arange(m)[:, None]
        exact = exact * torch.where(later, v[:, None], w[None]).double()
    if parts.residual:
        operands["residual"] = integers(m, n, p.output, padding=8 if aligned else 3)
        exact = exact + operands["residual"].double()
    run(spec, operands, numbers, backwards)
    assert torch.equal(whole[:, :n], exact.float().to(whole.dtype))
    assert whole[:, n:].isnan().all()


def check_groups(run: Run, sizes: list[int], n: int, k: int) -> None:
    """Rows of one group never meet the matrix of another; rows that do not exist are neither read nor written. A group
    has at most 192 rows."""
    p = run.params
    form, alignment = p.grouping, 128  # so that whole tiles of few rows are padding
    torch.manual_seed(7)
    starts, rows = [], 0
    for size in sizes:
        starts.append(rows)
        rows += 192 if form == "masked" else -(-size // alignment) * alignment
    fp8, aligned = p.dtype == "e4m3", p.store == "tma"
    a = integers(rows, k, p.dtype)
    labels = torch.full((rows,), -1, dtype=torch.int32)
    for group, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        labels[start : start + size] = group
    a.view(torch.uint8 if fp8 else torch.int16)[labels < 0] = 255 if fp8 else -1  # NaN
    major = p.majors[1]
    each = [integers(n, k, p.dtype, major, padding=0) for _ in sizes]
    b = torch.stack([x if major == "k" else x.t() for x in each])
    b = b if major == "k" else b.mT
    layout = {
        "contiguous": labels,
        "psum": torch.tensor([start + size for start, size in zip(starts, sizes, strict=True)], dtype=torch.int32),
        "masked": torch.tensor(sizes, dtype=torch.int32),
    }[form]
    whole = sentinel(rows, n, p.output, aligned)
    flat = b.flatten(0, 1) if major == "k" else b.mT.flatten(0, 1).t()
    operands = {"a": a, "b": flat, "d": whole[:, :n], "layout": layout}
    exact = torch.zeros(rows, n, dtype=torch.double)
    of_a = of_b = None
    blocks, step = -(-k // 128), 128
    if p.scaling == "ue8m0":
        masked, step = form == "masked", 1
        whole_of_a, operands["sfa"] = exponents(*(192 if masked else rows, blocks, len(sizes) if masked else 1))
        of_a, (of_b, operands["sfb"]) = whole_of_a.flatten(0, 1), exponents(n, blocks, len(sizes))
    elif fp8:
        of_b = 2.0 ** torch.randint(-2, 3, (len(sizes), -(-n // 128), blocks))
        of_a = 2.0 ** torch.randint(-2, 3, (rows, blocks))
        operands["sfb"] = of_b
        by_group = (
            of_a.view(len(sizes), 192, blocks).mT.flatten(0, 1).contiguous().t()
            if form == "masked"
            else of_a.t().contiguous().t()
        )
        operands["sfa"] = by_group
    bias = torch.randint(-9, 9, (len(sizes), n)).float()
    if p.epilogue:
        operands["bias"] = bias
    for group, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        left, right = a[start : start + size].double(), each[group].double()
        if of_a is not None and of_b is not None:
            left = left * of_a[start : start + size].double().repeat_interleave(128, 1)[:, :k]
            right = right * of_b[group].double().repeat_interleave(step, 0)[:n].repeat_interleave(128, 1)[:, :k]
        exact[start : start + size] = left @ right.t()
        if p.epilogue:
            exact[start : start + size] = (exact[start : start + size] + bias[group]).relu()
    of = scalings(p)
    spec = GemmSpec(
        *(192 if form == "masked" else rows, n, k),
        *(Operand(p.dtype, "k", of[0]), Operand(p.dtype, major, of[1]), Operand(p.output, "mn", aligned=aligned)),  # type: ignore[arg-type]
        num_sms=SMS,
        groups=len(sizes),
        grouping=form,  # type: ignore[arg-type]
        alignment=alignment,
        epilogue=p.epilogue,
    )
    run(spec, operands)
    there = labels >= 0
    assert torch.equal(whole[there, :n], exact[there].float().to(whole.dtype))
    assert whole[:, n:].isnan().all()
    if form != "contiguous":  # padding between labels may be written
        assert whole[~there].isnan().all()
