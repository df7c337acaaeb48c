"""Users' kernels on a GPU: exact results, the caller's stream, graphs, and the monitor."""

from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, busy
from scripts import module_of

import deep_gemm
from deep_gemm import DriverError, LaunchConfig, NotWarmError
from deep_gemm.testing import guarded, guarded_copy


@pytest.fixture(scope="module")
def example() -> Any:
    return module_of("examples/own_kernel.py")


def vectors(n: int) -> list[torch.Tensor]:
    return [torch.randn(n, device=DEVICE).bfloat16() for _ in range(3)]


def added(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return (scale * x.float() + y.float()).bfloat16()


@pytest.mark.parametrize("n", [1, 255, 256, 257, 100_003])
def test_scale_add_is_right_cold_warm_and_moved(example: Any, n: int) -> None:
    for _ in range(3):
        out, x, y = vectors(n)
        for scale in (0.5, 0.5, -2.0):
            example.scale_add(out, x, y, scale)
            torch.testing.assert_close(out, added(x, y, scale), rtol=2**-8, atol=1e-6)  # an fma rounds once less


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (8, 8), (1000, 520), (72, 200), (136, 8), (4096, 1024)])
def test_the_transpose_by_tma_writes_what_it_must_and_nothing_else(example: Any, rows: int, columns: int) -> None:
    for _ in range(2):
        x = guarded_copy(torch.randn(rows, columns, device=DEVICE).bfloat16(), (columns + 8, 1))
        out = guarded((columns, rows), torch.bfloat16, DEVICE, (rows + 16, 1))
        for alpha in (2.0, 2.0, 0.25):
            example.scaled_transpose(out.tensor, x.tensor, alpha)
            assert torch.equal(out.tensor, (alpha * x.tensor.float().t()).bfloat16())
        out.check("out")


@pytest.mark.parametrize("element", ["f16", "bf16", "e4m3"])
def test_conversions_are_those_of_torch(element: str) -> None:
    """All values of the narrow type convert to float, and floats back, rounded to nearest even."""
    from deep_gemm.custom.parameters import ELEMENTS

    dtype = ELEMENTS[element]

    def convert(wide: Any, narrow: Any, back: Any, given: Any) -> LaunchConfig:
        n = wide.numel()
        return LaunchConfig(grid=-(-n // 256), block=256, values={"n": n})

    kernel = deep_gemm.kernel(
        {"wide": "f32*", "narrow": f"const {element}*", "back": f"{element}*", "given": "const f32*", "n": "u32"},
        body="const u32 i = blockIdx.x * 256 + threadIdx.x;\nif (i < n) { wide[i] = narrow[i]; back[i] = given[i]; }",
    )(convert)
    bits = 8 * dtype.itemsize
    codes = torch.arange(1 << bits, device=DEVICE).to(torch.uint8 if bits == 8 else torch.int32)
    narrow = codes.view(dtype) if bits == 8 else codes.to(torch.int16).view(dtype)
    given = torch.randn(1 << bits, device=DEVICE) * 100
    wide, back = torch.empty(1 << bits, device=DEVICE), torch.empty(1 << bits, device=DEVICE).to(dtype)
    kernel(wide, narrow, back, given)
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0, equal_nan=True)
    in_range = given.abs() <= (448 if element == "e4m3" else 60000)
    assert torch.equal(back.float()[in_range], given.to(dtype).float()[in_range])


def test_a_call_runs_on_the_current_stream(example: Any) -> None:
    out, x, y = vectors(10_000)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream):
            busy()
            x.fill_(3)
            example.scale_add(out, x, y, 2.0)
            result = out.clone()
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(result, added(x, y, 2.0))
        x.fill_(0)
        stream.wait_stream(torch.cuda.current_stream())


