"""Calls that differ from one that was made in nothing but where their operands are."""

from __future__ import annotations

import os

import pytest
import torch
from gpu_fakes import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, dense
from deep_gemm.moved import Gemm, MovedCall
from deep_gemm.testing import Operand, random_operands
from deep_gemm.validate import fp8_gemm as validate

M, N, K = 24, 136, 272


def operands(ready: bool = True) -> tuple[Operand, Operand]:
    (a, sfa), b, _, _ = random_operands(M, N, K, "cpu")
    return (a, sfa.t().contiguous().t() if ready else sfa.contiguous()), b


def run(a: Operand, b: Operand, d: torch.Tensor | None = None) -> None:
    deep_gemm.fp8_gemm_nt(a, b, torch.empty(M, N, dtype=torch.bfloat16) if d is None else d)


@pytest.mark.parametrize("ready", [True, False])
def test_a_moved_call_is_not_prepared_anew(gpu: FakeGpu, ready: bool) -> None:
    """But for the record that all such calls share; one whose addresses come again gets its own."""
    cases = [(*operands(ready), torch.empty(M, N, dtype=torch.bfloat16)) for _ in range(5)]
    for prepared in (2, 2 + 4, 2 + 4):
        for case in cases:
            run(*case)
        assert gpu.prepared == prepared
    assert gpu.launched == [False] * 15
    run(*operands(ready), torch.empty(M, N, dtype=torch.bfloat16))
    assert gpu.prepared == 2 + 4  # those of their own took nothing from the one that is shared


def test_the_last_alignment_is_the_one_that_moves(gpu: FakeGpu) -> None:
    """Not the first, for good: all calls aligned otherwise would be made ready from nothing."""

    def output(skipped: int) -> torch.Tensor:
        return torch.empty(M * N + 8, dtype=torch.bfloat16)[skipped:][: M * N].view(M, N)

    outputs = [output(skipped) for skipped in (0, 1, 1, 1, 1, 0, 0)]
    a, b = operands()
    prepared = []
    for d in outputs:
        before = gpu.prepared
        run(a, b, d)
        prepared.append(gpu.prepared - before)
    # A record for the first of a kind, and one that moves for those after it.
    assert prepared == [1, 1, 1, 0, 0, 1, 1]


def test_scales_that_require_grad_move_where_nothing_is_recorded(gpu: FakeGpu) -> None:
    cases = [operands() for _ in range(3)]
    for (_, sfa), _ in cases:
        sfa.requires_grad_()
    with torch.no_grad():
        for case in cases:
            run(*case)
        assert gpu.prepared == 2
    with pytest.raises(InvalidInputError, match="requires grad"):
        run(*operands()[:1], (cases[0][1][0], cases[0][1][1].clone().requires_grad_()))


def test_addresses_go_to_their_operands(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []
    monkeypatch.setattr(dense.engine, "fp8_gemm_moving", lambda *args, **kwargs: lambda at: seen.append(dict(at)))
    cases = [(*operands(), torch.empty(M, N, dtype=torch.bfloat16)) for _ in range(3)]
    for case in cases:
        run(*case)
    assert seen == [
        {name: x.data_ptr() for name, x in zip(("a", "sfa", "b", "sfb", "d"), (*a, *b, d), strict=True)}
        for a, b, d in cases[1:]
    ]


def test_scales_are_transposed_to_where_the_kernel_reads_them(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, int]] = []
    for function in ("transpose_moving", "fp8_gemm_moving"):
        monkeypatch.setattr(dense.engine, function, lambda *args, **kwargs: lambda at: seen.append(dict(at)))
    cases = [operands(ready=False) for _ in range(3)]
    for case in cases:
        run(*case)
    assert len(seen) == 2 * len(cases)  # at most one more launch
    assert [at["source"] for at in seen[::2]] == [a[1].data_ptr() for a, _ in cases]
    assert [at["target"] for at in seen[::2]] == [at["sfa"] for at in seen[1::2]]
    assert not {at["target"] for at in seen[::2]} & {at["source"] for at in seen[::2]}


