"""Kernels with mma.sync on the CPU, compared with float64: every layout, output and edge, and that faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation import Emulated
from torch import Tensor

from deep_gemm import arch, kernels
from deep_gemm.params import KernelParams
from deep_gemm.parts import Parts, parse
from deep_gemm.spec import GemmSpec, Operand

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}
SM80 = arch.get("sm_80")
SMS = 3
"""Fewer than tiles, so that CTAs have several."""

Make = Callable[..., Emulated]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Compiled kernels. Those without faults are kept."""
    kept: dict[KernelParams, Emulated] = {}

    def made(params: KernelParams, *edits: tuple[str, str, str]) -> Emulated:
        if edits:
            return Emulated(tmp_path_factory.mktemp("broken") / "kernel", params, *edits)
        if params not in kept:
            kept[params] = Emulated(tmp_path_factory.mktemp("kernel") / "kernel", params)
        return kept[params]

    return made


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
    known, spec = kernels.gemm_family(family), arch.get(target)
    return known.case(known.config(*tile, arch=spec), spec, **options)


def memory() -> Tensor:
    """What splits of K write their sums to; nothing clears it."""
    return torch.full((1 << 20,), 0xCD, dtype=torch.uint8)


def scales(rows: int, blocks: int) -> Tensor:
    """Of A: powers of two, so that all steps are exact; with NaN between the blocks of K."""
    whole = torch.full((blocks, rows + 5), float("nan"))
    whole[:, :rows] = 2.0 ** torch.randint(-2, 3, (blocks, rows))
    return whole[:, :rows].t()


def dense_spec(params: KernelParams, m: int, n: int, k: int) -> GemmSpec:
    of_a, of_b = ("1x128", "128x128") if params.dtype == "e4m3" else ("none", "none")
    a, b = (
        Operand(params.dtype, major, scaling)  # type: ignore[arg-type]
        for major, scaling in zip(params.majors, (of_a, of_b), strict=True)
    )
    d = Operand(params.output, "mn", aligned=params.store == "tma")  # type: ignore[arg-type]
    accumulate = "none" if params.adds_c == "none" else "from c"
    return GemmSpec(m, n, k, a, b, d, num_sms=SMS, accumulate=accumulate, epilogue=params.epilogue)  # type: ignore[arg-type]


def check_dense(emulated: Emulated, m: int, n: int, k: int, backwards: bool = False) -> None:
    """Compares D with the exact result, rounded once; what is not D's stays as it is."""
    torch.manual_seed(m * n + k)
    p = emulated.params
    spec = dense_spec(p, m, n, k)
    aligned = p.store == "tma"
    a, b = (
        integers(m, k, p.dtype, p.majors[0]),
        integers(n, k, p.dtype, p.majors[1]),
    )
    whole = sentinel(m, n, p.output, aligned)
    operands = {"a": a, "b": b, "d": whole[:, :n]}
    left, right, numbers = a.double(), b.double(), {}
    if p.dtype == "e4m3":
        blocks = -(-k // 128)
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
    if parts.residual:
        operands["residual"] = integers(m, n, p.output, padding=8 if aligned else 3)
        exact = exact + operands["residual"].double()
    emulated(spec, operands, numbers, backwards)
    assert torch.equal(whole[:, :n], exact.float().to(whole.dtype))
    assert whole[:, n:].isnan().all()


ALL = "alpha+rows+bias:f32+relu+residual"
TILES = kernels.gemm_family("mma_gemm").serving


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_each_tile(make: Make, tile: tuple[Any, ...]) -> None:
    emulated = make(case("mma_gemm", tile))
    check_dense(emulated, tile[0] + 36, tile[1] + 8, 5 * tile[2] + 20)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (64, 64, 64), (65, 72, 129), (200, 200, 40), (17, 136, 700)], ids=str)
