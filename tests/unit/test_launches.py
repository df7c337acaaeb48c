"""What calls of products launch: the spec, strides and addresses of the GEMM, and the copies before it."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_kinds import BF16, E4M3, F32, FP16, KINDS, G, K, Kind, M, N, Tensors
from gpu_fakes import FakeGpu, calls_behind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import InvalidInputError, ops
from deep_gemm.arch import SM90
from deep_gemm.ops import dense, k_grouped, m_grouped
from deep_gemm.ops.dense import Dense
from deep_gemm.ops.layouts import addressed
from deep_gemm.runtime import calls, engine
from deep_gemm.spec import CopySpec, GemmSpec, Operand
from deep_gemm.testing import guarded

FORMS = ("nt", "nn", "tn", "tt")
DENSE = {"fp8": "fp8_gemm_nt", "bf16": "bf16_gemm_nt", "fp16": "fp16_gemm_nt"}
ENDS = {"index": "contiguous", "psum": "contiguous_psum", "masked": "masked"}
OPS = DENSE | {
    **{f"{name} and c": DENSE[name] for name in ("fp8", "bf16")},
    **{f"{form} {kind}": f"m_grouped_{kind}_gemm_nt_{end}" for form, end in ENDS.items() for kind in ("fp8", "bf16")},
    **dict.fromkeys(("k bf16", "k bf16 and c"), "k_grouped_bf16_gemm_tn_contiguous"),
    "k fp8": "k_grouped_fp8_gemm_nt_contiguous",
    "k padded": "k_grouped_fp8_gemm_nt_padded",
}  # fmt: skip
"""The operation of each kind of product."""
WEIGHTS = [name for name in OPS if not name.startswith("k ")]


# ---- all products


def spec_of(name: str) -> GemmSpec:
    """The spec of a layer with the sizes of a kind's call."""
    groups = G if " " in name and not name.startswith(("fp8", "bf16")) else 1
    accumulate: Any = "from c" if name.endswith("and c") else "none"
    return ops.spec(M, N, K, 132, OPS[name], groups=groups, expected_m=8, accumulate=accumulate)


def strides_of(name: str, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    by_k = name.startswith("k ")
    d = (M * N, N, 1) if by_k else (N, 1)
    a, b = ((1, M), (1, N)) if by_k and "sfa" not in tensors else ((K, 1), (K, 1))
    sfb = (1, N) if by_k else (4, 2, 1) if tensors["b"].dim() == 3 else (2, 1)
    known = {"a": a, "b": b, "sfa": (1, M), "sfb": sfb, "c": d, "d": d}
    return {key: known[key] for key in tensors if key in known and not (by_k and "sfa" in tensors and key in "ab")}


@pytest.mark.parametrize("name", OPS)
def test_a_call_is_the_spec_of_its_layer_and_goes_to_its_operands(gpu: FakeGpu, name: str) -> None:
    """First, warm and replayed."""
    kind = KINDS[name]
    kept = [kind.tensors() for _ in range(4)]
    for tensors in kept:
        for _ in range(3):
            gpu.launched.clear()
            kind(tensors)
            *before, launched = gpu.launched
            assert [x.kernel for x in before] == (["maps"] if name in ("k fp8", "k padded") else [])
            assert launched.spec == spec_of(name)
            assert strides_of(name, tensors).items() <= launched.strides.items()
            assert {key: x.data_ptr() for key, x in tensors.items()}.items() <= launched.at.items()
    assert gpu.prepared <= 6 * len(gpu.launched)
    if name in DENSE:
        kind(kept[0], compiled_dims="n")
        assert gpu.launched[-1].spec != spec_of(name)


@pytest.mark.parametrize("name", OPS)
def test_options_of_the_process_are_in_the_spec_and_each_position_stays_warm(gpu: FakeGpu, name: str) -> None:
    kind = KINDS[name]
    tensors = kind.tensors()
    try:
        for value in (True, False) * 3:
            deep_gemm.set_batch_invariant(value)
            kind(tensors)
            assert gpu.launched[-1].spec == replace(spec_of(name), batch_invariant=value)
        assert gpu.prepared == 2 * len(gpu.launched) // 6
    finally:
        deep_gemm.set_batch_invariant(False)


@pytest.mark.parametrize("name", WEIGHTS)
def test_constant_weights_are_told_to_the_kernel(gpu: FakeGpu, name: str) -> None:
    tensors = KINDS[name].tensors()
    weights = [tensors[key] for key in ("b", "sfb") if key in tensors]
    KINDS[name](tensors)
    deep_gemm.declare_constant(*weights)
    KINDS[name](tensors)
    assert gpu.constants == [False, True]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPS)
