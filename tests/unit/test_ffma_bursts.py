"""FFMA bursts: which control bits of a cubin's code are changed, and which code is left alone."""

import logging
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import kernels, log
from deep_gemm.kernels.families import B16_GEMM, FP8_GEMM, FP8_SWAPPED
from deep_gemm.kernels.helpers import TRANSPOSE_SCALES
from deep_gemm.kernels.hopper.ffma_bursts import BURST, POST_PASS, in_bursts, second_operand
from deep_gemm.settings import settings

FFMA, FMUL, BRA, BRX, BSSY = 0x223, 0x220, 0x947, 0x949, 0x945
NO_YIELD, FIRST, SECOND = 1 << 45, 1 << 58, 1 << 59
KEPT = (1 << 64) - 1 ^ NO_YIELD ^ SECOND
Word = tuple[int, int]
GEMMS = [kernel for kernel in kernels.registry().values() if kernel.mma_instruction]


def ffma(factor: int, *, to: int = 100, predicate: int = 7, hints: int = NO_YIELD) -> Word:
    # The stall count and the scoreboards to wait for surround the hints.
    return FFMA | predicate << 12 | to << 16 | factor << 32, 1 << 41 | 0b101 << 52 | hints


def branch(index: int, to: int) -> Word:
    offset = (to - index - 1) * 4 & (1 << 38) - 1
    return BRA | (offset & 0xFF) << 16 | (offset >> 8) << 34, 0


def sync_point(index: int, to: int) -> Word:
    return BSSY | (to - index - 1) * 16 << 32, 0


def elf(*kernels: list[Word]) -> bytes:
    """An ELF file with a code section for each kernel, and between them a data section that looks like code."""
    data = [ffma(3), ffma(3)]
    sections = [(b".text.first", kernels[0]), (b".nv.info", data), *((b".text.more", code) for code in kernels[1:])]
    names, body, table = b"\0", b"", [struct.pack("<IIQQQQQQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for name, words in sections:
        content = b"".join(struct.pack("<QQ", *word) for word in words)
        table.append(struct.pack("<IIQQQQQQQ", len(names), 1, 0, 0, 64 + len(body), len(content), 0, 0, 0))
        names += name + b"\0"
        body += content
    table.append(struct.pack("<IIQQQQQQQ", len(names), 3, 0, 0, 64 + len(body), len(names), 0, 0, 0))
    body += names
    sizes = struct.pack("<HHHHHH", 64, 0, 0, 64, len(table), len(table) - 1)
    header = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack("<HHIQQQI", 2, 190, 1, 0, 0, 64 + len(body), 0) + sizes
    return header + body + b"".join(table)


def edited(*code: Word) -> list[Word]:
    image = in_bursts(elf(list(code)), "k")
    return [struct.unpack_from("<QQ", image, 64 + 16 * index) for index in range(len(code))]


def hints(words: list[Word]) -> list[str]:
    """One letter for each instruction: "r" if its second operand is reused, "y" if warps may change after it."""
    return [("r" if high & SECOND else "") + ("" if high & NO_YIELD else "y") for _, high in words]


def test_a_run_becomes_bursts_that_end_in_a_change_of_warps() -> None:
    run = edited(*(ffma(7, hints=SECOND * (i % 2) | NO_YIELD * (i % 2)) for i in range(2 * BURST + 3)))
    assert hints(run) == 2 * (["r"] * (BURST - 1) + ["y"]) + ["r", "r", "y"]


def test_another_factor_ends_a_run() -> None:
    assert hints(edited(ffma(7), ffma(7), ffma(7), ffma(8), ffma(8))) == ["r", "r", "y", "r", "y"]


def test_another_instruction_ends_a_run() -> None:
    between = (FMUL | 7 << 32, NO_YIELD | SECOND)
    assert hints(edited(ffma(7), ffma(7), between, ffma(7), ffma(7))) == ["r", "y", "r", "r", "y"]


def test_a_factor_that_is_overwritten_ends_a_run() -> None:
    assert hints(edited(ffma(7), ffma(7, to=7), ffma(7), ffma(7))) == ["r", "y", "r", "y"]
    assert hints(edited(ffma(7, to=7), ffma(7), ffma(7))) == ["", "r", "y"]


def test_what_may_not_be_done_is_in_no_run() -> None:
    assert hints(edited(ffma(7), ffma(7, predicate=0), ffma(7), ffma(7))) == ["", "", "r", "y"]


def test_one_alone_stays_as_it_is() -> None:
    for own in (0, NO_YIELD, SECOND | NO_YIELD):
        assert edited(ffma(7, hints=own), ffma(8, hints=own)) == [ffma(7, hints=own), ffma(8, hints=own)]


@pytest.mark.parametrize("jump", [branch, sync_point])
def test_nothing_is_kept_for_an_instruction_that_is_jumped_to(jump: object) -> None:
    assert callable(jump)
    code = [jump(0, 3), ffma(7), ffma(7), ffma(7), ffma(7)]
    assert hints(edited(*code))[1:] == ["r", "y", "r", "y"]


def test_a_jump_back_counts_too() -> None:
    code = [ffma(7), ffma(7), ffma(7), ffma(7), branch(4, 2)]
    assert hints(edited(*code))[:4] == ["r", "y", "r", "y"]


def test_what_ptxas_keeps_for_another_operand_stays() -> None:
    kept = ffma(7, hints=FIRST | NO_YIELD)
    assert edited(ffma(7), kept, ffma(7))[1] == kept


def test_every_kernel_of_a_file_and_no_data() -> None:
    image = in_bursts(elf([ffma(7), ffma(7)], [ffma(8), ffma(8)]), "k")
    words = [struct.unpack_from("<QQ", image, 64 + 16 * index) for index in range(6)]
    assert hints(words) == ["r", "y", "", "", "r", "y"]


def test_what_was_done_is_told() -> None:
    assert POST_PASS.describe(elf([ffma(7)] * 5, [ffma(8), ffma(8)])) == "7 FFMAs in 2 runs"
    assert POST_PASS.describe(elf([ffma(7), ffma(8)])) == "0 FFMAs in 0 runs"
    assert POST_PASS.describe(b"not a cubin").startswith("not edited: the first bytes")


def test_a_setting_says_whether_gemms_are_edited() -> None:
    def identities() -> set[str | None]:
        """Of those whose promotion was measured with and without."""
        promoting = [params for family in (FP8_GEMM, FP8_SWAPPED) for params in family.cases()]
        passes = [kernels.get(params.kernel).post_pass(params) for params in promoting]
        return {each and each.identity for each in passes}

    assert identities() == {"ffma-bursts-8"}
    with settings.override(ffma_bursts=False):
        assert identities() == {None}
    for family in (TRANSPOSE_SCALES, B16_GEMM):
        assert family.post_pass(family.cases()[0]) is None


def warned(image: bytes, caplog: pytest.LogCaptureFixture) -> str:
    log._said.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=log.log.name):
        assert in_bursts(image, "some_kernel") == image
    assert len(caplog.records) == 1
    return str(caplog.records[0].message)


def test_code_that_may_jump_anywhere_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert "some_kernel" in (said := warned(elf([ffma(7), ffma(7), (BRX, 0)]), caplog))
    assert "instruction 2 (0x949) may jump anywhere" in said


def test_code_without_runs_may_jump_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=log.log.name):
        assert edited(ffma(7), ffma(8), (BRX, 0)) == [ffma(7), ffma(8), (BRX, 0)]
    assert not caplog.records