@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
def test_layouts_and_edges(make: Make, form: str, sizes: tuple[int, int, int]) -> None:
    check_dense(make(case("mma_gemm", (64, 64, 64, 4, 2), form=form)), *sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f16", "output": "f16", "form": "tt"},
        {"output": "f32"},
        {"output": "f32", "adds_c": "threads", "store": "direct"},
        {"adds_c": "threads", "epilogue": ALL},
        {"dtype": "f16", "output": "f16", "store": "direct", "epilogue": ALL.replace("f32", "bf16")},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_outputs(make: Make, options: dict[str, Any]) -> None:
    text = options.get("epilogue")
    params = case("mma_gemm", (64, 128, 32, 4, 2), **options | ({"epilogue": parse(text)} if text else {}))
    for m, n, k in ((100, 136, 72), (3, 264, 100)):
        check_dense(make(params), m, n if params.store == "tma" else n + 3, k)


@pytest.mark.parametrize(
    ("tile", "options"),
    [
        ((16, 1), {}),
        ((16, 2), {"output": "f32", "adds_c": "threads", "epilogue": ALL}),
        ((32, 1), {"form": "nn", "dtype": "f16", "output": "f16", "adds_c": "threads"}),
        ((64, 1), {"epilogue": ALL}),
    ],
    ids=str,
)
def test_few_rows(make: Make, tile: tuple[Any, ...], options: dict[str, Any]) -> None:
    """K is split where there are fewer tiles than places, and the sums of the parts are added in order."""
    emulated = make(case("mma_swapped", tile, **options))
    for m, n, k in ((1, 64, 1000), (tile[0], 200, 72), (tile[0] - 3, 75, 520), (tile[0] + 1, 128, 64)):
        check_dense(emulated, min(m, 64), n, k)
        check_dense(emulated, min(m, 64), n, k, backwards=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
@pytest.mark.parametrize(
    ("family", "tile", "options"),
    [
        ("mma_fp8", (64, 64, 128, 4, 1), {}),
        ("mma_fp8", (128, 128, 128, 8, 1), {"output": "f32", "adds_c": "threads", "store": "direct"}),
        ("mma_fp8_swapped", (16, 1), {}),
        ("mma_fp8_swapped", (64, 1), {"output": "f32", "adds_c": "threads", "epilogue": ALL}),
    ],
    ids=str,
)
def test_fp8(make: Make, family: str, tile: tuple[Any, ...], options: dict[str, Any], target: str) -> None:
    emulated = make(case(family, tile, target, **options))
    for m, n, k in ((1, 64, 1024), (50, 200, 128), (61, 264, 432)):
        check_dense(emulated, m, n, k)


def test_each_byte_is_widened_to_its_value(make: Make) -> None:
    """By FP16, where there are no products of FP8; NaN stays NaN."""
    emulated = make(case("mma_fp8_swapped", (16, 1), output="f32"))
    a = torch.zeros(16, 16, dtype=torch.uint8)
    a[0, 0] = 0x38  # 1.0
    b, d = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 16), torch.empty(1, 256)
    spec = dense_spec(emulated.params, 1, 256, 16)
    one = a[:1].view(torch.float8_e4m3fn)
    operands = {"a": one, "b": b.view(torch.float8_e4m3fn), "d": d, "memory": memory()}
    emulated(spec, operands | {"sfa": torch.ones(1, 1), "sfb": torch.ones(2, 1)})
    exact = b.view(torch.float8_e4m3fn)[:, 0].float()
    exact[b[:, 1] & 0x7F == 0x7F] = float("nan")
    torch.testing.assert_close(d[0], exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize(
    ("family", "tile", "options"),
    [
        ("mma_grouped", (64, 64, 64, 4, 1), {"epilogue": "bias:f32+relu"}),
        ("mma_grouped", (64, 128, 32, 4, 1), {"form": "nn", "store": "direct"}),
        ("mma_fp8_grouped", (64, 128, 128, 4, 1), {}),
    ],
    ids=str,
)
def test_groups(make: Make, family: str, tile: tuple[Any, ...], options: dict[str, Any], form: str) -> None:
    """Rows of one group never meet the matrix of another; rows that do not exist are neither read nor written."""
    p = case(family, tile, "sm_89", grouping=form, **options)
    sizes, n, k, alignment = [130, 0, 64, 5], 136, 272, 64
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
    if fp8:
        blocks = -(-k // 128)
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
            right = right * of_b[group].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        exact[start : start + size] = left @ right.t()
        if p.epilogue:
            exact[start : start + size] = (exact[start : start + size] + bias[group]).relu()
    of = ("1x128", "128x128") if fp8 else ("none", "none")
    spec = GemmSpec(
        *(192 if form == "masked" else rows, n, k),
        *(Operand(p.dtype, "k", of[0]), Operand(p.dtype, major, of[1]), Operand(p.output, "mn", aligned=aligned)),  # type: ignore[arg-type]
        num_sms=SMS,
        groups=len(sizes),
        grouping=form,  # type: ignore[arg-type]
        alignment=alignment,
        epilogue=p.epilogue,
    )
    make(p)(spec, operands)
    there = labels >= 0
    assert torch.equal(whole[there, :n], exact[there].float().to(whole.dtype))
    assert whole[:, n:].isnan().all()
    if form != "contiguous":  # padding between labels may be written
        assert whole[~there].isnan().all()


def test_nothing_depends_on_the_order_of_warps(make: Make) -> None:
    check_dense(make(case("mma_gemm", (128, 128, 64, 8, 1))), 130, 200, 300, backwards=True)


OPERAND, GEMM, OUTPUT, PTX = "mma_operand.cuh", "mma_gemm.cuh", "mma_output.cuh", "mma_ptx.cuh"
WAIT = "          wait_for_copies<kStages - 2>();\n          __syncthreads();\n"
FAULTS = {
    "a swizzle of readers alone": (OPERAND, "kAtomBytes + permuted(at, depth) * 16;", "kAtomBytes + depth * 16;"),
    "a step in the wrong bits": (OPERAND, "(place ^ (step * 32)) + tile", "(place ^ (step * 64)) + tile"),
    "halves of fragments in the other order": (OPERAND, "row = kLeft ? middle : outer, depth", "row = outer, depth"),
    "rows past the edge are read": (OPERAND, "const u32 count = exists ? ", "const u32 count = true ? "),
    "bytes past the edge are read": (OPERAND, "left < 0 ? 0 : left > 16 ? 16 : left", "left < 0 ? 0 : 16"),
    "a wait for one group less": (GEMM, WAIT, WAIT.replace("2", "1")),
    "no barrier": (GEMM, WAIT, WAIT.splitlines()[0]),
    "no wait before the first read": (
        GEMM,
        "    wait_for_copies<kStages - 2>();\n    __syncthreads();\n    F",
        "    F",
    ),
    "copies before all have read": (GEMM, "stage + 1 < kStages; ++stage)", "stage < kStages; ++stage)"),
    "rows past the edge are stored": (OUTPUT, "if (y < end && x < n) store_words", "if (x < n) store_words"),
    "columns past the edge are stored": (OUTPUT, "if (y < end && x < n) store_words", "if (y < end) store_words"),
    "a wrong transpose in four lanes": (OUTPUT, "x[i + 2], upper, 2);", "x[i + 2], odd, 2);"),
    "an instruction for the other layout": (
        PTX,
        '("ldmatrix.sync.aligned.m8n8.x4.shared',
        '("ldmatrix.sync.aligned.m8n8.x4.trans.shared',
    ),
    "operands in another order": (
        PTX,
        "bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5,",
        "bf16.bf16.f32 {%0, %1, %2, %3}, {%5, %4,",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(make: Make, fault: str) -> None:
    """The harness must be able to fail: each of these would be a wrong number or a race on a GPU."""
    emulated = make(case("mma_gemm", (64, 64, 64, 4, 2)), FAULTS[fault])
    with pytest.raises((RuntimeError, AssertionError)):
        check_dense(emulated, 100, 136, 500)
