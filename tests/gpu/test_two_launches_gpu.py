"""FP8 output without groups, on both sides of the number of rows up to which it takes two launches, a product and a
cast: the bytes of one launch, of two and of `quantize.rows` are the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from built import built, kernels_of
from forced import in_launches
from gpu_cases import DEVICE, batch_invariant

import deep_gemm
from deep_gemm import Epilogue, quantize

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
Pair = tuple[torch.Tensor, torch.Tensor]
MULTIPLY: dict[str, tuple[Callable[..., None], torch.dtype]] = {
    "fp8": (deep_gemm.fp8_gemm_nt, torch.float8_e4m3fn),
    "bf16": (deep_gemm.bf16_gemm_nt, torch.bfloat16),
    "fp16": (deep_gemm.fp16_gemm_nt, torch.float16),
}
FEW, MANY = (60, 1536, 2048), (200, 1536, 256)
SIZES = ((1, 1536, 2048), FEW, MANY, (700, 1024, 384))
"""M, N and K. Of SwiGLU the first two take two launches, and the others one."""
PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "gelu": {"activation": "gelu"},
    "swiglu": {"activation": "swiglu", "clamp": 2.0},
    "interleaved": {"activation": "swiglu", "interleaved": True},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def operands(kind: str, m: int, n: int, k: int, seed: int = 1) -> tuple[Any, Any]:
    x, w = random(m, k, seed=seed), random(n, k, seed=2) / k**0.5
    if kind == "fp8":
        return quantize.rows(x), quantize.blocks(w)
    return x.to(MULTIPLY[kind][1]), w.to(MULTIPLY[kind][1])


def fresh(m: int, columns: int) -> Pair:
    """Values with gaps between rows, and scales whose columns are contiguous; all NaN."""
    values = torch.full((m, columns + 16), 255, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    scales = torch.full((columns // 128, m + 5), float("nan"), device=DEVICE)
    return values[:, :columns], scales[:, :m].t()


def bits(pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Where NaN equals NaN."""
    return pair[0].view(torch.uint8).clone(), pair[1].contiguous().view(torch.int32)


def same(found: Pair, wanted: Pair) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(found), bits(wanted), strict=True))


def epilogue(name: str, m: int, n: int, **more: Any) -> Epilogue:
    return Epilogue(bias=random(n, seed=3), row_factor=random(m, seed=4), alpha=0.5, **PARTS[name], **more)