def test_fake_tensors_are_checked_and_not_touched(name: str, device: str) -> None:
    real = KINDS[name].tensors()
    narrow = real["d"][..., :8]
    with FakeTensorMode():
        fake = {
            key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            for key, x in (real | {"narrow": narrow}).items()
        }
        narrow = fake.pop("narrow")
        KINDS[name](fake)
        with pytest.raises(InvalidInputError, match=r"shape|must agree in"):
            KINDS[name](fake | {"d": narrow})
        if name == "bf16":
            deep_gemm.cublaslt_gemm_nt(**fake)


def test_each_operation_remembers_its_own() -> None:
    entries = [(entry, variant) for entry in (dense.fp8, dense.bf16, dense.fp16) for variant in range(2)]
    entries += [(x, 0) for x in (m_grouped.fp8, m_grouped.fp8_masked, m_grouped.bf16, m_grouped.bf16_masked)]
    entries += [(x, 0) for x in (k_grouped.fp8, k_grouped.bf16)]
    assert len({id(calls_behind(*entry)) for entry in entries}) == len(entries)


def test_dependent_launch_is_on_at_first_and_never_on_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for its predecessor would hold SMs that set_num_sms leaves to others."""
    asked: list[bool] = []

    def launched(strides: Any, pdl: bool, constant: bool, numbers: Any) -> Any:
        asked.append(pdl)
        return SimpleNamespace(shape=None, parameters=())

    monkeypatch.setattr(engine, "primary_context", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(engine, "Launch", lambda *args: None)

    def launch(whole_gpu: bool) -> bool:
        spec = ops.spec(1, 128, 128, 132, whole_gpu=whole_gpu)
        params = SimpleNamespace(arch="sm_90a")
        plan: Any = SimpleNamespace(launch_plan=launched, spec=spec, params=params, device=0, function=None)
        engine.launch_record(plan, {}, {}, 0)
        return asked[-1]

    assert (deep_gemm.get_pdl(), launch(whole_gpu=True), launch(whole_gpu=False)) == (True, True, False)
    try:
        deep_gemm.set_pdl(False)
        assert (deep_gemm.get_pdl(), launch(whole_gpu=True)) == (False, False)
    finally:
        deep_gemm.set_pdl(True)
    with pytest.raises(InvalidInputError, match="enabled must be True or False"):
        deep_gemm.set_pdl(1)  # type: ignore[arg-type]


# ---- dense products


def at(rows: int, columns: int, strides: tuple[int, int], offset: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return guarded((rows, columns), dtype, "cpu", strides, offset).tensor


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def function(form: str, kind: str = "bf16") -> Any:
    return getattr(deep_gemm, f"{kind}_gemm_{form}")


def stored(form: str, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous a and b in the layout of a form."""
    a, b = ((K, M) if form[0] == "t" else (M, K)), ((K, N) if form[1] == "n" else (N, K))
    return empty(*a, dtype=dtype), empty(*b, dtype=dtype)


@pytest.mark.parametrize(("kind", "dtype", "name"), [("bf16", BF16, "bf16"), ("fp16", FP16, "f16")])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_each_layout_is_a_spec_and_no_copy(
    gpu: FakeGpu, form: str, wide: bool, kind: str, dtype: torch.dtype, name: Any
) -> None:
    function(form, kind)(*stored(form, dtype), empty(M, N, dtype=F32 if wide else dtype))
    (launched,) = gpu.launched
    majors: Any = "mn" if form[0] == "t" else "k", "mn" if form[1] == "n" else "k"
    a, b = (Operand(name, major) for major in majors)
    assert launched.spec == GemmSpec(m=M, n=N, k=K, a=a, b=b, d=Operand("f32" if wide else name, "mn"), num_sms=132)
    wanted = {"a": (1, M) if form[0] == "t" else (K, 1), "b": (1, N) if form[1] == "n" else (K, 1), "d": (N, 1)}
    assert launched.strides == wanted
    assert list(launched.at) == ["a", "b", "d"]


def test_transposed_views_are_read_by_their_strides(gpu: FakeGpu) -> None:
    """SGLang's batch-invariant matmul: nn with b a transposed view is nt."""
    a, b = stored("nt")
    for form, x, y in (("nt", a, b), ("nn", a, b.t()), ("tt", a.t(), b)):
        function(form)(x, y, empty(M, N))
    assert len({launched.spec for launched in gpu.launched}) == 1
    assert [launched.strides for launched in gpu.launched] == [gpu.launched[0].strides] * 3


