"""What kernels take on trust: labels, counts, ends, sizes, ranges, lengths, pages and schedules. The CPU refuses what
breaks the contract, before it writes anything; DG_CHECK=1 refuses it in each call on a GPU, and otherwise nobody
looks."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from call_kinds import KINDS, Kind, Tensors
from gpu_fakes import FakeGpu
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from logit_cases import decoding, prompt, schedule

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, settings
from deep_gemm.ops import device_values

BF16 = torch.bfloat16
ALIGNMENT = 128


def rows(psum: bool, groups: int, m: int, layout: list[int]) -> Kind:
    """A product grouped by M."""

    def tensors() -> Tensors:
        found = {"a": (m, 64), "b": (groups, 16, 64), "d": (m, 16)}
        made = {name: torch.zeros(shape, dtype=BF16) for name, shape in found.items()}
        return made | {"grouped_layout": torch.tensor(layout, dtype=torch.int32)}

    return Kind(tensors, functools.partial(deep_gemm.m_grouped_bf16_gemm_nt_contiguous, use_psum_layout=psum))


def ranges(**options: Any) -> Kind:
    def call(q: Any, k: Any, scales: Any, weights: Any, start: Any, end: Any) -> None:
        deep_gemm.fp8_mqa_logits(q, (k, scales), weights, start, end, **options)

    return Kind(lambda: {name: x.clone() for name, x in vars(prompt(9, 300)).items()}, call)


def paged(columns: int) -> Kind:
    def tensors() -> Tensors:
        last = [100, 300, 0, 600]
        made, meta = decoding(last, next_n=2, width=640), torch.tensor(schedule(last, 3), dtype=torch.int32)
        return {name: getattr(made, name) for name in ("q", "cache", "weights", "lengths", "table")} | {"meta": meta}

    def call(q: Any, cache: Any, weights: Any, lengths: Any, table: Any, meta: Any) -> None:
        deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, meta, columns)

    return Kind(tensors, call)


INDEX = rows(False, 3, 384, [0] * 128 + [1] * 128 + [2] * 128)
LONG = rows(False, 3, 8960, [0] * 8960)
PSUM = rows(True, 3, 384, [128, 200, 384])
WIDE, NARROW = paged(700), paged(640)
Value = Callable[[torch.Tensor], object]


def to(*values: int) -> Value:
    return lambda x: x.copy_(torch.tensor(values).view(x.shape))


def at(*place: int, is_: int) -> Value:
    return lambda x: x.__setitem__(place, is_)


def copies(*labels: tuple[int, int]) -> Value:
    """Labels, each so many times."""
    return to(*(label for label, count in labels for _ in range(count)))


WRONG: dict[str, tuple[Kind, str, Value, str]] = {
    "a label of no group": (*(INDEX, "grouped_layout", at(7, is_=3)),
        "has the group 3 in row 7, but b has 3 groups. Labels are from 0 to 2, or -1"),
    "a negative label": (INDEX, "grouped_layout", at(7, is_=-2), "has the group -2 in row 7, but b has 3 groups"),
    "groups of 128, 130 and 126 rows without padding":
        (*(INDEX, "grouped_layout", copies((0, 128), (1, 130), (2, 126))),
        r"has the groups 1 and 2 in rows 256 to 383. Begin each group at a multiple of 128 rows"),
    "a group that comes again": (*(INDEX, "grouped_layout", copies((0, 128), (1, 128), (0, 128))),
        "has the group 0 again from row 256 on, after rows of other groups. Rows of a group must follow each other"),
    "padding in too many places": (*(LONG, "grouped_layout", copies(*[(0, 64), (-1, 64)] * 70)),
        "has 70 runs of labels between 64 rows or more of padding, but 32 are the most with 3 groups"),
    "an end past a": (PSUM, "grouped_layout", to(128, 200, 385), r"\[2\] is 385, but it must be from 0 to 384"),
    "an end below zero": (PSUM, "grouped_layout", to(-1, 200, 384), r"\[0\] is -1, but it must be from 0 to 384"),
    "an end before the group's start": (*(PSUM, "grouped_layout", to(100, 110, 384)),
        r"\[1\] is 110, but group 1 begins at row 128: where the group before ends, rounded up to a multiple of 128"),
    "ends that fall": (PSUM, "grouped_layout", to(200, 128, 384), r"\[1\] is 128, but group 1 begins at row 256"),
    "more rows than there is room for": (*(KINDS["masked fp8"], "layout", to(3, 25)),
        r"^masked_m\[1\] is 25, but it must be from 0 to 24, the number of rows of a group"),
    "a count below zero": (KINDS["masked bf16"], "layout", to(-1, 3), r"^masked_m\[0\] is -1"),
    "sizes past K": (*(KINDS["k bf16"], "layout", to(130, 127)),
        "must be 0 or more, and add up to at most 256, the K of a, but the least is 127, and they add up to 257"),
    "a size below zero": (KINDS["k bf16 and c"], "layout", to(-64, 64), "must be 0 or more, .* the least is -64"),
    "a size of odd bytes": (*(KINDS["k fp8"], "layout", to(120, 136)),
        r"grouped_layout\[0\] is 120, but K of each group must be a multiple of 16"),
    "more blocks than scales": (*(KINDS["k fp8"], "layout", to(16, 240)),
        "the scales of a have 2 columns, but groups of the sizes in grouped_layout have 3 blocks of 128"),
    "parts past K": (KINDS["k padded"], "layout", to(1, 129), "groups end at 257 of K, but K of a is 256"),
    "a part below zero": (KINDS["k padded"], "layout", to(-1, 64), r"grouped_layout\[0\] is -1"),
    "a group without a bias": (*(KINDS["silu and mul and biases"], "groups", at(7, is_=2)),
        r"groups\[7\] is 2, but bias has 2 rows: groups are from 0 to 1, and -1 is none"),
    "a first token that attends more": (*(WIDE, "lengths", at(0, 0, is_=101)),
        r"context_lens\[0, 0\] is 101, more than that of the request's last token, 100"),
    "a page that is missing": (*(WIDE, "table", at(1, 4, is_=-1)),
        r"block_table\[1, 4\] is -1, but it must be from 0 to 42, a block of kv_cache: .* the request has 300 keys"),
    "a page past the cache": (WIDE, "table", at(0, 1, is_=43), r"block_table\[0, 1\] is 43"),
    "a schedule that begins late": (*(WIDE, "meta", at(0, 0, is_=1)),
        r"schedule_meta is not that of context_lens: in row 0 it has \(1, 0\), .* get_paged_mqa_logits_metadata"),
    "a schedule that ends early": (WIDE, "meta", at(3, 0, is_=3), r"in row 3 it has \(3, 0\)"),
    "a schedule that goes back": (WIDE, "meta", to(0, 0, 3, 1, 1, 0, 4, 0), r"in row 2 it has \(1, 0\)"),
    "a schedule of another batch": (WIDE, "meta", to(0, 0, 1, 1, 5, 0, 5, 0), r"in row 2 it has \(5, 0\)"),
}  # fmt: skip
"""A call of right values, the operand that is changed in place, the change, and the refusal's words."""