def test_a_file_of_another_kind_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert "ELF" in warned(b"not a cubin", caplog)
    whole = elf([ffma(7), ffma(7)])
    for size in (20, 60, len(whole) - 64, len(whole) - 200):
        assert "some_kernel" in warned(whole[:size], caplog)
    cut = bytearray(whole)
    struct.pack_into("<Q", cut, len(whole) - 3 * 64 + 32, 1 << 40)  # the size of the first section
    assert "bytes at 64" in warned(bytes(cut), caplog)
    struct.pack_into("<Q", cut, len(whole) - 3 * 64 + 24, 1 << 63)  # its place
    assert "some_kernel" in warned(bytes(cut), caplog)
    for place in (0x3A, 0x3C):  # size and number of the headers of sections
        cut = bytearray(whole)
        struct.pack_into("<H", cut, place, 0)
        assert "no section of code" in warned(bytes(cut), caplog)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_is_no_exception(damage: list[tuple[int, int]]) -> None:
    image = bytearray(elf([ffma(7), ffma(7), ffma(7)], [ffma(8), ffma(8)]))
    for at, value in damage:
        image[at % len(image)] = value
    assert len(in_bursts(bytes(image), "k")) == len(image)


words = st.one_of(
    st.builds(
        ffma,
        st.integers(4, 6),
        to=st.integers(4, 12),
        predicate=st.sampled_from([7, 7, 7, 0]),
        hints=st.sampled_from([0, NO_YIELD, NO_YIELD | SECOND, NO_YIELD | FIRST | SECOND]),
    ),
    st.tuples(st.just(FMUL), st.integers(0, (1 << 64) - 1)),
)


@given(st.lists(words, max_size=60), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 59)), max_size=4))
def test_only_hints_change_and_what_is_kept_is_used(code: list[Word], jumps: list[tuple[int, int]]) -> None:
    targets = set()
    for at, to in jumps:
        if at < len(code) and to < len(code):
            code[at] = branch(at, to)
    for index, (low, _) in enumerate(code):
        if low & 0xFFF == BRA:
            offset = low >> 34 << 8 | low >> 16 & 0xFF
            targets.add(index + 1 + (offset - (1 << 38) if offset >> 37 else offset) // 4)
    after = edited(*code)
    for index, (old, new) in enumerate(zip(code, after, strict=True)):
        is_ffma = old[0] & 0xFFF == FFMA
        assert new[0] == old[0]
        assert new[1] & KEPT == old[1] & KEPT
        if not is_ffma:
            assert new == old
        if new[1] & SECOND and new[1] != old[1]:
            follower = after[index + 1]
            assert follower[0] & 0xFFF == FFMA
            assert second_operand(follower[0]) == second_operand(new[0]) != new[0] >> 16 & 0xFF
            assert index + 1 not in targets
            assert new[1] & NO_YIELD, "a reused operand is lost if warps change"
    assert edited(*after) == after