# fmt: off
WAYS = [
    (at(8, 24, (24, 1)), (24, 1)), (at(8, 24, (40, 1)), (40, 1)), (at(8, 24, (24, 1), offset=16), (24, 1)),
    (at(8, 20, (24, 1)), (24, 1)), (at(8, 24, (1, 8)), (1, 8)), (at(7, 24, (1, 16)), (1, 16)),
    # One row: its stride is ignored. One column fits both ways: it counts as K-major.
    (at(1, 21, (3, 1)), (24, 1)), (at(1, 21, (1, 8)), (1, 8)),
    (at(8, 1, (8, 5)), (8, 1)), (at(9, 1, (1, 5)), (1, 16)), (at(1, 1, (3, 5)), (8, 1)),
    (at(8, 24, (24, 1), offset=2), None), (at(8, 24, (25, 1)), None), (at(8, 24, (1, 9)), None),
    (at(8, 24, (48, 2)), None), (at(9, 24, (1, 8)), None),  # rows that overlap
    *((at(*shape, strides).expand(8, 24), None) for shape, strides in (  # type: ignore[arg-type]
        ((1, 24), (1, 24)), ((8, 1), (8, 1)), ((1, 24), (24, 1)))),
]
# fmt: on


@pytest.mark.parametrize(("x", "way"), WAYS)
def test_what_tma_can_address(x: torch.Tensor, way: tuple[int, int] | None) -> None:
    assert addressed(x) == way


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["a", "b", "ab"])
def test_what_tma_cannot_address_is_copied_first(gpu: FakeGpu, form: str, which: str) -> None:
    """Each call copies it to memory of its own, K-major, from which the kernel reads. A copy of b is not constant: the
    kernel would read it before it is made."""
    kept = []
    for _ in range(3):
        given = dict(zip("ab", stored(form), strict=True))
        for name in which:
            given[name] = at(*given[name].shape, (given[name].shape[1], 1), offset=2)
        deep_gemm.declare_constant(given["b"])
        kept.append(given)
        gpu.launched.clear()
        function(form)(*given.values(), empty(M, N))
        *copies, gemm = gpu.launched
        assert [launched.kernel for launched in copies] == ["copy"] * len(which)
        assert gemm.constant is ("b" not in which)
        for name, copy in zip(which, copies, strict=True):
            assert copy.spec == CopySpec({"a": M, "b": N}[name], K)
            assert copy.at["source"] == given[name].data_ptr()
            flipped = form[0] == "t" if name == "a" else form[1] == "n"
            assert copy.strides == {"source": given[name].stride()[::-1] if flipped else given[name].stride()}
            assert gemm.at[name] == copy.at["target"] != given[name].data_ptr()
            assert (gemm.strides[name], getattr(gemm.spec, name).major) == ((K, 1), "k")
        assert all(gemm.at[name] == given[name].data_ptr() for name in set("ab") - set(which))


def row_scales(rows: int, ready: bool = True) -> torch.Tensor:
    return torch.ones(2, rows).t() if ready else torch.ones(rows, 2)


