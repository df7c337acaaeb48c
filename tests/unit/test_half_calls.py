"""The CUDA path of bf16_gemm and fp16_gemm: specs, strides, copies, warm calls and call replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu, calls_behind
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, ops
from deep_gemm.ops import dense
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.layouts import addressed
from deep_gemm.runtime import calls
from deep_gemm.spec import CopySpec, GemmSpec, Operand
from deep_gemm.testing import guarded

M, N, K = 24, 136, 72
FORMS = ("nt", "nn", "tn", "tt")
BF16 = torch.bfloat16


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A matrix with rows padded to 16 bytes, so that TMA can address them."""
    return torch.zeros(rows, -(-columns // 8) * 8, dtype=dtype)[:, :columns]


def function(form: str, kind: str = "bf16") -> Any:
    return getattr(deep_gemm, f"{kind}_gemm_{form}")


def stored(form: str, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous a and b in the layout of a form."""
    return matrix(*((K, M) if form[0] == "t" else (M, K)), dtype), matrix(
        *((K, N) if form[1] == "n" else (N, K)), dtype
    )


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_each_layout_is_a_spec_and_no_copy(gpu: FakeGpu, form: str, wide: bool, kind: str) -> None:
    dtype, name = (torch.float16, "f16") if kind == "fp16" else (BF16, "bf16")
    a, b = stored(form, dtype)
    function(form, kind)(a, b, torch.empty(M, N, dtype=torch.float32 if wide else dtype))
    (launched,) = gpu.launched
    major_a, major_b = ("mn" if form[0] == "t" else "k"), ("mn" if form[1] == "n" else "k")
    assert launched.spec == GemmSpec(
        m=M,
        n=N,
        k=K,
        a=Operand(name, major_a),  # type: ignore[arg-type]
        b=Operand(name, major_b),  # type: ignore[arg-type]
        d=Operand("f32" if wide else name, "mn"),  # type: ignore[arg-type]
        num_sms=132,
    )
    assert launched.strides == {
        "a": (1, 24) if form[0] == "t" else (72, 1),
        "b": (1, 136) if form[1] == "n" else (72, 1),
        "d": (N, 1),
    }
    assert list(launched.at) == ["a", "b", "d"]


def test_the_spec_of_a_layer_is_that_of_its_call(gpu: FakeGpu) -> None:
    for kind, dtype in (("bf16", BF16), ("fp16", torch.float16)):
        a, b = stored("nt", dtype)
        function("nt", kind)(a, b, torch.empty(M, N, dtype=dtype), compiled_dims="n")
        asked = ops.spec(M, N, K, 132, op=f"{kind}_gemm_nt")
        assert gpu.launched[-1].spec != asked
        function("nt", kind)(a, b, torch.empty(M, N, dtype=dtype))
        assert gpu.launched[-1].spec == asked


def test_transposed_views_are_read_by_their_strides(gpu: FakeGpu) -> None:
    """SGLang's batch-invariant matmul: nn with b a transposed view is nt."""
    a, b = stored("nt")
    d = torch.empty(M, N, dtype=BF16)
    deep_gemm.bf16_gemm_nt(a, b, d)
    deep_gemm.bf16_gemm_nn(a, b.t(), d)
    deep_gemm.bf16_gemm_tt(a.t(), b, d)
    assert len({launched.spec for launched in gpu.launched}) == 1
    assert [launched.strides for launched in gpu.launched] == [gpu.launched[0].strides] * 3


def at(rows: int, columns: int, strides: tuple[int, int], offset: int = 0) -> torch.Tensor:
    return guarded((rows, columns), BF16, "cpu", strides, offset).tensor


@pytest.mark.parametrize(
    ("x", "way"),
    [
        (at(8, 24, (24, 1)), (24, 1)),
        (at(8, 24, (40, 1)), (40, 1)),
        (at(8, 24, (24, 1), offset=16), (24, 1)),
        (at(8, 20, (24, 1)), (24, 1)),
        (at(8, 24, (1, 8)), (1, 8)),
        (at(7, 24, (1, 16)), (1, 16)),
        (at(1, 21, (3, 1)), (24, 1)),  # one row: its stride is ignored
        (at(1, 21, (1, 8)), (1, 8)),
        (at(8, 1, (8, 5)), (8, 1)),  # one column fits both: it counts as K-major
        (at(9, 1, (1, 5)), (1, 16)),
        (at(1, 1, (3, 5)), (8, 1)),
        (at(8, 24, (24, 1), offset=2), None),
        (at(8, 24, (25, 1)), None),
        (at(8, 24, (1, 9)), None),
        (at(8, 24, (48, 2)), None),
        (at(1, 24, (1, 24)).expand(8, 24), None),
        (at(8, 1, (8, 1)).expand(8, 24), None),
        (at(1, 24, (24, 1)).expand(8, 24), None),
        (at(9, 24, (1, 8)), None),  # rows that overlap
    ],
)
def test_what_tma_can_address(x: torch.Tensor, way: tuple[int, int] | None) -> None:
    assert addressed(x) == way


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["a", "b", "ab"])
def test_what_tma_cannot_address_is_copied_first(gpu: FakeGpu, form: str, which: str) -> None:
    """Each call copies it to memory of its own, K-major, from which the kernel reads."""

    def off(x: torch.Tensor) -> torch.Tensor:
        return at(*x.shape, (x.shape[1], 1), offset=2)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        a, b = stored(form)
        a, b = off(a) if "a" in which else a, off(b) if "b" in which else b
        function(form)(a, b, torch.empty(M, N, dtype=BF16))
        return a, b

    for a, b in [call() for _ in range(3)]:
        *copies, gemm = gpu.launched[: len(which) + 1]
        del gpu.launched[: len(which) + 1]
        assert [launched.kernel for launched in (*copies, gemm)] == ["copy"] * len(which) + ["gemm"]
        for name, copy in zip(which, copies, strict=True):
            given = {"a": a, "b": b}[name]
            rows = {"a": M, "b": N}[name]
            assert copy.spec == CopySpec(rows, K)
            assert copy.at["source"] == given.data_ptr()
            flipped = (form[0] == "t") if name == "a" else (form[1] == "n")
            assert copy.strides == {"source": given.stride()[::-1] if flipped else given.stride()}
            assert gemm.at[name] == copy.at["target"] != given.data_ptr()
            assert gemm.strides[name] == (K, 1)
            assert getattr(gemm.spec, name).major == "k"
        for name in set("ab") - set(which):
            assert gemm.at[name] == {"a": a, "b": b}[name].data_ptr()
    assert gpu.launched == []


def test_copies_are_padded_to_16_bytes() -> None:
    a, b = at(3, 13, (13, 1)), at(5, 13, (13, 1))
    x = Dense("bf16_gemm_nt").check(a, b, torch.empty(3, 5, dtype=BF16))
    assert x is not None
    options = pytest.MonkeyPatch()
    with options.context() as patch:
        patch.setattr("deep_gemm.options.num_sms_for", lambda device: 132)
        patch.setattr("deep_gemm.options.whole_gpu", lambda device: True)
        work = Dense("bf16_gemm_nt").work(x, 0)
    assert work.scratch == {"a copied": ((3, 16), BF16), "b copied": ((5, 16), BF16)}
    assert work.steps[-1].strides == {"d": (5, 1), "a": (16, 1), "b": (16, 1)}


@pytest.mark.parametrize(
    ("n", "stride", "offset", "wide", "aligned"),
    [
        *((16, 16, 0, False, True), (12, 16, 0, False, False), (16, 20, 0, False, False), (16, 16, 2, False, False)),
        *((12, 12, 0, True, True), (16, 20, 0, True, True), (6, 8, 0, True, False)),
    ],
)
def test_whether_tma_can_write_d(gpu: FakeGpu, n: int, stride: int, offset: int, wide: bool, aligned: bool) -> None:
    out = torch.float32 if wide else BF16
    d = guarded((M, n), out, "cpu", (stride, 1), 2 * offset).tensor
    deep_gemm.bf16_gemm_nt(matrix(M, K), matrix(n, K), d)
    assert gpu.launched[-1].spec.d.aligned is aligned
    # c must be aligned, too.
    deep_gemm.bf16_gemm_nt(matrix(M, K), matrix(n, K), torch.empty(M, n, dtype=out), c=d)
    fresh = n % (4 if wide else 8) == 0
    assert gpu.launched[-1].spec.d.aligned is (aligned and fresh)
    assert gpu.launched[-1].strides["c"] == (stride, 1)


def test_what_is_added_is_in_the_spec_and_an_operand(gpu: FakeGpu) -> None:
    a, b = stored("nt")
    c, d = matrix(M, N), matrix(M, N)
    for added, accumulate in ((None, "none"), (d, "in place"), (c, "from c"), (d[:], "in place")):
        deep_gemm.bf16_gemm_nt(a, b, d, added)
        launched = gpu.launched[-1]
        assert launched.spec.accumulate == accumulate
        assert launched.at.get("c") == (None if added is None else added.data_ptr())
        assert launched.strides.get("c") == (None if added is None else (N, 1))


def test_replays_know_whether_c_is_d(gpu: FakeGpu) -> None:
    """A call that differs in addresses is replayed, unless it adds to another tensor than before."""

    def call(in_place: bool) -> str:
        a, b = stored("nt")
        d = matrix(M, N)
        c = d if in_place else matrix(M, N)
        before = gpu.prepared
        deep_gemm.bf16_gemm_nt(a, b, d, c)
        launched = gpu.launched[-1]
        kept.append((a, b, c, d))
        assert launched.at == {"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr(), "d": d.data_ptr()}
        assert launched.spec.accumulate == ("in place" if in_place else "from c")
        return "prepared" if gpu.prepared > before else "replayed"

    kept: list[Any] = []
    assert [call(True) for _ in range(4)] == ["prepared", "prepared", "replayed", "replayed"]
    assert [call(False) for _ in range(4)] == ["prepared", "prepared", "replayed", "replayed"]
    assert [call(index % 2 == 0) for index in range(6)] == ["replayed"] * 6


def test_a_part_of_d_is_no_c_whichever_way_a_call_takes(gpu: FakeGpu) -> None:
    a, b = stored("nt")
    memory = torch.zeros(2 * M, N, dtype=BF16)
    d = memory[:M]
    for _ in range(3):
        deep_gemm.bf16_gemm_nt(a, b, d, matrix(M, N))
        deep_gemm.bf16_gemm_nt(a, b, d, d)
    gpu.launched.clear()
    for c in (memory[8 : 8 + M], memory.view(-1)[N // 2 :][: M * N].view(M, N)):
        with pytest.raises(InvalidInputError, match="d and c share memory"):
            deep_gemm.bf16_gemm_nt(a, b, d, c)
    assert gpu.launched == []


@settings(max_examples=200, deadline=None)
@given(st.tuples(*[st.integers(0, 400).map(lambda x: 16 * x)] * 4), st.booleans())
def test_what_a_replay_takes_is_what_the_check_takes(starts: tuple[int, int, int, int], in_place: bool) -> None:
    m, n, k = 8, 16, 24
    memory = torch.zeros(1 << 13, dtype=torch.uint8)
    base = -memory.data_ptr() % 16

    def place(start: int, rows: int, columns: int) -> torch.Tensor:
        return memory[base + start :][: 2 * rows * columns].view(BF16).view(rows, columns)

    a, b, d = place(starts[0], m, k), place(starts[1], n, k), place(starts[3], m, n)
    c = d if in_place else place(starts[2], m, n)
    first = (matrix(m, k), matrix(n, k), matrix(m, n), matrix(m, n))
    ranges = [calls.byte_range(x) for x in (first[0], first[1], first[3] if in_place else first[2], first[3])]
    fits = calls._fits(4, (3,), 2 if in_place else -1)
    taken = fits(
        tuple(start for start, _ in ranges),
        tuple(end - start for start, end in ranges),
        tuple(x.data_ptr() for x in (a, b, c, d)),
    )
    try:
        x = Dense("bf16_gemm_nt", accumulates=True).check(a, b, d, c)
        accepted = x is not None and (x.accumulate == "in place") is in_place
    except InvalidInputError:
        accepted = False
    assert taken == accepted


def test_warm_calls_are_prepared_once(gpu: FakeGpu) -> None:
    a, b = stored("tn")
    d = torch.empty(M, N, dtype=BF16)
    for added in (None, d, matrix(M, N)):
        before = gpu.prepared
        for _ in range(3):
            deep_gemm.bf16_gemm_tn(a, b, d, added)
        assert gpu.prepared == before + 1


def test_flipping_the_switch_keeps_both_positions_warm(gpu: FakeGpu) -> None:
    a, b = stored("nt")
    d = torch.empty(M, N, dtype=BF16)
    try:
        for value in (True, False) * 3:
            deep_gemm.use_deterministic_algorithms(value)
            deep_gemm.bf16_gemm_nt(a, b, d)
            assert gpu.launched[-1].spec.batch_invariant is value
        assert gpu.prepared == 2
    finally:
        deep_gemm.use_deterministic_algorithms(False)


@pytest.mark.parametrize("form", FORMS)
def test_constant_weights_are_told_to_the_kernel_unless_they_are_copied(gpu: FakeGpu, form: str) -> None:
    """Otherwise the GEMM would read the copy before it is made."""
    a, b = stored(form)
    d = torch.empty(M, N, dtype=BF16)
    function(form)(a, b, d)
    deep_gemm.declare_constant(b)
    function(form)(a, b, d)
    off = at(*b.shape, (b.shape[1], 1), offset=2)
    deep_gemm.declare_constant(off)
    for _ in range(2):
        function(form)(a, off, d)
        function(form)(a, off, torch.empty(M, N, dtype=BF16))
    assert gpu.constants == [False, True, False, False, False, False]
    # A copy of a does not matter: only weights are read early.
    function(form)(at(*a.shape, (a.shape[1], 1), offset=2), b, d)
    assert gpu.constants[-1] is True


def test_each_operation_remembers_its_own() -> None:
    entries = (dense.fp8, dense.bf16, dense.fp16)
    assert len({id(calls_behind(entry, variant)) for entry in entries for variant in range(2)}) == 6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_are_checked_and_not_touched(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b, d = (torch.empty(*shape, dtype=BF16, device=device) for shape in ((M, K), (N, K), (M, N)))
        deep_gemm.bf16_gemm_nt(a, b, d)
        deep_gemm.bf16_gemm_nt(a, b, d, d)
        deep_gemm.cublaslt_gemm_nt(a, b, d)
        with pytest.raises(InvalidInputError, match="agree in K"):
            deep_gemm.bf16_gemm_nt(a, torch.empty(N, 8, dtype=BF16, device=device), d)
    deep_gemm.bf16_gemm_nt(a, b, d)


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_memory_that_is_gone_is_refused(gpu: FakeGpu, name: str) -> None:
    x = dict(zip("abcd", (*stored("nt"), matrix(M, N), matrix(M, N)), strict=True))
    for _ in range(2):
        deep_gemm.bf16_gemm_nt(**x)
    x[name].untyped_storage().resize_(0)
    gpu.launched.clear()
    with pytest.raises(InvalidInputError, match=f"^{name} has no memory"):
        deep_gemm.bf16_gemm_nt(**x)
    assert gpu.launched == []
