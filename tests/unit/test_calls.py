"""Remembered calls: warm calls, and call replays, which differ from an earlier call only in addresses."""

import os
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError
from deep_gemm.ops import layouts
from deep_gemm.ops.dense import Dense
from deep_gemm.runtime import calls, engine, weight_promises
from deep_gemm.testing import Operand, random_operands

M, N, K = 24, 136, 272
NAMES = ("a", "sfa", "b", "sfb", "d")


def operands(ready: bool = True) -> tuple[Operand, Operand]:
    """``ready``: TMA can read the scales of a without a transpose."""
    (a, sfa), b, _, _ = random_operands(M, N, K, "cpu")
    return (a, sfa.t().contiguous().t() if ready else sfa.contiguous()), b


def output() -> torch.Tensor:
    return torch.empty(M, N, dtype=torch.bfloat16)


def run(a: Operand, b: Operand, d: torch.Tensor | None = None) -> None:
    deep_gemm.fp8_gemm_nt(a, b, output() if d is None else d)


def named_operands() -> dict[str, torch.Tensor]:
    (a, sfa), (b, sfb) = operands()
    return dict(zip(NAMES, (a, sfa, b, sfb, output()), strict=True))


def test_warm_calls_are_prepared_once_and_again_after_a_change(gpu: FakeGpu) -> None:
    a, b = operands()
    d = output()
    for change in (lambda: None, lambda: deep_gemm.set_pdl(True), lambda: deep_gemm.declare_constant(*b)):
        change()
        before = gpu.prepared
        for _ in range(3):
            run(a, b, d)
        assert gpu.prepared == before + 1


@pytest.mark.parametrize(("ready", "records"), [(True, [2, 6, 6]), (False, [2, 10, 10])])
def test_a_replay_is_not_prepared_anew(gpu: FakeGpu, ready: bool, records: list[int]) -> None:
    """Only the records that all replays share are made; a call whose addresses repeat gets its own record."""
    cases = [(*operands(ready), output()) for _ in range(5)]
    for prepared in records:
        for case in cases:
            run(*case)
        assert gpu.prepared == prepared
    run(*operands(ready), output())
    assert gpu.prepared == records[-1]  # the calls' own records left the shared ones as they were


def test_the_last_alignment_is_the_one_that_is_replayed(gpu: FakeGpu) -> None:
    """Not the first one for ever: then every call with another alignment would be prepared from scratch."""

    def shifted(elements: int) -> torch.Tensor:
        return torch.empty(M * N + 8, dtype=torch.bfloat16)[elements:][: M * N].view(M, N)

    outputs = [shifted(elements) for elements in (0, 1, 1, 1, 1, 0, 0)]
    a, b = operands()
    prepared = []
    for d in outputs:
        before = gpu.prepared
        run(a, b, d)
        prepared.append(gpu.prepared - before)
    # One record for the first call of a kind, and one that is patched for those after it.
    assert prepared == [1, 1, 1, 0, 0, 1, 1]


def test_a_forked_child_has_no_record_of_its_parent(gpu: FakeGpu) -> None:
    """A thread of the parent, which does not exist in the child, may have held a record's lock."""
    run(*operands())
    assert gpu.calls.replays
    pid = os.fork()
    if pid == 0:
        os._exit(len(gpu.calls.replays) + len(gpu.calls.warm))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gpu.calls.replays