@pytest.mark.parametrize("case", WRONG)
def test_the_cpu_refuses_it_and_writes_nothing(case: str) -> None:
    kind, operand, change, words = WRONG[case]
    tensors = kind.tensors()
    kind(tensors)
    change(tensors[operand])
    before = {name: x.clone() for name, x in tensors.items()}
    if "d" in tensors:
        before["d"] = tensors["d"].fill_(7.0).clone()
    with pytest.raises(InvalidInputError, match=words):
        kind(tensors)
    for name, x in before.items():
        assert torch.equal(*(each.contiguous().view(torch.uint8) for each in (x, tensors[name]))), name


@pytest.fixture
def held(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Results of logits lie at the same addresses in each call, so that calls can be warm."""
    monkeypatch.setattr(torch, "empty", functools.cache(torch.empty))
    return gpu


@contextmanager
def variable(value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DG_CHECK", value)
        yield


CHECKED = {"environment": lambda: variable("1"), "override": lambda: settings.override(check=True)}


@pytest.mark.parametrize("way", CHECKED)
@pytest.mark.parametrize("case", WRONG)
def test_each_checked_call_refuses_it(held: FakeGpu, case: str, way: str) -> None:
    """After calls that were remembered without the check, and after calls that were checked and right."""
    kind, operand, change, words = WRONG[case]
    tensors = kind.tensors()
    for _ in range(3):
        kind(tensors)
    right = tensors[operand].clone()
    change(tensors[operand])
    kind(tensors)  # nobody looks
    with CHECKED[way]():
        for _ in range(2):
            held.launched.clear()
            with pytest.raises(InvalidInputError, match=words):
                kind(tensors)
            assert held.launched == []
            tensors[operand].copy_(right)
            for _ in range(3):
                kind(tensors)
            assert held.launched
            change(tensors[operand])
    for _ in range(3):
        kind(tensors)
    prepared = held.prepared
    kind(tensors)
    assert held.prepared == prepared, "calls are warm again"
    with variable("maybe"), pytest.raises(deep_gemm.SettingError, match="DG_CHECK must be"):
        kind(tensors)


SYNCHRONISING = ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu", "unique")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What waits for the device, by the name of the method."""
    found: list[str] = []
    for name in SYNCHRONISING:
        real = getattr(torch.Tensor, name)

        def counted(x: torch.Tensor, *others: Any, real: Any = real, name: str = name) -> Any:
            found.append(name)
            return real(x, *others)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return found


@pytest.mark.parametrize("case", ["a negative label", "ends that fall", "a count below zero", "sizes past K"])
def test_a_checked_call_waits_once_and_another_never(held: FakeGpu, case: str, waits: list[str]) -> None:
    kind, *_ = WRONG[case]
    tensors = kind.tensors()
    kind(tensors)
    assert waits == []
    with settings.override(check=True):
        kind(tensors)
    assert waits == ["tolist"]


@pytest.mark.parametrize("case", ["a negative label", "a size of odd bytes", "a page past the cache"])
def test_nothing_is_checked_during_capture(held: FakeGpu, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, *_ = WRONG[case]
    tensors = kind.tensors()
    kind(tensors)
    launched = len(held.launched)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with (
        settings.override(check=True),
        pytest.raises(UnsupportedError, match=r"DG_CHECK=1 reads values .* graph is being captured.* Unset DG_CHECK"),
    ):
        kind(tensors)
    assert len(held.launched) == launched
    kind(tensors)
    assert len(held.launched) > launched


def test_calls_without_such_values_stay_warm_under_the_check(held: FakeGpu) -> None:
    tensors = KINDS["fp8"].tensors()
    with settings.override(check=True):
        KINDS["fp8"](tensors)
        prepared = held.prepared
        KINDS["fp8"](tensors)
    assert held.prepared == prepared


def test_a_fallback_obeys_the_same_contract(held: FakeGpu) -> None:
    kind, operand, change, words = WRONG["a group that comes again"]
    tensors, held.unsupported = kind.tensors(), "no kernel"
    change(tensors[operand])
    with settings.override(fallback="torch"), pytest.raises(InvalidInputError, match=words):
        kind(tensors)


RIGHT: dict[str, tuple[Kind, str, Value]] = {
    "padding at the beginning, inside and alone": (
        *(INDEX, "grouped_layout", copies((-1, 3), (0, 5), (-1, 120), (-1, 128), (1, 2), (-1, 7), (1, 119))),
    ),
    "groups in another order": (INDEX, "grouped_layout", copies((2, 128), (0, 128), (1, 128))),
    "no row of any group": (INDEX, "grouped_layout", copies((-1, 384))),
    "a group that padding interrupts": (INDEX, "grouped_layout", copies((1, 128), (-1, 128), (1, 128))),
    "as many interruptions as there may be": (LONG, "grouped_layout", copies(*[(0, 64), (-1, 64)] * 32, (-1, 4864))),
    "an empty group that ends where the one before does": (PSUM, "grouped_layout", to(100, 100, 130)),
    "an empty group that ends at its start": (PSUM, "grouped_layout", to(100, 128, 130)),
    "empty groups at the start": (PSUM, "grouped_layout", to(0, 0, 384)),
    "an empty group whose start is past a": (rows(True, 2, 148, [140, 140]), "grouped_layout", to(140, 256)),
    "no rows": (KINDS["masked fp8"], "layout", to(0, 24)),
    "sizes that leave a rest": (KINDS["k bf16"], "layout", to(0, 3)),
    "blocks that are not whole": (KINDS["k fp8"], "layout", to(16, 32)),
    "a range of nothing": (ranges(), "start", at(3, is_=300)),
    "a start below zero": (ranges(), "start", at(3, is_=-1)),
    "an end past the keys": (ranges(max_seqlen_k=40), "end", at(8, is_=301)),
    "a length below zero, as of an empty slot of a graph": (WIDE, "lengths", at(2, 0, is_=-1)),
    "a length past the result": (NARROW, "lengths", at(3, 1, is_=641)),
    "a length past the table": (WIDE, "lengths", at(3, 1, is_=641)),
    "a page after the keys": (WIDE, "table", at(0, 2, is_=-7)),
    "slots without work": (WIDE, "meta", to(0, 0, 4, 0, 4, 0, 4, 0)),
    "a slot that begins at a request's end": (WIDE, "meta", to(0, 0, 1, 2, 3, 1, 4, 0)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_taken(held: FakeGpu, case: str) -> None:
    kind, operand, change = RIGHT[case]
    tensors = kind.tensors()
    change(tensors[operand])
    with settings.override(check=True):
        kind(tensors)
    assert held.launched


def refused(faults: list[Any]) -> bool:
    return any(bool(fault.where.any()) for fault in faults)


@examples(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 3), st.integers(1, 200)), min_size=1, max_size=8), st.sampled_from([64, 128]))
def test_labels_are_taken_where_a_kernel_obeys_them(runs: list[tuple[int, int]], alignment: int) -> None:
    given = [label for label, count in runs for _ in range(count)]
    layout = torch.tensor(given, dtype=torch.int32)
    blocks = [{x for x in given[i : i + alignment] if x >= 0} for i in range(0, len(given), alignment)]
    order = [label for i, label in enumerate(x for x in given if x >= 0)]
    order = [label for i, label in enumerate(order) if i == 0 or order[i - 1] != label]
    legal = set(given) <= {-1, 0, 1, 2} and all(len(x) <= 1 for x in blocks) and len(set(order)) == len(order)
    assert refused(device_values.labels(layout, 3, alignment)) == (not legal)


@examples(max_examples=300, deadline=None)
@given(st.data())
def test_a_schedule_is_taken_where_each_split_is_computed_once(data: st.DataObject) -> None:
    """By the loop of a CTA in ``logits_paged.cuh``."""
    last = data.draw(st.lists(st.integers(0, 1100), min_size=1, max_size=5))
    rows = schedule(last, data.draw(st.integers(1, 5)))
    for place in data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=3)):
        rows[place] = [data.draw(st.integers(0, len(last))), data.draw(st.integers(0, 6))]
    done = []
    for (request, split), (last_request, last_split) in itertools.pairwise(rows):
        while request < len(last) and (request, split) < (last_request, last_split):
            end = min(last[request], last_split * 256) if request == last_request else last[request]
            done += [(request, first // 256) for first in range(split * 256, end, 256)]
            request, split = request + 1, 0
    wanted = [(request, split) for request, keys in enumerate(last) for split in range(-(-keys // 256))]
    found = device_values.schedule(torch.tensor(rows, dtype=torch.int32), torch.tensor(last, dtype=torch.int32), 256)
    if refused(found):
        assert done != wanted or rows != sorted(rows)
    else:
        assert done == wanted
