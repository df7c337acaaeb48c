"""Products of E5M2 (gradients), alone or with E4M3: what is launched, what is computed, and what is refused."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced import FP8, by_rows, dtypes_of
from gpu_fakes import FakeGpu
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import UnsupportedError, arch, kernels, ops, select
from deep_gemm.aot import build, workload
from deep_gemm.ops.table import E5M2
from deep_gemm.runtime import calls, engine
from deep_gemm.testing import assert_close_to_exact

M, N, K = 24, 136, 272
DTYPES = {f"{of_a} {of_b}": (FP8[of_a], FP8[of_b]) for of_a, of_b in E5M2}
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]
Pair = tuple[torch.Tensor, torch.Tensor]


def operand(rows: int, dtype: torch.dtype, k: int = K) -> Pair:
    return by_rows(torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)), dtype)


def product(a: Pair, b: Pair, **more: Any) -> torch.Tensor:
    d = torch.empty(len(a[0]), len(b[0]), dtype=more.pop("dtype", torch.bfloat16))
    deep_gemm.fp8_gemm_nt(a, b, d, **more)
    return d


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_the_reference_multiplies_values_and_scales(dtypes: str, output: torch.dtype) -> None:
    a, b = (operand(rows, dtype) for rows, dtype in zip((M, N), DTYPES[dtypes], strict=True))
    exact = (a[0].double() * a[1]) @ (b[0].double() * b[1]).t()
    assert torch.equal(product(a, b, dtype=output), exact.to(output))
    assert_close_to_exact(product(a, b, dtype=output), *a, *b, scaling=("row", "row"))
    one = torch.tensor(0.25)
    whole = (a[0].double() @ b[0].double().t() / 16).to(output)
    assert torch.equal(product((a[0], one), (b[0], one[None]), dtype=output), whole)


def test_infinities_of_gradients_stay() -> None:
    """E5M2 has them, and E4M3 has not: loss scaling looks for them."""
    a, b = (torch.ones(M, K).to(FP8["e5m2"]), torch.ones(M, 1)), operand(N, FP8["e4m3"])
    a[0][3, 5] = torch.inf
    d = product(a, (b[0].abs(), b[1]))
    assert bool(d[3].isinf().any())
    assert bool(torch.cat([d[:3], d[4:]]).isfinite().all())


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_call_launches_a_kernel_of_these_types(gpu: FakeGpu, dtypes: str, output: torch.dtype) -> None:
    """Few rows of A make it the second operand of wgmma."""
    for m, aligned in itertools.product((8, 4096), (True, False)):
        a, b = (operand(rows, dtype) for rows, dtype in zip((m, N), DTYPES[dtypes], strict=True))
        d = torch.empty(m, N + 16 - aligned, dtype=output)[:, :N]
        deep_gemm.fp8_gemm_nt(a, b, d)
        spec = gpu.launched[-1].spec
        assert (spec.a.dtype, spec.b.dtype) == tuple(dtypes.split())
        config = select.rank(spec, arch.SM90)[0].config
        params = engine.kernel_params(spec, config, arch.SM90)
        assert dtypes_of(params) == (spec.a.dtype, spec.b.dtype)
        of_a, of_b = dtypes.split()[::-1] if config.swap_ab else dtypes.split()
        source = engine.build_request(params).source
        assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(\S+) ", source)) == {f"k32.f32.{of_a}.{of_b}"}
        assert kernels.get(params.kernel).kernel_name(params).startswith(f"{params.dtype}_gemm_rowwise_{spec.d.dtype}")


def test_choices_are_those_of_e4m3(gpu: FakeGpu) -> None:
    for m, n, k in ((1, 4096, 7168), (64, 7168, 2048), (333, 576, 7168), (4096, 7168, 2048)):
        asked = [ops.spec(m, n, k, 132, name) for name in (ops.ROWWISE, *ops.ROWWISE_E5M2)]
        assert len({select.rank(spec, arch.SM90)[0].config for spec in asked}) == 1


def test_the_dtype_of_a_warm_call_is_seen(gpu: FakeGpu) -> None:
    """The same bytes at the same addresses, as another dtype."""
    (a, sfa), b, d = operand(M, FP8["e4m3"]), operand(N, FP8["e4m3"]), torch.empty(M, N, dtype=torch.bfloat16)
    given = {name: a.view(FP8[name]) for name in FP8}
    for name in ["e4m3", "e4m3", "e4m3", "e5m2"] * 3:
        deep_gemm.fp8_gemm_nt((given[name], sfa), b, d)
        assert gpu.launched[-1].spec.a.dtype == name


@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
def test_other_layouts_are_transposed_first(gpu: FakeGpu, form: str) -> None:
    calls.forget_all()
    (a, sfa), (b, sfb) = operand(M + 8, FP8["e5m2"]), operand(N + 8, FP8["e4m3"])
    x = (a.t().contiguous(), sfa.t()) if form[0] == "t" else (a, sfa)
    y = (b.t().contiguous(), sfb.t()) if form[1] == "n" else (b, sfb)
    getattr(deep_gemm, f"fp8_gemm_{form}")(x, y, torch.empty(M + 8, N + 8))
    transposes = (form[0] == "t") + (form[1] == "n")
    assert [launched.kernel for launched in gpu.launched] == ["transpose bytes"] * transposes + ["gemm"]
    assert gpu.launched[-1].spec.dtypes == "e5m2_e4m3"


def test_fake_tensors_are_checked() -> None:
    with FakeTensorMode():
        a, b = ((torch.empty(rows, K, dtype=FP8["e5m2"]), torch.empty(rows, 1)) for rows in (M, N))
        product(a, b)
        with pytest.raises(UnsupportedError, match=r"a is torch.float8_e5m2. It is multiplied with one scale"):
            product((a[0], torch.empty(M, 3)), b)


BLOCKS = torch.ones(M, 3), torch.ones(2, 3)
GRADIENT, WEIGHT = torch.ones(M, K).to(FP8["e5m2"]), torch.ones(N, K).to(FP8["e4m3"])
ROWS = torch.ones(M, 1), torch.ones(N, 1)
GROUPS = torch.stack([WEIGHT, WEIGHT]), torch.ones(2, 2, 3)
ENDS = torch.tensor([128, 256], dtype=torch.int32)
LONG = torch.ones(256, K).to(FP8["e5m2"]), torch.ones(256, 3)
NEEDS_ROWS, ELSEWHERE = (
    "without a recipe. But ",
    "which only fp8_gemm_nt and its forms multiply, with scales of rows",
)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "blocks": (lambda: product((GRADIENT, BLOCKS[0]), (WEIGHT, BLOCKS[1])), f"{NEEDS_ROWS}the scales of a and b have"),
    "rows of one": (lambda: product((GRADIENT, ROWS[0]), (WEIGHT, BLOCKS[1])), f"{NEEDS_ROWS}the scales of a and b"),
    "1D1D": (lambda: product((GRADIENT, ROWS[0]), (WEIGHT, ROWS[1]), recipe=(1, 1, 128)), f"{NEEDS_ROWS}a recipe asks"),
    "b": (lambda: product((WEIGHT[:M], BLOCKS[0]), (WEIGHT.to(FP8["e5m2"]), BLOCKS[1])), "b is torch.float8_e5m2. It"),
    "BF16": (lambda: deep_gemm.bf16_gemm_nt(GRADIENT, WEIGHT, torch.empty(M, N).bfloat16()),
        "fp8_gemm_nt, with scales, takes torch.float8_e5m2"),
    "groups": (lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(LONG, GROUPS, torch.empty(256, N).bfloat16(),
        torch.zeros(256, dtype=torch.int32)), ELSEWHERE),
    "masked": (lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked((LONG[0][None], LONG[1][None]), (GROUPS[0][:1],
        GROUPS[1][:1]), torch.empty(1, 256, N).bfloat16(), ENDS[:1], 4), ELSEWHERE),
    "batch": (lambda: deep_gemm.fp8_bmm((GRADIENT[None], BLOCKS[0][None]), (WEIGHT[None], BLOCKS[1][None]),
        torch.empty(1, M, N).bfloat16()), ELSEWHERE),
    "along K": (lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous((GRADIENT.flatten(), BLOCKS[0]),
        (WEIGHT.flatten(), torch.ones(N, 3)), torch.zeros(1, M, N), [K], ENDS[:1]), ELSEWHERE),
    "heads": (lambda: deep_gemm.fp8_gemm_nt_skip_head_mid((GRADIENT, BLOCKS[0]), (WEIGHT, BLOCKS[1]),
        torch.empty(M, 200).bfloat16(), (64, 64, 72)), ELSEWHERE),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_no_e5m2_says_what_does(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(deep_gemm.DeepGemmError, match=re.escape(words)) as caught:
        call()
    assert "torch.float8_e5m2" in str(caught.value)
    if name != "BF16":
        assert isinstance(caught.value, UnsupportedError)
        assert "deep_gemm.quantize.rows returns" in str(caught.value)


def test_kernels_of_other_gpus_refuse_it_with_their_reasons() -> None:
    asked = ops.spec(M, N, K, 108, next(iter(ops.ROWWISE_E5M2)))
    with pytest.raises(UnsupportedError, match=r"e5m2 x e4m3.*needs another GPU than sm_89"):
        kernels.for_spec(asked, arch.get("sm_89"))


@pytest.mark.parametrize("op", ops.ROWWISE_E5M2)
def test_what_is_compiled_ahead_is_what_calls_need(gpu: FakeGpu, op: str) -> None:
    """And needs no names of dtypes but those in the operation's."""
    m, n, k = 40, 512, 1024
    (shape,) = workload.shapes(workload.plan({"n": n, "k": k, "m": m, "op": op}).layers, ())
    of_a, of_b = ops.ROWWISE_E5M2[op]
    product(operand(m, FP8[of_a], k), operand(n, FP8[of_b], k))
    spec = gpu.launched[-1].spec
    wanted = engine.kernel_params(spec, select.rank(spec, arch.SM90)[0].config, arch.SM90)
    assert wanted in build.kernels_of(shape, arch.SM90)
    assert shape.bytes_moved() < 2 * (m * k + n * k)
