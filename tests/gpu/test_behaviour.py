"""Behaviour besides numbers: streams, graphs, threads, repetition, and state that a call must not change."""

import threading
from collections.abc import Iterator

import pytest
import torch
from gpu_cases import DEVICE, busy, call, nan_output

import deep_gemm
from deep_gemm import NotWarmError
from deep_gemm.ops.reference import exact_product
from deep_gemm.testing import Operand, assert_close_to_exact, integer_operands, random_operands

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
M, N, K = 100, 1152, 2064


@pytest.fixture(scope="module")
def cases() -> list[tuple[Operand, Operand, torch.Tensor]]:
    """Operands of several sizes whose product is exact, with the expected results."""
    out = []
    for index, (m, n, k) in enumerate(
        [(M, N, K), (1, 576, 7168), (64, 2112, 1040), (1000, 4096, 512), (4096, 264, 128)]
    ):
        a, b = integer_operands(m, n, k, DEVICE, seed=index)
        out.append((a, b, exact_product(*a, *b).bfloat16()))
    return out


@pytest.fixture(autouse=True)
def synchronised() -> Iterator[None]:
    yield
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_warm_after_cold(cases: list[tuple[Operand, Operand, torch.Tensor]]) -> None:
    for _ in range(3):
        for a, b, expected in cases:
            assert torch.equal(call(a, b), expected)


def test_new_pointers_and_data_on_a_warm_plan() -> None:
    """A plan is kept for a shape. It must not keep anything of the tensors of the first call."""
    kept = []
    for seed in range(12):
        a, b = integer_operands(M, N, K, DEVICE, seed)
        d = call(a, b)
        assert torch.equal(d, exact_product(*a, *b).bfloat16()), f"call {seed}"
        kept.append((a, b, d))


def test_strides_are_not_confused_on_a_warm_plan() -> None:
    (a, sfa), (b, sfb) = integer_operands(M, N, K, DEVICE)
    expected = exact_product(a, sfa, b, sfb).bfloat16()
    wide = torch.zeros(M, K + 64, device=DEVICE).to(a.dtype)
    wide[:, :K] = a
    ready = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    for x in (a, wide[:, :K], a):
        for scales in (sfa, ready, sfa):
            for d in (nan_output(M, N), nan_output(M, N + 9)[:, 1 : N + 1], nan_output(M, N + 8)[:, :N]):
                deep_gemm.fp8_gemm_nt((x, scales), (b, sfb), d)
                assert torch.equal(d, expected)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 7168), (64, 2112, 7168), (1000, 4096, 2048)])
def test_a_hundred_runs_agree_bit_for_bit(m: int, n: int, k: int) -> None:
    a, b, _, _ = random_operands(m, n, k, DEVICE)
    first = call(a, b)
    assert_close_to_exact(first, *a, *b)
    other = torch.cuda.Stream() if DEVICE == "cuda" else None
    noise = torch.randn(2048, 2048, device=DEVICE)
    for run in range(100):
        if other is not None and run >= 50:
            with torch.cuda.stream(other):
                noise = (noise @ noise).clamp_(-1, 1)
        assert torch.equal(call(a, b), first), f"run {run}"


@cuda_only
def test_the_call_waits_for_its_own_stream(cases: list[tuple[Operand, Operand, torch.Tensor]]) -> None:
    (a, sfa), (b, sfb), expected = cases[0]
    call((a, sfa), (b, sfb))
    stream = torch.cuda.Stream()
    x, s = torch.zeros_like(a), torch.zeros_like(sfa)
    d = nan_output(M, N)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy()
        x.copy_(a)
        s.copy_(sfa)
        deep_gemm.fp8_gemm_nt((x, s), (b, sfb), d)
        result = d.clone()
    stream.synchronize()
    assert torch.equal(result, expected)


@cuda_only
def test_the_call_does_not_wait_for_other_streams(cases: list[tuple[Operand, Operand, torch.Tensor]]) -> None:
    a, b, expected = cases[0]
    call(a, b)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    busy()  # the default stream of torch, which blocks nobody
    blocked = torch.cuda.Event()
    blocked.record()
    with torch.cuda.stream(stream):
        d = call(a, b)
    stream.synchronize()
    assert not blocked.query()
    assert torch.equal(d, expected)


@cuda_only
@pytest.mark.parametrize("ready", [True, False])
def test_a_warm_call_neither_synchronises_nor_copies(ready: bool) -> None:
    (a, sfa), b, _, _ = random_operands(M, N, K, DEVICE)
    sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa) if ready else sfa
    d = nan_output(M, N)
    for _ in range(2):  # the first call may patch another call's launch; the second gets its own launch record
        deep_gemm.fp8_gemm_nt((a, sfa), b, d)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy()
        done = torch.cuda.Event()
        deep_gemm.fp8_gemm_nt((a, sfa), b, d)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 0 if ready else allocated <= 1


