"""Replays: calls that differ from an earlier call only in the addresses of operands."""

import ctypes
import itertools
import threading

import pytest
import torch
from gpu_cases import DEVICE, call, nan_output

import deep_gemm
from deep_gemm.jit.driver.launch import Map
from deep_gemm.jit.driver.module import primary_context
from deep_gemm.jit.driver.tensor_map import SIZE
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.reference import exact_product
from deep_gemm.runtime import calls, engine
from deep_gemm.testing import Operand, integer_operands

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

# Swapped operands, tiles of 64 and 128 rows, split K, and a D that TMA cannot store.
SHAPES = [(20, 192, 256), (7, 2112, 7168), (128, 576, 7168), (1000, 2112, 1040), (130, 333, 400)]

Case = tuple[Operand, Operand, torch.Tensor]


def cases(m: int, n: int, k: int, ready: bool, count: int) -> list[Case]:
    """Operands with other values at other addresses, and their products."""
    out = []
    for seed in range(count):
        (a, sfa), b = integer_operands(m, n, k, DEVICE, seed=seed)
        expected = exact_product(a, sfa, *b).bfloat16()
        out.append(((a, deep_gemm.get_mn_major_tma_aligned_tensor(sfa) if ready else sfa), b, expected))
    return out


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_operands_may_be_elsewhere_each_time(m: int, n: int, k: int, ready: bool) -> None:
    found = cases(m, n, k, ready, 4)
    for a, b, expected in found * 3:
        assert torch.equal(call(a, b), expected)
    for (a, _, _), (_, b, _) in itertools.pairwise(found):  # one operand of two moves
        assert torch.equal(call(a, b), exact_product(*a, *b).bfloat16())


@cuda_only
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_graph_takes_a_replay(m: int, n: int, k: int, ready: bool) -> None:
    found = cases(m, n, k, ready, 3)
    outputs = [nan_output(m, n) for _ in found]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(*found[0][:2])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for (a, b, _), d in zip(found, outputs, strict=True):
            deep_gemm.fp8_gemm_nt(a, b, d)
    for _ in range(3):
        for d in outputs:
            d.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for (_, _, expected), d in zip(found, outputs, strict=True):
            assert torch.equal(d, expected)


@cuda_only
@pytest.mark.parametrize("ready", [True, False])
def test_threads_with_operands_of_their_own(ready: bool) -> None:
    """On one stream, where all threads patch one launch record."""
    found = cases(128, 576, 7168, ready, 6)
    call(*found[0][:2])
    wrong: list[int] = []

    def work(index: int) -> None:
        a, b, expected = found[index]
        for _ in range(20):
            if index == 0:
                for known in list(calls.Calls.every):
                    known.warm = {}  # so that calls lose their own launch records
            if not torch.equal(call(a, b), expected):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@cuda_only
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_patched_map_is_what_the_driver_would_encode(m: int, n: int, k: int) -> None:
    operation = Dense("fp8_gemm_nt")
    first, second = (operation.check(a, b, nan_output(m, n)) for a, b, _ in cases(m, n, k, True, 2))
    assert first is not None
    assert second is not None
    (step,) = operation.launches(first, 0).steps
    before, after = ({name: x.tensors[name].data_ptr() for name in step.operands} for x in (first, second))
    launch = engine.launch_record(engine.plan(step.spec, 0), step.strides, before, engine.raw_stream(0))
    launch.at([after[name] for name in launch.operands])
    maps = [(p, at) for p, at in zip(launch._parameters, launch._pointers, strict=True) if isinstance(p, Map)]
    assert {parameter.operand for parameter, _ in maps} >= {"a", "sfa", "b"}
    for parameter, at in maps:
        with primary_context(0):
            wanted = parameter.spec.encode(after[parameter.operand])
        assert ctypes.string_at(at, SIZE) == wanted, parameter
    torch.cuda.synchronize()