def test_a_warm_call_is_captured_into_a_graph(example: Any) -> None:
    out, x, y = vectors(5000)
    turned, matrix = torch.zeros(64, 128, device=DEVICE).bfloat16(), torch.randn(128, 64, device=DEVICE).bfloat16()
    example.scale_add(out, x, y, 4.0)
    example.scaled_transpose(turned, matrix, 4.0)
    graph = torch.cuda.CUDAGraph()
    with deep_gemm.monitor(every=1) as m, torch.cuda.graph(graph):
        example.scale_add(out, x, y, 4.0)
        example.scaled_transpose(turned, matrix, 4.0)
    assert [(entry["calls"], entry["timed"]) for entry in m.report()["calls"]] == [(1, 0), (1, 0)]
    x.copy_(torch.randn_like(x))
    matrix.copy_(torch.randn_like(matrix))
    graph.replay()
    torch.testing.assert_close(out, added(x, y, 4.0), rtol=2**-8, atol=1e-6)
    assert torch.equal(turned, (4 * matrix.float().t()).bfloat16())


def test_a_cold_call_inside_capture_is_refused() -> None:
    kernel = deep_gemm.kernel({"out": "f32*"}, body="out[threadIdx.x] = 1;", name="cold")(
        lambda out: LaunchConfig(1, 4)
    )
    out = torch.zeros(4, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.add_(1)
        with pytest.raises(NotWarmError, match="cold"):
            kernel(out)


def test_clusters_and_dynamic_shared_memory_reach_the_kernel() -> None:
    kernel = deep_gemm.kernel(
        {"out": "i32*"},
        body="""
        extern __shared__ i32 memory[];
        u32 rank, size;
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
        memory[50000 - 1 - threadIdx.x] = rank + 10 * size;
        __syncthreads();
        out[blockIdx.x * 32 + threadIdx.x] = memory[50000 - 32 + threadIdx.x];
        """,
        name="clusters",
    )(lambda out: LaunchConfig(grid=4, block=32, cluster=2, shared=200_000))
    out = torch.zeros(4, 32, dtype=torch.int32, device=DEVICE)
    kernel(out)
    assert out[:, 0].tolist() == [20, 21, 20, 21]
    assert bool((out == out[:, :1]).all())


def test_more_shared_memory_than_there_is_is_refused_in_words() -> None:
    kernel = deep_gemm.kernel({"out": "i32*"}, body="", name="large")(lambda out: LaunchConfig(1, 32, shared=300_000))
    with pytest.raises(DriverError, match="large asks for 300000 bytes of dynamic shared memory"):
        kernel(torch.zeros(4, dtype=torch.int32, device=DEVICE))


def test_monitored_calls_have_times_of_the_gpu(example: Any) -> None:
    out, x, y = vectors(1 << 24)
    with deep_gemm.monitor(every=1) as m:
        for _ in range(20):
            example.scale_add(out, x, y, 2.0)
        out, x, y = vectors(1 << 24)
        example.scale_add(out, x, y, 2.0)  # other addresses, but the same series
    (entry,) = m.report()["calls"]
    assert (entry["calls"], entry["timed"]) == (21, 21)
    # 100 MB are moved: a time outside of this range would be a mistake of units.
    assert 10 < entry["us"]["p50"] < 1000
    assert 100 < entry["gbps"] < 10_000


def test_a_monitored_gemm_is_timed_as_events_around_it_say() -> None:
    a, b = (torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(2))
    d = torch.empty_like(a)
    deep_gemm.bf16_gemm_nt(a, b, d)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with deep_gemm.monitor(every=1) as m:
        deep_gemm.bf16_gemm_nt(a, b, d)
        busy()  # so that the host is ahead
        start.record()
        for _ in range(50):
            deep_gemm.bf16_gemm_nt(a, b, d)
        end.record()
    (entry,) = m.report()["calls"]
    assert entry["timed"] == 51
    mean = start.elapsed_time(end) * 1e3 / 50
    assert 0.5 * mean < entry["us"]["p50"] < 1.2 * mean
    assert torch.equal(torch.isnan(d), torch.zeros_like(d, dtype=torch.bool))