@cuda_only
@pytest.mark.parametrize("ready", [True, False])
def test_capture_and_replay(ready: bool) -> None:
    (a, sfa), (b, sfb) = integer_operands(M, N, K, DEVICE, seed=1)
    (a2, sfa2), (b2, sfb2) = integer_operands(M, N, K, DEVICE, seed=2)
    static_a, static_b, static_sfb = a.clone(), b.clone(), sfb.clone()
    static_sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa.clone()) if ready else sfa.clone()
    d = nan_output(M, N)

    def step() -> None:
        deep_gemm.fp8_gemm_nt((static_a, static_sfa), (static_b, static_sfb), d)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    d.fill_(float("nan"))
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    assert bool(d.isnan().all())
    graph.replay()
    assert torch.equal(d, exact_product(a, sfa, b, sfb).bfloat16())
    for static, new in ((static_a, a2), (static_sfa, sfa2), (static_b, b2), (static_sfb, sfb2)):
        static.copy_(new)
    for _ in range(3):
        d.fill_(float("nan"))
        graph.replay()
        assert torch.equal(d, exact_product(a2, sfa2, b2, sfb2).bfloat16())


@cuda_only
def test_a_cold_shape_cannot_be_captured_and_says_so() -> None:
    # All three sizes are compiled in, so that no other test has made this kernel.
    a, b = integer_operands(37, 1736, 944, DEVICE)
    d = nan_output(37, 1736)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(NotWarmError, match=r"37.*1736.*944"):
        deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims="mnk")
    deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims="mnk")
    expected = exact_product(*a, *b).bfloat16()
    assert torch.equal(d, expected)
    d.fill_(float("nan"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deep_gemm.fp8_gemm_nt(a, b, d, compiled_dims="mnk")
    graph.replay()
    assert torch.equal(d, expected)


def test_threads(cases: list[tuple[Operand, Operand, torch.Tensor]]) -> None:
    """Four threads with all shapes, each on its own stream. One shape is cold, and all threads call it at once."""
    cold = integer_operands(43, 1000, 1296, DEVICE)
    everything = [*cases, (*cold, exact_product(*cold[0], *cold[1]).bfloat16())]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = threading.Barrier(4)
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            start.wait()
            stream = torch.cuda.Stream() if DEVICE == "cuda" else None
            with torch.cuda.stream(stream):
                for run in range(25):
                    for which in range(len(everything)):
                        a, b, expected = everything[(which + index) % len(everything)]
                        options = {"compiled_dims": "mnk"} if a is cold[0] else {}
                        if not torch.equal(call(a, b, **options), expected):
                            failures.append(f"thread {index}, run {run}, m = {a[0].shape[0]}")
        except Exception as error:  # otherwise lost with the thread
            failures.append(f"thread {index}: {error!r}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("ready", [True, False])
def test_a_thread_that_has_done_nothing_on_the_gpu_yet(ready: bool) -> None:
    """Our call is its first CUDA action. The tensors are from another thread, with a warm shape at new addresses."""
    a, b = integer_operands(67, 520, 784, DEVICE)
    if ready:
        a = (a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1]))
    call(a, b)
    expected = exact_product(*a, *b).bfloat16()
    fresh = (a[0].clone(), a[1]), (b[0].clone(), b[1])
    d = torch.full((67, 520), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            deep_gemm.fp8_gemm_nt(*fresh, d)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    torch.cuda.synchronize()
    assert torch.equal(d, expected)


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_device_that_is_not_current() -> None:
    with torch.cuda.device(0):
        a, b = integer_operands(M, N, K, "cuda:1")
        d = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device="cuda:1")
        for _ in range(2):
            deep_gemm.fp8_gemm_nt(a, b, d)
        assert torch.cuda.current_device() == 0
    assert torch.equal(d, exact_product(*a, *b).bfloat16())


def test_the_caller_may_free_everything_at_once() -> None:
    """Freeing inputs after the call, before the kernel has run, must be safe: scratch memory belongs to the stream."""
    expected = []
    results = []
    for seed in range(8):
        a, b = integer_operands(300, 1024, 1024, DEVICE, seed)
        expected.append(exact_product(*a, *b).bfloat16())
        busy()
        results.append(call(a, b))
        del a, b
    assert all(torch.equal(d, want) for d, want in zip(results, expected, strict=True))


@cuda_only
def test_the_current_device_and_stream_are_left_alone(cases: list[tuple[Operand, Operand, torch.Tensor]]) -> None:
    a, b, _ = cases[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(a, b)
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_device() == 0