def test_so_many_calls_are_remembered_and_no_more(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_REMEMBERED", 3)
    cases = [(*operands(), output()) for _ in range(10)]
    for case in cases:
        run(*case)
        assert len(gpu.calls.warm) <= 3
    assert len(gpu.launched) == 10


SPAN = 1 << 17
BASES = st.integers(0, SPAN // 4).map(lambda n: n * 4)


@settings(max_examples=100, deadline=None)
@given(st.tuples(BASES, BASES, BASES, BASES, BASES.map(lambda n: n // 2)), st.booleans())
def test_what_a_replay_takes_is_what_the_check_takes(starts: tuple[int, ...], aligned: bool) -> None:
    """For operands anywhere in one buffer: a replay accepts none that the check refuses, and all with the alignment of
    the first."""
    memory = torch.zeros(2 * SPAN + 64, dtype=torch.uint8)
    base = -memory.data_ptr() % 16
    if aligned:
        starts = tuple(start // 16 * 16 for start in starts)

    def at(start: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        size = rows * columns * dtype.itemsize
        return memory[base + start : base + start + size].view(dtype).view(rows, columns)

    a, b, d = (
        at(starts[0], torch.float8_e4m3fn, M, K),
        at(starts[2], torch.float8_e4m3fn, N, K),
        at(starts[4], torch.bfloat16, M, N),
    )
    sfa = at(starts[1], torch.float32, 3, M).t()
    sfb = at(starts[3], torch.float32, 2, 3)
    first = [*operands()[0], *operands()[1], output()]
    ranges = [calls.byte_range(x) for x in first]
    sizes = tuple(end - start for start, end in ranges)
    fits = calls._fits(5, (4,))
    places = tuple(x.data_ptr() for x in (a, sfa, b, sfb, d))
    try:
        Dense("fp8_gemm_nt").check((a, sfa), (b, sfb), d)
        accepted = layouts.scales_stride(sfa) is not None and layouts.tma_writable(d) and places[3] % 16 == 0
    except InvalidInputError:
        accepted = False
    assert fits(tuple(start for start, _ in ranges), sizes, places) == accepted


@pytest.mark.parametrize("name", NAMES)
def test_no_replay_launches_at_address_zero(name: str) -> None:
    """For any first addresses."""
    x = named_operands()
    ranges = [calls.byte_range(tensor) for tensor in x.values()]
    first, sizes = tuple(start for start, _ in ranges), tuple(end - start for start, end in ranges)
    fits = calls._fits(5, (4,))
    assert fits(first, sizes, first)
    nowhere = tuple(0 if place == name else at for place, at in zip(NAMES, first, strict=True))
    assert not fits(first, sizes, nowhere)


def test_both_tensors_of_b_must_be_constant(gpu: FakeGpu) -> None:
    (a, sfa), (b, sfb) = operands()
    d = output()

    def call() -> bool:
        run((a, sfa), (b, sfb), d)
        run((a, sfa), (b, sfb), d)
        first, second = gpu.constants[-2:]
        assert first is second
        return first

    assert not call()
    deep_gemm.declare_constant(b)
    assert not call()
    deep_gemm.declare_constant(a, sfa, d)
    assert not call()
    deep_gemm.declare_constant(sfb)
    assert call()
    deep_gemm.retract_constant(sfb)
    assert not call()
    deep_gemm.declare_constant(sfb)
    deep_gemm.retract_constant(b)
    assert not call()


def test_promises_are_of_the_weights_at_hand(gpu: FakeGpu) -> None:
    cases = [operands() for _ in range(6)]
    for _, b in cases[:4]:
        deep_gemm.declare_constant(*b)
    deep_gemm.declare_constant(cases[4][1][0])  # the weights without their scales
    order = [0, 5, 1, 4, 2, 5, 3, 0]
    for i in order:
        run(*cases[i])
    assert gpu.constants == [i < 4 for i in order]
    deep_gemm.retract_constant(cases[2][1][0])
    run(*cases[2])
    run(*cases[3])
    assert gpu.constants[-2:] == [False, True]


@pytest.mark.parametrize("told", [True, False])
def test_a_warm_call_at_a_reused_address_inherits_no_promise(
    gpu: FakeGpu, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm calls are keyed by addresses, so they rely on the weakref callback at a storage's end."""

    def weights() -> torch.Tensor:
        return torch.frombuffer(buffer, dtype=torch.float8_e4m3fn).view(N, K)

    if not told:  # broken on purpose, to show that the test can fail
        monkeypatch.setattr(weight_promises, "_freed", lambda promise: None)
    a, (_, sfb) = operands()
    d = output()
    buffer = bytearray(N * K)
    b = weights()
    if b.data_ptr() % 16:
        pytest.skip("the buffer lies where no operand may")
    address = b.data_ptr()
    deep_gemm.declare_constant(b, sfb)
    for _ in range(3):
        run(a, (b, sfb), d)
    assert gpu.constants == [True] * 3
    del b
    b = weights()
    assert b.data_ptr() == address
    run(a, (b, sfb), d)
    assert gpu.constants[3:] == [not told]


def test_a_promise_that_ends_during_a_first_call_is_not_remembered(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = operands()
    d = output()
    deep_gemm.declare_constant(*b)
    launch = gpu.launch

    def interrupted(*args: Any) -> Any:
        deep_gemm.retract_constant(*b)  # as another thread might do after the call has looked
        return launch(*args)

    monkeypatch.setattr(engine, "launch_record", interrupted)
    run(a, b, d)
    monkeypatch.setattr(engine, "launch_record", launch)
    run(a, b, d)
    assert gpu.constants == [True, False]