@pytest.mark.parametrize("ready", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("k_major", [(True, True), (True, False), (False, True), (False, False)])
def test_fp8_that_lies_otherwise_is_transposed_first(gpu: FakeGpu, ready: Any, k_major: Any) -> None:
    """First, warm and replayed; each transpose is launched before the product, which reads what it wrote."""

    def tensors() -> Tensors:
        found = {"d": empty(M, N, dtype=F32)}
        for name, rows, right, straight in zip("ab", (M, N), ready, k_major, strict=True):
            found[name] = torch.zeros(rows, K).to(E4M3) if straight else torch.zeros(K, rows).to(E4M3).t()
            found[f"sf{name}"] = row_scales(rows, right)
        return found

    kind = Kind(tensors, KINDS["fp8"].call, options={"recipe": (1, 1, 128)})
    kept = [kind.tensors() for _ in range(3)]
    wanted = []
    for right, straight in zip(ready, k_major, strict=True):
        wanted += ([] if straight else ["transpose bytes"]) + ([] if right else ["transpose"])
    for operands in (*kept, kept[0], kept[0]):
        gpu.launched.clear()
        deep_gemm.declare_constant(operands["b"], operands["sfb"])
        kind(operands)
        *before, product = gpu.launched
        assert [launched.kernel for launched in before] == wanted
        assert product.constant is (ready[1] and k_major[1])
        written = {launched.at["source"]: launched.at["target"] for launched in before}
        assert product.at == {name: written.get(x.data_ptr(), x.data_ptr()) for name, x in operands.items()}
        assert product.strides == {"a": (K, 1), "b": (K, 1), "sfa": (1, M), "sfb": (1, N), "d": (N, 1)}
        assert (product.spec.d.dtype, product.spec.a.scaling, product.spec.b.scaling) == ("f32", "1x128", "1x128")


SCALES: list[tuple[Any, Any, int, int]] = [
    (torch.ones(()), torch.ones(1), 0, 0),
    (torch.ones(M, 1), torch.ones(1, N), 1, 1),
    (torch.ones(M, 4)[:, 1:2], torch.ones(N, 1), 4, 1),
    (torch.ones(1, 1).expand(M, 1), torch.ones(3, N)[1:2], 0, 1),
    (torch.ones(M), torch.ones(2 * N)[::2], 1, 2),
]


@pytest.mark.parametrize(("sfa", "sfb", "of_a", "of_b"), SCALES)
def test_scales_of_rows_are_read_by_one_stride(
    gpu: FakeGpu, sfa: torch.Tensor, sfb: torch.Tensor, of_a: int, of_b: int
) -> None:
    KINDS["fp8"](KINDS["fp8"].tensors() | {"sfa": sfa, "sfb": sfb}, recipe=None)
    (launched,) = gpu.launched
    assert (launched.spec.a.scaling, launched.spec.b.scaling) == ("row", "row")
    assert (launched.strides["sfa"], launched.strides["sfb"]) == ((of_a,), (of_b,))


def test_copies_are_padded_to_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Dense("bf16_gemm_nt").check(at(3, 13, (13, 1)), at(5, 13, (13, 1)), empty(3, 5))
    monkeypatch.setattr("deep_gemm.options.num_sms_for", lambda device: 132)
    monkeypatch.setattr("deep_gemm.options.whole_gpu", lambda device: True)
    monkeypatch.setattr("deep_gemm.arch.for_device", lambda device: SM90)
    work = Dense("bf16_gemm_nt").launches(x, 0)
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
    out = F32 if wide else BF16
    d = at(M, n, (stride, 1), 2 * offset, out)
    deep_gemm.bf16_gemm_nt(empty(M, K), empty(n, K), d)
    assert gpu.launched[-1].spec.d.aligned is aligned
    # c must be aligned, too.
    deep_gemm.bf16_gemm_nt(empty(M, K), empty(n, K), empty(M, n, dtype=out), c=d)
    assert gpu.launched[-1].spec.d.aligned is (aligned and n % (4 if wide else 8) == 0)
    assert gpu.launched[-1].strides["c"] == (stride, 1)


@pytest.mark.parametrize("name", DENSE)
def test_what_is_added_is_in_the_spec_and_an_operand(gpu: FakeGpu, name: str) -> None:
    for output in {F32, KINDS[name].tensors()["d"].dtype}:
        tensors = KINDS[name].tensors() | {"d": empty(M, N, dtype=output)}
        d, c = tensors["d"], empty(M, N, dtype=output)
        for added, accumulate in ((None, "none"), (d, "in place"), (c, "from c"), (d[:], "in place")):
            KINDS[name](tensors, c=added)
            launched = gpu.launched[-1]
            assert launched.spec.accumulate == accumulate
            assert launched.at.get("c") == (None if added is None else added.data_ptr())
            assert launched.strides.get("c") == (None if added is None else (N, 1))


def test_replays_know_whether_c_is_d(gpu: FakeGpu) -> None:
    """A call that differs in addresses is replayed, unless it adds to another tensor than before."""
    kept: list[Any] = []

    def call(in_place: bool) -> str:
        a, b, d = *stored("nt"), empty(M, N)
        c = d if in_place else empty(M, N)
        before = gpu.prepared
        deep_gemm.bf16_gemm_nt(a, b, d, c)
        launched = gpu.launched[-1]
        kept.append((a, b, c, d))
        assert launched.at == {"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr(), "d": d.data_ptr()}
        assert launched.spec.accumulate == ("in place" if in_place else "from c")
        return "prepared" if gpu.prepared > before else "replayed"

    for in_place in (True, False):
        assert [call(in_place) for _ in range(4)] == ["prepared", "prepared", "replayed", "replayed"]
    assert [call(index % 2 == 0) for index in range(6)] == ["replayed"] * 6


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
    first = (empty(m, k), empty(n, k), empty(m, n), empty(m, n))
    ranges = [calls.byte_range(x) for x in (first[0], first[1], first[3] if in_place else first[2], first[3])]
    lengths = tuple(end - start for start, end in ranges)
    places = tuple(x.data_ptr() for x in (a, b, c, d))
    taken = calls._fits(4, (3,), 2 if in_place else -1)(tuple(start for start, _ in ranges), lengths, places)
    try:
        x = Dense("bf16_gemm_nt", accumulates=True).check(a, b, d, c)
        accepted = x is not None and (x.accumulate == "in place") is in_place
    except InvalidInputError:
        accepted = False
    assert taken == accepted
