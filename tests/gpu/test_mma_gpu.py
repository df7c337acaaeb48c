"""The kernels with mma.sync on a GPU: those of its target, or on Hopper, where they are not chosen, built for it. They
compute what they compute in emulation, and whole calls have exact results when no other family is there."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forced import load, nvrtc
from gpu_cases import DEVICE
from headers import edited_headers
from mma_cases import ALL, case, check_dense, check_groups
from torch import Tensor

import deep_gemm
from deep_gemm import arch, kernels
from deep_gemm.jit import Builder
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.kernels.portable import PORTABLE
from deep_gemm.params import KernelParams
from deep_gemm.parts import parse
from deep_gemm.runtime import calls, engine
from deep_gemm.select import heuristic
from deep_gemm.spec import GemmSpec

BF16 = torch.bfloat16


def target() -> str:
    return arch.for_device(0).name


def on_gpu(x: Tensor) -> Tensor:
    """A copy with the same strides, and with what is between rows."""
    whole = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8)
    whole.untyped_storage().copy_(x.untyped_storage())
    return whole.to(DEVICE).view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


class OnGpu:
    """A kernel of ``params``, as `Run` of mma_cases."""

    def __init__(self, params: KernelParams, builder: Builder | None = None) -> None:
        self.params = params
        binary = engine.build(params) if builder is None else builder.build(engine.build_request(params))
        self.function = load(params, binary)

    def __call__(
        self,
        spec: GemmSpec,
        operands: Mapping[str, Tensor],
        numbers: Mapping[str, Any] | None = None,
        backwards: bool = False,
    ) -> None:
        strides = {name: tuple(x.stride()) for name, x in operands.items()}
        plan = kernels.get(self.params.kernel).launch_plan(self.params, spec, strides, numbers=numbers or {})
        there = {name: on_gpu(x) for name, x in operands.items()}
        addresses = {name: x.data_ptr() for name, x in there.items()}
        Launch(self.function, plan.shape, torch.cuda.current_stream().cuda_stream, plan.parameters, addresses)()
        operands["d"].untyped_storage().copy_(there["d"].untyped_storage())


DENSE: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    **{f"tile {tile}": ("mma_gemm", tile, {}) for tile in kernels.gemm_family("mma_gemm").serving},
    **{f"form {form}": ("mma_gemm", (128, 256, 32, 8, 1), {"form": form}) for form in ("nn", "tn", "tt")},
    "fp16, an unaligned d": ("mma_gemm", (128, 128, 64, 8, 1), {"dtype": "f16", "output": "f16", "store": "direct"}),
    "float32, c": ("mma_gemm", (256, 128, 32, 8, 1), {"output": "f32", "adds_c": "threads"}),
    "an epilogue": ("mma_gemm", (128, 128, 32, 4, 2), {"adds_c": "threads", "epilogue": parse(ALL)}),
    **{f"few rows {tile}": ("mma_swapped", tile, {}) for tile in kernels.gemm_family("mma_swapped").serving},
    **{f"decode {tile}": ("mma_decode", tile, {}) for tile in kernels.gemm_family("mma_decode").serving},
    "decode, nn": ("mma_decode", (16, 64, 4, 1), {"form": "nn"}),
    "decode, an epilogue": (
        "mma_decode",
        (16, 32, 8, 1),
        {"output": "f32", "adds_c": "threads", "epilogue": parse(ALL)},
    ),
    "few rows, nn": ("mma_swapped", (32, 1), {"form": "nn", "output": "f32", "adds_c": "threads"}),
    **{f"fp8 {tile}": ("mma_fp8", tile, {}) for tile in kernels.gemm_family("mma_fp8").serving},
    **{f"decode fp8 {tile}": ("mma_fp8_decode", tile, {}) for tile in kernels.gemm_family("mma_fp8_decode").serving},
    **{f"ue8m0 {tile}": ("mma_fp8", tile, {"scaling": "ue8m0"}) for tile in kernels.gemm_family("mma_fp8").serving},
    **{
        f"decode ue8m0 {tile}": ("mma_fp8_decode", tile, {"scaling": "ue8m0"})
        for tile in kernels.gemm_family("mma_fp8_decode").serving
    },
    "few rows of ue8m0": ("mma_fp8_swapped", (32, 1), {"scaling": "ue8m0"}),
    "ue8m0, an epilogue": (
        *("mma_fp8", (128, 64, 128, 4, 1)),
        {"scaling": "ue8m0", "output": "f32", "adds_c": "threads", "epilogue": parse(ALL)},
    ),
    "few rows of fp8": ("mma_fp8_swapped", (32, 2), {}),
    "64 rows of fp8": ("mma_fp8_swapped", (64, 1), {"output": "f32", "adds_c": "threads", "epilogue": parse(ALL)}),
}
SIZES = ((1, 64, 1), (63, 200, 72), (300, 520, 1000), (1000, 1032, 300))
FEW = ((1, 64, 1000), (16, 1000, 4096), (13, 75, 520), (64, 2112, 7168))


@pytest.mark.parametrize("name", DENSE)
def test_a_product_is_exact(name: str) -> None:
    family, tile, options = DENSE[name]
    params = case(family, tile, target(), **options)
    if why := kernels.gemm_family(family).illegal(params.gemm, arch.get(target())):
        pytest.skip(why)
    run, few = OnGpu(params), "swapped" in family or "decode" in family
    for m, n, k in FEW if few else SIZES:
        k = -(-k // 16) * 16 if "fp8" in family else k
        check_dense(run, min(m, tile[0]) if few else m, n + 3 * (run.params.store == "direct"), k)


def test_fp8_is_widened_by_integers(tmp_path: Path) -> None:
    """As on targets without the instruction that does it."""
    edits = (
        ("return kCapability >= 890 ?", "return false ?"),
        ("if constexpr (kCapability >= 890)", "if constexpr (false)"),
    )
    builder = Builder(compiler=nvrtc(), include_dir=edited_headers(tmp_path / "include", "mma_decode.cuh", *edits))
    for tile in kernels.gemm_family("mma_fp8_decode").serving:
        params = case("mma_fp8_decode", tile, target())
        run = OnGpu(params, builder)
        for m, n, k in FEW:
            check_dense(run, min(m, tile[0]), n, -(-k // 16) * 16)


@pytest.mark.parametrize("form", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize(
    ("family", "scaling"),
    [(family.name, scaling) for family in PORTABLE if "grouped" in family.name for scaling in family.scalings],
)
def test_groups_are_exact(family: str, scaling: str, form: str) -> None:
    for tile in kernels.gemm_family(family).serving:
        run = OnGpu(case(family, tile, target(), grouping=form, scaling=scaling))
        check_groups(run, [130, 0, 64, 5, 192, 1], 520, 1072 if "fp8" in family else 1000)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other families of products are there, also on Hopper."""
    known = {each.name: replace(each, archs=(*each.archs, target())) for each in PORTABLE}
    monkeypatch.setattr(kernels, "gemms", lambda: known)
    for name in ("_functions", "_plans", "_castings"):
        monkeypatch.setattr(engine, name, {})
    heuristic._rank.cache_clear()
    calls.forget_all()
    yield
    heuristic._rank.cache_clear()
    calls.forget_all()