def test_promises_are_of_the_weights_at_hand(gpu: FakeGpu) -> None:
    cases = [operands() for _ in range(6)]
    for _, b in cases[:4]:
        deep_gemm.declare_constant(*b)
    deep_gemm.declare_constant(cases[4][1][0])  # not its scales
    order = [0, 5, 1, 4, 2, 5, 3, 0]
    for i in order:
        run(*cases[i])
    assert gpu.launched == [i < 4 for i in order]
    deep_gemm.retract_constant(cases[2][1][0])
    run(*cases[2])
    run(*cases[3])
    assert gpu.launched[-2:] == [False, True]


def test_what_validation_refuses_is_refused_of_a_moved_call_too(gpu: FakeGpu) -> None:
    a, b = operands()
    run(a, b)
    memory = torch.zeros(M * K + 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(InvalidInputError, match="a must start at a multiple of 16 bytes, but its address is 8 past"):
        run((memory[8 : 8 + M * K].view(M, K), a[1]), b)
    shared = torch.zeros(1 << 16, dtype=torch.uint8)
    d = shared[: 2 * M * N].view(torch.bfloat16).view(M, N)
    x = shared[2 * M * N - 16 :][: M * K].view(torch.float8_e4m3fn).view(M, K)
    with pytest.raises(InvalidInputError, match="d and a share memory"):
        run((x, a[1]), b, d)
    scales = a[1].clone().requires_grad_()
    with pytest.raises(InvalidInputError, match="the scales of a requires grad"):
        run((a[0], scales), b)
    with pytest.raises(InvalidInputError, match="the scales of b requires grad"):
        run(a, (b[0], b[1].clone().requires_grad_()))
    assert gpu.launched == [False]


def test_an_operand_on_another_device_is_no_moved_call(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands()
    run(*operands())
    run(a, b)  # makes the record of moved calls

    class Elsewhere(torch.Tensor):
        def get_device(self) -> int:
            return 3

    before = gpu.prepared
    other = b[0].clone().as_subclass(Elsewhere)
    run(a, (other, b[1]))
    assert gpu.prepared == before + 1  # validated and prepared, where devices are compared


def test_an_iterator_is_no_pair(gpu: FakeGpu) -> None:
    a, b = operands()
    with pytest.raises(InvalidInputError, match="a must be a pair"):
        run(iter(a), b)  # type: ignore[arg-type]


def test_a_forked_child_has_no_record_of_its_parent(gpu: FakeGpu) -> None:
    """A thread of the parent, which does not exist there, may have held the lock of one."""
    run(*operands())
    assert dense._moved
    pid = os.fork()
    if pid == 0:
        os._exit(len(dense._moved) + len(dense._warm))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert dense._moved


def test_a_change_of_options_makes_records_anew(gpu: FakeGpu) -> None:
    run(*operands())
    run(*operands())
    before = gpu.prepared
    deep_gemm.set_pdl(True)
    run(*operands())
    run(*operands())
    assert gpu.prepared == before + 2


SPAN = 1 << 17
BASES = st.integers(0, SPAN // 4).map(lambda n: n * 4)


@settings(max_examples=400, deadline=None)
@given(st.tuples(BASES, BASES, BASES, BASES, BASES.map(lambda n: n // 2)), st.booleans())
def test_what_fits_is_what_validation_takes(starts: tuple[int, ...], aligned: bool) -> None:
    """Of operands anywhere in one piece of memory, a moved call takes none that validation refuses, and all that are
    aligned as the first were."""
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
    first = validate(*operands(), torch.empty(M, N, dtype=torch.bfloat16))
    assert first.sfa_ready
    assert first.d_tma
    geometry, addresses = dense._layout(first)
    call = MovedCall(Gemm(None, geometry, addresses, 0, 7, False), first)  # type: ignore[arg-type]
    places = tuple(x.data_ptr() for x in (a, sfa, b, sfb, d))
    try:
        x = validate((a, sfa), (b, sfb), d)
        accepted = x.sfa_ready and x.d_tma
    except InvalidInputError:
        accepted = False
    assert call.fits(places) == accepted  # type: ignore[arg-type]