def results(kind: str, name: str, m: int, n: int, k: int, powers: bool = False) -> tuple[Pair, Pair]:
    """FP8 output as calls have it, and the cast of the float32 result. FP8 output is called three times: cold, replayed
    at other addresses, and warm."""
    (a, b), multiply = operands(kind, m, n, k), MULTIPLY[kind][0]
    columns = n // 2 if "activation" in PARTS[name] and PARTS[name]["activation"] == "swiglu" else n
    exact, out = torch.empty(m, columns, device=DEVICE), [fresh(m, columns) for _ in range(2)]
    multiply(a, b, exact, epilogue=epilogue(name, m, n))
    for d in (*out, out[1]):
        multiply(a, b, d, epilogue=epilogue(name, m, n, use_ue8m0=powers))
    assert same(*out)
    for values, scales in out:  # nothing beside them was written
        whole = values.view(torch.uint8).as_strided((m - 1, columns + 16), (columns + 16, 1))
        assert bool((whole[:, columns:] == 255).all())
        assert bool(scales.as_strided((columns // 128, m + 5), (m + 5, 1))[: columns // 128 - 1, m:].isnan().all())
    return out[0], quantize.rows(exact, use_ue8m0=powers)


def both_ways(kind: str, name: str) -> list[tuple[Pair, Pair]]:
    """Results as they are chosen, in one launch, and in two; and their casts."""
    found = []
    with batch_invariant():
        for size in SIZES:
            found.append(results(kind, name, *size))
            for count in (1, 2):
                with in_launches(count):
                    found.append(results(kind, name, *size, powers=count == 2))
                    found.append(results(kind, name, *size))
                    assert same(found[-1][0], found[-3 if count == 1 else -5][0])
    return found


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", MULTIPLY)
def test_bytes_are_those_of_the_cast_of_the_float32_result(kind: str, name: str) -> None:
    """In one launch and in two, which have the same bits where K has one order of sums."""
    for found, wanted in both_ways(kind, name):
        assert same(found, wanted)


def by_default(kind: str) -> list[tuple[Pair, Pair]]:
    """Two launches with split K: the product is the one that a float32 d gets."""
    with in_launches(2):
        return [results(kind, "gelu", m, n, k) for m, n, k in ((1, 512, 4096), (33, 768, 7168))]


@pytest.mark.parametrize("kind", MULTIPLY)
def test_k_may_be_split(kind: str) -> None:
    for found, wanted in by_default(kind):
        assert same(found, wanted)


SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 88.0, -88.0, 1e-30, 448.0, 3e4)


def special() -> list[tuple[Pair, Pair, Pair]]:
    """Results of one launch and of two, and their cast: each block of 128 columns has one special value among zeros,
    and the last one zeros alone."""
    found = []
    for name in ("none", "swiglu"):
        columns = 128 * (len(SPECIAL) + 1)
        n = 2 * columns if name == "swiglu" else columns
        a, b = (torch.zeros(rows, 64, device=DEVICE).bfloat16() for rows in (3, n))
        bias = torch.zeros(n, device=DEVICE)
        bias[5 : columns - 128 : 128], bias[columns:] = torch.tensor(SPECIAL, device=DEVICE), 1.0  # up
        made = Epilogue(bias, "swiglu" if name == "swiglu" else None)
        exact, ways = torch.empty(3, columns, device=DEVICE), [fresh(3, columns) for _ in range(2)]
        deep_gemm.bf16_gemm_nt(a, b, exact, epilogue=made)
        for count, d in enumerate(ways, 1):
            with in_launches(count):
                deep_gemm.bf16_gemm_nt(a, b, d, epilogue=made)  # type: ignore[arg-type]
        found.append((ways[0], ways[1], quantize.rows(exact)))
    return found


def test_special_values_and_blocks_of_zeros() -> None:
    for one, two, wanted in special():
        assert same(one, two)
        assert same(two, wanted)
        assert bool(two[1].isnan().any())
        assert bool(two[1].isinf().any())
        assert two[1][:, -1].tolist() == pytest.approx([1e-4 / 448] * 3)


def by_rows(kind: str) -> list[Pair]:
    """Results of many rows, and of the first of them."""
    m, n, k = 700, 1536, 2048
    a, b = random(m, k, seed=7), random(n, k, seed=8)
    w = quantize.blocks(b) if kind == "fp8" else b.bfloat16()
    found = []
    with batch_invariant():
        for rows in (m, 300, 129, 64, 17, 1):
            x = quantize.rows(a[:rows]) if kind == "fp8" else a[:rows].bfloat16()
            found.append(fresh(rows, n // 2))
            MULTIPLY[kind][0](x, w, found[-1], epilogue=Epilogue(activation="swiglu"))
    return found


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_row_has_the_same_bits_whatever_m_is(kind: str) -> None:
    first, *fewer = by_rows(kind)
    for some in fewer:
        rows = some[0].shape[0]
        assert same(some, (first[0][:rows], first[1][:rows]))


def chains(kind: str, m: int = FEW[0]) -> tuple[Callable[[int], None], list[Any], list[Pair]]:
    """A call with the i-th activations and d, with nothing that waits between two of them."""
    n, k = FEW[1:]
    inputs = [operands(kind, m, n, k, seed)[0] for seed in range(8)]
    w, outs = operands(kind, m, n, k)[1], [fresh(m, n // 2) for _ in inputs]
    made = Epilogue(activation="swiglu")

    def call(index: int) -> None:
        MULTIPLY[kind][0](inputs[index], w, outs[index], epilogue=made)

    call(0)
    call(1)
    return call, inputs, outs


@cuda_only
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_calls_back_to_back_do_not_mix(kind: str, mode: str) -> None:
    """All use the same scratch memory: none writes it before the cast of the one before has read it."""
    call, inputs, outs = chains(kind)
    wanted = []
    for index in range(len(inputs)):
        call(index)
        torch.cuda.synchronize()
        wanted.append(bits(outs[index]))
    assert not torch.equal(wanted[0][0], wanted[1][0])

    def every() -> None:
        for index in range(len(inputs)):
            call(index)

    graph = torch.cuda.CUDAGraph()
    if mode == "graph":
        with torch.cuda.graph(graph):
            every()
    for _ in range(50):
        for values, scales in outs:
            values.view(torch.uint8).fill_(255)
            scales.fill_(float("nan"))
        graph.replay() if mode == "graph" else every()
        for out, each in zip(outs, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(bits(out), each, strict=True))


@pytest.fixture(scope="module", autouse=True)
def _built() -> Iterator[None]:
    wanted: list[Callable[[], object]] = [special]
    wanted += [lambda kind=kind, name=name: both_ways(kind, name) for kind in MULTIPLY for name in PARTS]  # type: ignore[misc]
    wanted += [lambda kind=kind: by_default(kind) for kind in MULTIPLY]  # type: ignore[misc]
    wanted += [lambda kind=kind: (by_rows(kind), chains(kind)) for kind in ("fp8", "bf16")]  # type: ignore[misc]
    with built(kernels_of(wanted)):
        yield