def integers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randint(-3, 4, shape, device=DEVICE).to(dtype)


def fp8(*shape: int, block: int = 1) -> tuple[Tensor, Tensor]:
    """Integers, and scales that are powers of two."""
    *groups, rows, columns = shape
    scales = 2.0 ** torch.randint(-2, 3, (*groups, -(-rows // block), -(-columns // 128)), device=DEVICE)
    return integers(*shape, dtype=torch.float8_e4m3fn), scales


def packed(*shape: int) -> tuple[Tensor, Tensor]:
    """The same, of UE8M0."""
    values, scales = fp8(*shape)
    return values, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)


def row_major(*shape: int) -> tuple[Tensor, Tensor]:
    """As `per_token_cast_to_fp8` packs them, so that they are transposed first."""
    values, scales = packed(*shape)
    return values, scales.contiguous()


def value(x: Tensor | tuple[Tensor, Tensor], block: int = 1) -> Tensor:
    if isinstance(x, Tensor):
        return x.double()
    values, scales = x
    if scales.dtype == torch.int32:
        scales, block = deep_gemm.utils.math.unpack_ue8m0_from_int(scales), 1
    rows, columns = values.shape[-2:]
    each = scales.double().repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
    return values.double() * each


MULTIPLY: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "bf16": (deep_gemm.bf16_gemm_nt, integers, integers),
    "fp8": (deep_gemm.fp8_gemm_nt, fp8, lambda *shape: fp8(*shape, block=128)),
    "ue8m0": (deep_gemm.fp8_gemm_nt, row_major, packed),
}


@pytest.mark.parametrize("kind", MULTIPLY)
@pytest.mark.parametrize("m", [1, 7, 16, 17, 48, 64, 65, 200, 1000, 4096])
def test_calls_are_exact_and_repeat(portable: None, kind: str, m: int) -> None:
    call, of_a, of_b = MULTIPLY[kind]
    for n, k in ((512, 7168), (2112, 512), (4096, 2048)):
        a, b = of_a(m, k), of_b(n, k)
        exact = (value(a) @ value(b, 128).t()).float().to(BF16)
        found = [torch.full((m, n), float("nan"), dtype=BF16, device=DEVICE) for _ in range(3)]
        for d in found:
            call(a, b, d)
        assert all(torch.equal(d, exact) for d in found)
    assert {params.kernel for params, _ in engine._functions if "gemm" in params.kernel} <= {f.name for f in PORTABLE}


def test_a_graph_replays_parts_of_k(portable: None) -> None:
    """Counts of parts are zero again after each launch, so the memory of a call can be used again."""
    a, b, d = integers(16, 7168), integers(512, 7168), torch.empty(16, 512, dtype=BF16, device=DEVICE)
    deep_gemm.bf16_gemm_nt(a, b, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            deep_gemm.bf16_gemm_nt(a, b, d)
    for _ in range(20):
        a.copy_(integers(16, 7168))
        graph.replay()
        assert torch.equal(d, (a.double() @ b.double().t()).float().to(BF16))


@pytest.mark.parametrize("kind", MULTIPLY)
@pytest.mark.parametrize("sizes", [[128] * 4, [1, 0, 300, 77], [0, 0, 0, 1]], ids=str)
def test_calls_of_groups_are_exact(portable: None, kind: str, sizes: list[int]) -> None:
    of_a, of_b = MULTIPLY[kind][1:]
    n, k, most = 2048, 1024, 512
    b = of_b(len(sizes), n, k)
    multiply = {
        "bf16": (deep_gemm.m_grouped_bf16_gemm_nt_contiguous, deep_gemm.m_grouped_bf16_gemm_nt_masked),
        "fp8": (deep_gemm.m_grouped_fp8_gemm_nt_contiguous, deep_gemm.m_grouped_fp8_gemm_nt_masked),
    }[kind.replace("ue8m0", "fp8")]
    padded = [-(-size // 128) * 128 for size in sizes]
    labels = (
        torch.cat(
            [
                torch.where(torch.arange(rows) < size, group, -1)
                for group, (rows, size) in enumerate(zip(padded, sizes, strict=True))
            ]
        )
        .int()
        .to(DEVICE)
    )
    a = of_a(len(labels), k)
    d = torch.full((len(labels), n), float("nan"), dtype=BF16, device=DEVICE)
    multiply[0](a, b, d, labels)
    right = value(b, 128)
    exact = torch.stack([value(a)[row] @ right[label].t() for row, label in enumerate(labels.tolist()) if label >= 0])
    assert torch.equal(d[labels >= 0], exact.float().to(BF16))

    a, counts = of_a(len(sizes), most, k), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    for expected in (8, 32, 128):  # few rows take tiles with swapped operands
        d = torch.full((len(sizes), most, n), float("nan"), dtype=BF16, device=DEVICE)
        multiply[1](a, b, d, counts, expected)
        for group, size in enumerate(sizes):
            exact = value(a)[group, :size] @ right[group].t()
            assert torch.equal(d[group, :size], exact.float().to(BF16))
            assert d[group, size:].isnan().all()
