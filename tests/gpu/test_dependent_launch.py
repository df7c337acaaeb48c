"""Programmatic dependent launch: which operands the previous kernel may write, with constant weights and without.

Each sequence runs back to back, from a queue that the host has filled. Its results must have the same bits as those of
the same calls with a synchronisation between them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, busy

import deep_gemm
from deep_gemm.runtime import engine, weight_promises
from deep_gemm.spec import GemmSpec
from deep_gemm.testing import Operand, integer_operands, one_hot_operand, random_operands

REPEATS = 200
ROUNDS = 3

cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
promises_only = pytest.mark.skipif(
    not weight_promises._callbacks_work(), reason="promises have no effect with this torch"
)
MODES = ["eager", pytest.param("graph", marks=cuda_only)]

Step = Callable[[int, Callable[[], None]], None]
"""One repetition of a sequence. It takes its number and a function, which it calls between two operations."""


@pytest.fixture(autouse=True)
def dependent_launch_on() -> Iterator[None]:
    deep_gemm.set_pdl(True)
    yield
    synchronise()
    deep_gemm.set_pdl(True)


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def outputs(m: int, n: int) -> torch.Tensor:
    """One output for each repetition, so that no copy runs between a call and the next call's first kernel."""
    return torch.full((REPEATS, m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16)


def apart(step: Step, out: torch.Tensor) -> torch.Tensor:
    """The outputs of the steps with a synchronisation after each operation. It makes all calls of `back_to_back`
    warm."""
    for i in range(REPEATS):
        step(i, synchronise)
        synchronise()
    return out.clone()


def back_to_back(step: Step, out: torch.Tensor, mode: str) -> Iterator[torch.Tensor]:
    """The outputs of the steps run back to back, several times."""

    def all_steps() -> None:
        for i in range(REPEATS):
            step(i, lambda: None)

    run = all_steps
    if mode == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_steps()
        run = graph.replay
    for _ in range(ROUNDS):
        out.fill_(float("nan"))
        synchronise()
        busy()  # the host is slower than these kernels; now it can fill the queue
        run()
        synchronise()
        yield out


def check(step: Step, out: torch.Tensor, mode: str) -> None:
    expected = apart(step, out)
    assert not torch.equal(bits(expected[0]), bits(expected[1])), "the steps do the same: nothing would show"
    for index, found in enumerate(back_to_back(step, out, mode)):
        wrong = (bits(found) != bits(expected)).flatten(1).any(1).nonzero().flatten().tolist()
        assert wrong == [], f"round {index}: repetitions {wrong[:10]} of {REPEATS} differ"


def write(target: torch.Tensor, source: torch.Tensor, how: str) -> None:
    """Copy ``source`` to ``target`` of the same dtype, by a copy engine or by a kernel."""
    if how == "copy":
        target.copy_(source)
    else:
        dtype = torch.uint8 if source.element_size() == 1 else torch.int32
        torch.bitwise_or(source.view(dtype), 0, out=target.view(dtype))


def declared(b: Operand) -> Operand:
    synchronise()
    deep_gemm.declare_constant(*b)
    return b


def with_ready_scales(a: Operand) -> Operand:
    return a[0], deep_gemm.get_mn_major_tma_aligned_tensor(a[1])


SHAPES = [(4, 2112, 1024), (32, 12288, 512), (64, 576, 7168), (96, 2112, 7168), (700, 1024, 512)]
"""Shapes for which kernels load all stages of constant weights early, and shapes for which they load few."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["copy", "kernel", "quantisation"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_kernel_before_writes_the_activations(m: int, n: int, k: int, how: str, mode: str) -> None:
    """Only B is declared constant. The previous kernel writes A and its scales."""
    first, b, x, _ = random_operands(m, n, k, DEVICE, seed=1)
    second, _, y, _ = random_operands(m, n, k, DEVICE, seed=2)
    b = declared(b)
    sources = [with_ready_scales(first), with_ready_scales(second)]
    values, scales = sources[0][0].clone(), sources[0][1].clone()
    out = outputs(m, n)

    def step(i: int, between: Callable[[], None]) -> None:
        if how == "quantisation":
            a = deep_gemm.per_token_cast_to_fp8((x, y)[i % 2], use_ue8m0=False)
            between()
        else:
            # The order of the two writes alternates between repetitions.
            pairs = [(values, sources[i % 2][0]), (scales, sources[i % 2][1])]
            for target, source in pairs if i % 4 < 2 else reversed(pairs):
                write(target, source, how)
                between()
            a = values, scales
        deep_gemm.fp8_gemm_nt(a, b, out[i])

    check(step, out, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["copy", "kernel"])
@pytest.mark.parametrize("which", ["values", "scales"])
@pytest.mark.parametrize(("m", "n", "k"), [(4, 2112, 2048), (700, 1024, 512)])
def test_the_kernel_before_writes_the_weights(m: int, n: int, k: int, which: str, how: str, mode: str) -> None:
    """The written tensors are not declared constant, so a kernel must wait before it reads B or its scales."""
    a, first, _, _ = random_operands(m, n, k, DEVICE, seed=1)
    _, second, _, _ = random_operands(m, n, k, DEVICE, seed=2)
    a = with_ready_scales(a)
    b = first[0].clone(), first[1].clone()
    index = 0 if which == "values" else 1
    # A declaration of the other tensor alone must have no effect.
    synchronise()
    deep_gemm.declare_constant(b[1 - index])
    out = outputs(m, n)

    def step(i: int, between: Callable[[], None]) -> None:
        write(b[index], (first, second)[i % 2][index], how)
        between()
        deep_gemm.fp8_gemm_nt(a, b, out[i])

    check(step, out, mode)


class Chain:
    """Two of our GEMMs. The second reads the output of the first as E4M3.

    The first selects columns of B: each row of A has a single 1, so that D has E4M3 values times powers of two. As bf16
    their low four bits are zero and their exponents are moderate, so that no byte is a NaN of E4M3. Then every wrong
    byte that is read changes an element of the second product.
    """

    def __init__(self, m: int, n: int, k: int) -> None:
        self.picks = [with_ready_scales(one_hot_operand(m, k, DEVICE, seed)[0]) for seed in range(2)]
        self.source = integer_operands(1, n, k, DEVICE)[1]
        self.middle = torch.zeros((m, n), dtype=torch.bfloat16, device=DEVICE)
        self.as_fp8 = self.middle.view(torch.float8_e4m3fn)

    def first(self, i: int) -> None:
        deep_gemm.fp8_gemm_nt(self.picks[i % 2], self.source, self.middle)


CHAINS = [(64, 512, 1024), (512, 1024, 512), (576, 1024, 2048)]


def chain_into_weights(m: int, n: int, k: int, tokens: int) -> tuple[Chain, Operand, torch.Tensor, Step]:
    """Steps in which the D (m, n) of the first GEMM is the B (m, 2 * n) of the second; and the tensors."""
    chain = Chain(m, n, k)
    a = with_ready_scales(integer_operands(tokens, m, 2 * n, DEVICE, seed=3)[0])
    b = chain.as_fp8, torch.ones((-(-m // 128), 2 * n // 128), device=DEVICE)
    out = outputs(tokens, m)

    def step(i: int, between: Callable[[], None]) -> None:
        chain.first(i)
        between()
        deep_gemm.fp8_gemm_nt(a, b, out[i])

    return chain, b, out, step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [8, 64, 600])
@pytest.mark.parametrize(("m", "n", "k"), CHAINS)
def test_one_gemm_writes_the_weights_of_the_next(m: int, n: int, k: int, tokens: int, mode: str) -> None:
    """Our kernels let their successors start early, so a missing wait shows here. The weights of the first GEMM are
    constant; those of the second are not."""
    chain, _, out, step = chain_into_weights(m, n, k, tokens)
    declared(chain.source)
    check(step, out, mode)
    assert not bool(out.isnan().any())


@cuda_only
@promises_only
@pytest.mark.parametrize("switched_off", ["retracted", "pdl"])
def test_a_false_promise_shows_and_can_be_taken_back(switched_off: str) -> None:
    """The same chain with a false declaration goes wrong, so the tests above can fail. The first GEMM is long and
    leaves SMs free, on which the second reads the data of the previous repetition."""
    _, b, out, step = chain_into_weights(128, 512, 16384, 8)
    expected = apart(step, out)
    declared(b)
    apart(step, out)  # warm again: the calls below must not be late
    assert any(not torch.equal(bits(found), bits(expected)) for found in back_to_back(step, out, "eager"))
    if switched_off == "retracted":
        deep_gemm.retract_constant(*b)
    else:
        deep_gemm.set_pdl(False)
    apart(step, out)
    assert all(torch.equal(bits(found), bits(expected)) for found in back_to_back(step, out, "eager"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("n2", [576, 4096])
@pytest.mark.parametrize(("m", "n", "k"), [(8, 512, 1024), *CHAINS])
def test_one_gemm_writes_the_activations_of_the_next(m: int, n: int, k: int, n2: int, ready: bool, mode: str) -> None:
    """As in a model, all weights are constant, and each kernel reads the output of the previous one, which the next
    repetition overwrites. If scales are not ready, a kernel that transposes them runs in between."""
    chain = Chain(m, n, k)
    declared(chain.source)
    b = declared(integer_operands(1, n2, 2 * n, DEVICE, seed=3)[1])
    scales = torch.exp2(torch.arange(m, device=DEVICE) % 3 - 1.0)[:, None].expand(m, 2 * n // 128).contiguous()
    a = (chain.as_fp8, deep_gemm.get_mn_major_tma_aligned_tensor(scales) if ready else scales)
    out = outputs(m, n2)

    def step(i: int, between: Callable[[], None]) -> None:
        chain.first(i)
        between()
        deep_gemm.fp8_gemm_nt(a, b, out[i])

    check(step, out, mode)
    assert not bool(out.isnan().any())


@cuda_only
@promises_only
def test_memory_that_is_handed_out_again_is_not_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are declared constant, used until the call is warm, and freed. Then the previous kernel writes new
    weights at the same address."""
    made: list[bool] = []
    launch = engine.launch_record

    def noted(plan: Any, strides: Any, addresses: Any, stream: int, constant: bool = False, *numbers: Any) -> Any:
        if isinstance(plan.spec, GemmSpec):
            made.append(constant)
        return launch(plan, strides, addresses, stream, constant, *numbers)

    monkeypatch.setattr(engine, "launch_record", noted)
    # More than 10 MiB and whole pages: torch allocates such a tensor, and the next of its size, in a separate segment.
    m, n, k = 8, 2048, 8192
    a, (first, scales), _, _ = random_operands(m, n, k, DEVICE, seed=1)
    second = random_operands(m, n, k, DEVICE, seed=2)[1][0]
    a = with_ready_scales(a)
    out = outputs(m, n)
    synchronise()
    torch.cuda.empty_cache()
    b = first.clone()
    address = b.data_ptr()
    declared((b, scales))
    for _ in range(2):
        for i in range(REPEATS):
            deep_gemm.fp8_gemm_nt(a, (b, scales), out[i])
    assert set(made) == {True}
    synchronise()
    del b
    b = torch.empty_like(first)
    assert b.data_ptr() == address, "the allocator did not hand the memory out again, so this test shows nothing"

    def step(i: int, between: Callable[[], None]) -> None:
        write(b, (first, second)[i % 2], "kernel")
        between()
        deep_gemm.fp8_gemm_nt(a, (b, scales), out[i])

    made.clear()
    check(step, out, "eager")
    assert set(made) == {False}
