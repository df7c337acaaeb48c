"""The public interface on a GPU: every form of call, and every utility."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, call, nan_output

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops.reference import exact_product
from deep_gemm.spec import align
from deep_gemm.testing import Operand, assert_close_to_exact, guarded, integer_operands, random_operands

M, N, K = 200, 640, 1040
cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture(scope="module")
def operands() -> tuple[Operand, Operand]:
    return integer_operands(M, N, K, DEVICE)


@pytest.fixture(scope="module")
def expected(operands: tuple[Operand, Operand]) -> torch.Tensor:
    return exact_product(*operands[0], *operands[1]).bfloat16()


@pytest.fixture(autouse=True)
def restored_options() -> Iterator[None]:
    num_sms, pdl = (deep_gemm.get_num_sms(), deep_gemm.get_pdl()) if DEVICE == "cuda" else (None, None)
    yield
    if num_sms is not None:
        deep_gemm.set_num_sms(num_sms)
        deep_gemm.set_pdl(pdl)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"c": None}, {"recipe": (1, 128, 128)}, {"recipe_a": (1, 128), "recipe_b": (128, 128)},
        {"compiled_dims": ""}, {"compiled_dims": "n"}, {"compiled_dims": "mnk"}, {"disable_ue8m0_cast": True},
    ],
    ids=str,
)  # fmt: skip
def test_options(operands: tuple[Operand, Operand], expected: torch.Tensor, options: dict[str, Any]) -> None:
    assert torch.equal(call(*operands, **options), expected)


def test_positional_arguments_lists_and_the_other_name(
    operands: tuple[Operand, Operand], expected: torch.Tensor
) -> None:
    d = nan_output(M, N)
    assert deep_gemm.fp8_gemm_nt(list(operands[0]), list(operands[1]), d, None, None) is None
    assert torch.equal(d, expected)
    d = nan_output(M, N)
    assert deep_gemm.fp8_fp4_gemm_nt(operands[0], operands[1], d, disable_ue8m0_cast=True) is None
    assert torch.equal(d, expected)


@pytest.mark.parametrize(("form", "flip_a", "flip_b"), [("nn", False, True), ("tn", True, True), ("tt", True, False)])
def test_transposed_views(
    operands: tuple[Operand, Operand], expected: torch.Tensor, form: str, flip_a: bool, flip_b: bool
) -> None:
    a, b = ((x[0].t(), x[1].t()) if flip else x for x, flip in zip(operands, (flip_a, flip_b), strict=True))
    d = nan_output(M, N)
    getattr(deep_gemm, f"fp8_gemm_{form}")(a, b, d)
    assert torch.equal(d, expected)


@pytest.mark.parametrize("kind", ["mn-major", "transformed", "slice", "column slice", "expanded"])
def test_scales_of_a_in_every_layout(operands: tuple[Operand, Operand], kind: str) -> None:
    (a, sfa), b = operands
    columns = sfa.shape[1]
    if kind == "mn-major":
        sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    elif kind == "transformed":
        sfa = deep_gemm.transform_sf_into_required_layout(sfa, M, K, (1, 128, 128), is_sfa=True)
    elif kind == "slice":
        wide = deep_gemm.get_mn_major_tma_aligned_tensor(torch.nn.functional.pad(sfa, (0, 0, 0, 57), value=9.0))
        sfa = wide[:M]
    elif kind == "column slice":
        sfa = torch.nn.functional.pad(sfa, (3, 2), value=9.0)[:, 3 : 3 + columns]
    else:
        sfa = sfa[:, :1].expand(M, columns)
    assert torch.equal(call((a, sfa), b), exact_product(a, sfa, *b).bfloat16())


@pytest.mark.parametrize("rows", [1, 3, 100, 199])
def test_a_slice_of_rows(operands: tuple[Operand, Operand], expected: torch.Tensor, rows: int) -> None:
    (a, sfa), b = operands
    ready = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    assert torch.equal(call((a[:rows], sfa[:rows]), b), expected[:rows])
    assert torch.equal(call((a[:rows], ready[:rows]), b), expected[:rows])
    assert torch.equal(call((a[rows:], ready[rows:]), b), expected[rows:])


def test_scales_of_b_transposed(operands: tuple[Operand, Operand], expected: torch.Tensor) -> None:
    a, (b, sfb) = operands
    assert torch.equal(call(a, (b, sfb.t().contiguous().t())), expected)


def test_no_rows(operands: tuple[Operand, Operand]) -> None:
    a, b = operands
    d = nan_output(0, N)
    assert deep_gemm.fp8_gemm_nt((a[0][:0], a[1][:0]), b, d) is None


@pytest.mark.parametrize("m", [0, 1, 200])
def test_k_zero_writes_zeros(m: int) -> None:
    a, b = integer_operands(m, N, 0, DEVICE)
    buffer = guarded((m, N), torch.bfloat16, DEVICE, (N + 3, 1), 2)
    deep_gemm.fp8_gemm_nt(a, b, buffer.tensor)
    assert torch.equal(buffer.tensor, torch.zeros(m, N, dtype=torch.bfloat16, device=DEVICE))
    buffer.check("d")


@pytest.mark.parametrize("offset", [1, 8, 15])
def test_misaligned_operands_are_refused_and_the_next_call_works(
    operands: tuple[Operand, Operand], expected: torch.Tensor, offset: int
) -> None:
    (a, sfa), (b, sfb) = operands
    off = guarded((M, K), torch.float8_e4m3fn, DEVICE, offset=offset).tensor
    with pytest.raises(InvalidInputError, match="a must start at a multiple of 16 bytes"):
        call((off, sfa), (b, sfb))
    off = guarded((N, K), torch.float8_e4m3fn, DEVICE, (K + offset, 1)).tensor
    with pytest.raises(InvalidInputError, match="row stride of b must be a multiple of 16 bytes"):
        call((a, sfa), (off, sfb))
    assert torch.equal(call((a, sfa), (b, sfb)), expected)


def test_what_is_refused(operands: tuple[Operand, Operand], expected: torch.Tensor) -> None:
    a, b = operands
    for d in (nan_output(M, N).double(), nan_output(M, N)[:, :0], nan_output(N, M).t(), nan_output(1, N).expand(M, N)):
        with pytest.raises((InvalidInputError, UnsupportedError)):
            deep_gemm.fp8_gemm_nt(a, b, d)
    with pytest.raises(UnsupportedError, match="recipe"):
        call(a, b, recipe=(1, 64, 128))
    with pytest.raises(InvalidInputError, match="scales of b must"):
        call(a, b, recipe=(1, 1, 128))
    with pytest.raises(InvalidInputError, match="c must"):
        call(a, b, c=nan_output(M, N).double())
    assert torch.equal(call(a, b), expected)


@pytest.mark.parametrize("ready", [True, False])
def test_weights_may_be_parameters_in_grad_mode(
    operands: tuple[Operand, Operand], expected: torch.Tensor, ready: bool
) -> None:
    """Callers inside an autograd.Function and Transformers' linear layers pass such weights; autograd records
    nothing."""
    (a, sfa), b = operands
    a = (a, deep_gemm.get_mn_major_tma_aligned_tensor(sfa) if ready else sfa)
    weights = tuple(torch.nn.Parameter(tensor) for tensor in b)
    assert torch.is_grad_enabled()
    assert all(weight.requires_grad for weight in weights)
    outputs = [nan_output(M, N) for _ in range(2)]
    for d in outputs * 2:  # cold, a replay, and warm
        deep_gemm.fp8_gemm_nt(a, weights, d)
        assert torch.equal(d, expected)
        assert not d.requires_grad
        d.fill_(float("nan"))
    d = nan_output(M, N).requires_grad_()
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="d requires grad"):
            deep_gemm.fp8_gemm_nt(a, weights, d)
        with torch.no_grad():
            deep_gemm.fp8_gemm_nt(a, weights, d)
    assert torch.equal(d, expected)


@cuda_only
@pytest.mark.parametrize("elsewhere", ["a", "sfa", "b", "sfb", "d"])
def test_mixed_devices_are_refused(operands: tuple[Operand, Operand], elsewhere: str) -> None:
    tensors = dict(zip(("a", "sfa", "b", "sfb"), (*operands[0], *operands[1]), strict=True)) | {"d": nan_output(M, N)}
    tensors[elsewhere] = tensors[elsewhere].cpu()
    with pytest.raises(InvalidInputError, match=r"one device.*cuda:0.*cpu|one device.*cpu.*cuda:0"):
        deep_gemm.fp8_gemm_nt((tensors["a"], tensors["sfa"]), (tensors["b"], tensors["sfb"]), tensors["d"])


@cuda_only
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (3, 5), (128, 56), (1000, 16), (4096, 56), (70000, 3), (5, 1200)]
)
@pytest.mark.parametrize("sliced", [False, True])
def test_transposing_scales(rows: int, columns: int, sliced: bool) -> None:
    sf = torch.rand(rows, columns + 2 * sliced, device=DEVICE)[:, sliced : sliced + columns]
    out = deep_gemm.get_mn_major_tma_aligned_tensor(sf)
    assert out.stride() == (1, align(rows, 4))
    assert torch.equal(out, sf)
    assert deep_gemm.get_mn_major_tma_aligned_tensor(out) is out


@cuda_only
@pytest.mark.parametrize("groups", [1, 3])
def test_transposing_scales_of_groups(groups: int) -> None:
    sf = torch.rand(groups, 130, 7, device=DEVICE)
    out = deep_gemm.transform_sf_into_required_layout(sf, 130, 896, (1, 128, 128), groups, True)
    assert out.stride() == (132 * 7, 1, 132)
    assert torch.equal(out, sf)


def launched_grids(fn: Any, path: Path) -> list[int]:
    """The number of CTAs of each GEMM kernel that ``fn`` launches, from the profiler."""
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    grids = [event["args"]["grid"] for event in events if event.get("cat") == "kernel" and "gemm" in event["name"]]
    return [x * y * z for x, y, z in grids]


@cuda_only
def test_set_num_sms_is_honoured(tmp_path: Path) -> None:
    a, b, _, _ = random_operands(2048, 4096, 512, DEVICE)
    whole = call(a, b)
    device = torch.cuda.get_device_properties(0).multi_processor_count
    for num_sms in (20, 101, device):
        deep_gemm.set_num_sms(num_sms)
        assert deep_gemm.get_num_sms() == num_sms
        d = nan_output(2048, 4096)
        grids = launched_grids(lambda d=d: deep_gemm.fp8_gemm_nt(a, b, d), tmp_path / f"{num_sms}.json")
        assert len(grids) == 1
        assert 0 < grids[0] <= num_sms
        assert torch.equal(d, whole)
    for wrong in (0, -1, device + 1):
        with pytest.raises(InvalidInputError, match="num_sms"):
            deep_gemm.set_num_sms(wrong)
    assert deep_gemm.get_num_sms() == device


@cuda_only
def test_part_of_the_gpu_has_no_more_ctas_than_sms(tmp_path: Path) -> None:
    """For this shape two CTAs per SM would be best, but they would spread over SMs that are reserved for others."""
    a, b, _, _ = random_operands(32, 65536, 512, DEVICE)
    device = torch.cuda.get_device_properties(0).multi_processor_count
    for num_sms in (device // 2, device - 24):
        deep_gemm.set_num_sms(num_sms)
        d = nan_output(32, 65536)
        grids = launched_grids(lambda d=d: deep_gemm.fp8_gemm_nt(a, b, d), tmp_path / f"{num_sms}.json")
        assert 0 < grids[0] <= num_sms
        assert_close_to_exact(d, *a, *b)


@cuda_only
def test_programmatic_launch_changes_nothing(operands: tuple[Operand, Operand], expected: torch.Tensor) -> None:
    deep_gemm.set_pdl(True)
    assert deep_gemm.get_pdl() is True
    # The scales are row-major, so that each GEMM directly follows the kernel that transposes its scales.
    (a, sfa), (b, sfb) = operands
    for _ in range(20):
        source = torch.zeros_like(a)
        source.copy_(a)
        d = nan_output(M, N)
        deep_gemm.fp8_gemm_nt((source, sfa), (b, sfb), d)
        source.zero_()
        assert torch.equal(d, expected)


@cuda_only
def test_timing_tools() -> None:
    from deep_gemm.testing import bench, bench_flushed, bench_kineto, get_arch_major

    a, b, _, _ = random_operands(1024, 4096, 4096, DEVICE)
    d = nan_output(1024, 4096)

    def fn() -> None:
        deep_gemm.fp8_gemm_nt(a, b, d)

    times = [bench(fn), bench(fn, high_precision=True), bench_flushed(fn), bench_kineto(fn, "gemm", 5, True)]
    assert all(5e-6 < seconds < 5e-3 for seconds in times), times
    assert get_arch_major() == torch.cuda.get_device_capability()[0]
    with pytest.raises(InvalidInputError, match="no kernel with 'absent'"):
        bench_kineto(fn, ("gemm", "absent"), 2)


@cuda_only
def test_debug_info_tells_what_was_decided(operands: tuple[Operand, Operand]) -> None:
    call(*operands)
    assert str(N) in json.dumps(deep_gemm.debug_info())
