"""Every kernel and case through both compilers: fast code, and the resources that the host computed."""

import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chosen import FAMILIES, PLAIN, SWAPPED, case, find_config, make_params
from house import unlike_the_record
from kernel_builds import (
    Builds,
    Built,
    build_all,
    builds_of,
    each_of,
    for_nvcc,
    in_one_bank,
    kept_operands,
    loaded_maps,
    moves_to_uniform,
    open_compiler,
    starts_before_it_stores,
    static_shared,
    stores_by_tma,
    upright,
)
from listings import instructions

from deep_gemm import kernels
from deep_gemm.jit import sass
from deep_gemm.kernels.families import FP8_BATCHED, FP8_BATCHED_SWAPPED
from deep_gemm.kernels.hopper import ffma_bursts as bursts
from deep_gemm.kernels.hopper.edges import segments
from deep_gemm.kernels.hopper.template import slices, turns
from deep_gemm.log import log
from deep_gemm.params import KernelParams

# 16-bit GEMMs are in test_b16_compile.py.
CASES = [
    params for family in kernels.registry().values() if family.mma_instruction != "HGMMA" for params in family.cases()
]
FIRST_OF_EACH = list({params.kernel: params for params in reversed(CASES)}.values())
GEMMS = [params for family in FAMILIES for params in family.cases()]


# Descriptors of operands must stay in uniform registers. If ptxas believes that a loop count is divergent, it keeps
# them in ordinary registers and moves each before every product, which cost 5 to 20% on an H200. Moves of scale factors
# are allowed: 128x192 tiles with such moves took 0 to 2% less time on an H200 than without (four shapes, single calls
# in turns).
LOOPS = [
    case(FP8_BATCHED, 128, 256, (2, 1), 1, 1),
    case(FP8_BATCHED_SWAPPED, 8, 1, 1, 2),
] + [
    make_params(config)
    for config in (
        find_config(PLAIN, block_m=256, block_n=128),
        find_config(PLAIN, block_m=128, block_n=192),
        find_config(PLAIN, block_m=64, block_n=16),
        find_config(PLAIN, block_m=128, block_n=64, cluster_k=2),
        find_config(PLAIN, block_m=128, block_n=128, cluster_m=2),
        find_config(SWAPPED, block_m=8),
        find_config(SWAPPED, block_m=64),
        find_config(SWAPPED, block_m=16, cluster_k=4),
        find_config(SWAPPED, block_m=48, consumers_k=2),
    )
]

KERNELS = {"nvrtc": list(dict.fromkeys(CASES + LOOPS)), "nvcc": list(dict.fromkeys(for_nvcc(CASES) + LOOPS[::4]))}


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    """Not in the cache that files share: what is compared with the record is built here."""
    with builds_of(tmp_path_factory.mktemp("kernels"), request) as found:
        yield found


@pytest.fixture
def built(builds: Builds, kind: str, params: KernelParams) -> Built:
    return builds(kind, params)


def each(cases: Iterable[KernelParams]) -> pytest.MarkDecorator:
    return each_of(cases, KERNELS)


@each(CASES)
def test_nothing_is_spilled_or_serialised(built: Built, params: KernelParams) -> None:
    resources = built.binary.resources
    assert (resources.stack, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
    assert resources.warnings == ()
    assert resources.problems() == []
    assert resources.shared_static == static_shared(params)
    # There are no module variables, which the driver would have to allocate and relocate at each load.
    assert b".nv.global" not in built.binary.cubin
    assert b".nv.constant4" not in built.binary.cubin


@each(CASES)
def test_cubins_are_as_recorded(built: Built, kind: str, params: KernelParams) -> None:
    assert not unlike_the_record(built.binary)


@each(FIRST_OF_EACH)
def test_code_agrees_with_what_ptxas_reports(built: Built, params: KernelParams) -> None:
    """A kernel without a stack has no local memory in any form: loads and stores, or indexed arrays of registers."""
    assert instructions(built.sass) == instructions(sass(built.binary.cubin))
    assert built.binary.resources.stack == 0
    assert re.findall(r"\b(?:LDL|STL|LDLM|STLM)\b.*", built.sass) == []
    instruction = kernels.get(params.kernel).mma_instruction
    assert instruction in built.sass if instruction else "GMMA" not in built.sass


@each(GEMMS)
def test_the_gemm_is_made_of_the_instructions_it_asks_for(built: Built, params: KernelParams) -> None:
    fields, config = kernels.get(params.kernel).fields(params), params.gemm
    # Consumers that take turns wait at a named barrier before each product, and then release the next consumer.
    assert any("BAR.ARV" in instruction for instruction in built.loop) == takes_turns(params)
    assert set(re.findall(r"\bQGMMA\.\S+", built.sass)) == {f"QGMMA.64x{fields['mma_n']}x32.F32.E4M3.E4M3"}
    loads, stores = "UTMALDG.2D" in built.sass, "UTMASTG.2D" in built.sass
    assert (loads, stores) == (True, stores_by_tma(params))
    # The launch chooses the policy evict-first for weights and for D.
    for instruction, some in (("UTMALDG", True), ("UTMASTG", stores)):
        told = {"desc[" in line for line in re.findall(rf"\b{instruction}\.2D.*", built.sass)}
        assert told == ({False, True} if some else set())
    # Warps copy staged tiles 16 bytes at a time if TMA does not store them.
    if params.store == "tma" and not stores:
        assert "STG.E.128" in built.sass
    assert "UTMALDG.3D" not in built.sass
    # Operands are multicast in clusters along m or n, and only there.
    assert ("UTMALDG.2D.MULTICAST" in built.sass) == (config.cluster_m * config.cluster_n > 1)
    # A fence for the whole GPU takes hundreds of cycles. Only the split-K exchange between CTAs has one; cluster
    # barriers have none.
    assert len(re.findall(r"MEMBAR\.\S*GPU", built.sass)) <= int(config.cluster_k > 1)
    assert ("USETMAXREG" in built.sass) == (int(fields["consumer_registers"]) > 0)
    threads = int(fields["num_threads"]) * int(fields["min_ctas"])
    assert built.binary.resources.registers * threads <= 65536


@each(params for params in CASES if "e5m2" in params.dtype)
def test_code_for_e5m2_is_that_for_e4m3_but_for_the_types_of_products(
    built: Built, kind: str, params: KernelParams, tmp_path: Path
) -> None:
    twin = replace(params, dtype="e4m3")
    with build_all(open_compiler(kind), tmp_path, [twin]) as found:
        other = found[twin].result()
    of_a, _, of_b = params.dtype.upper().partition("_")
    types = (of_b or of_a, of_a) if params.gemm.swap_ab else (of_a, of_b or of_a)
    wanted = f"QGMMA.64x{kernels.get(params.kernel).fields(params)['mma_n']}x32.F32.{'.'.join(types)}"
    assert set(re.findall(r"\bQGMMA\.\S+", built.sass)) == {wanted}
    assert instructions(re.sub(r"(QGMMA\.\S+\.F32)\.\S+", r"\1.E4M3.E4M3", built.sass)) == instructions(other.sass)
    assert built.binary.resources == other.binary.resources


def takes_turns(params: KernelParams) -> bool:
    """Whether consumers start their products in turn."""
    return turns(params.gemm) > 1


@each(LOOPS)
def test_descriptors_stay_in_uniform_registers(built: Built, params: KernelParams) -> None:
    moves = moves_to_uniform(built.loop)
    assert len(moves) <= 2, "\n".join(moves)


def adds_no_residual(params: KernelParams) -> bool:
    """A residual's loads are in the loop of some kernels, and take registers of the banks of sums."""
    return not params.epilogue.residual


@each(filter(adds_no_residual, filter(takes_turns, GEMMS)))
def test_consumers_in_turn_have_one_copy_of_their_loop(built: Built, params: KernelParams) -> None:
    """A step of it has as many instructions as one that is unrolled over the ring, with immediates for addresses."""
    config = upright(params)
    assert config is not None
    units = slices(config) * config.block_n // int(kernels.get(params.kernel).fields(params)["mma_n"])
    promotion = sum(" FFMA " in f" {step}" for step in built.loop)
    assert promotion == slices(config) * config.block_n // 2
    assert len(built.loop) - promotion <= (30 if params.store == "tma" else 36) + 22 * units, "\n".join(built.loop)


@each(filter(stores_by_tma, GEMMS))
def test_who_stores_a_tile_fences_what_others_wrote(built: Built, params: KernelParams) -> None:
    ordering = re.findall(r"FENCE\.VIEW\.ASYNC|BAR\.SYNC|UTMASTG", built.sass)
    before = [first for first, second in itertools.pairwise(ordering) if second == "UTMASTG" != first]
    assert before
    assert set(before) == {"FENCE.VIEW.ASYNC"}


@each(GEMMS)
def test_the_maps_of_loads_are_asked_for_ahead(built: Built, params: KernelParams) -> None:
    assert built.sass.count("UTMACCTL.PF") == len(loaded_maps(params))


@each(GEMMS)
def test_a_tiles_first_product_waits_for_no_scale_of_b(built: Built, params: KernelParams) -> None:
    """The loads of B's first scales are issued before it, and may come from HBM. A move of a loaded scale would
    wait."""
    asked: set[str] = set()
    for line in built.sass.split("WARPGROUP.ARRIVE")[0].splitlines():
        if loaded := re.search(r"\bLDG\.\S+ (R\d+),", line):
            asked.add(loaded[1])
        elif moved := re.search(r"\bR2UR \S+, (R\d+)", line):
            assert moved[1] not in asked, line
        elif written := re.search(r"\*/\s+(?:@!?U?P\d+ )?[A-Z][A-Z0-9._]* (R\d+),", line):
            asked.discard(written[1])
    assert asked


@each(GEMMS)
def test_weights_come_nearer_before_the_wait(built: Built, params: KernelParams) -> None:
    """Blocks of B, in whole boxes or edge boxes, are prefetched into L2 before the CTA's first barrier, and so before
    the wait for the previous kernel and before any load."""
    meeting = r"BAR\.SYNC\.DEFER_BLOCKING 0x0|UCGABAR_WAIT"
    order = re.findall(rf"UTMAPF|UTMALDG|ACQBULK|{meeting}", built.sass)
    boxes = sum(boxes_of_weights(params))
    assert order.count("UTMAPF") == boxes
    first = order.index("UTMAPF")
    assert order[first : first + boxes] == ["UTMAPF"] * boxes
    assert re.fullmatch(meeting, order[first + boxes])


def boxes_of_weights(params: KernelParams) -> tuple[int, int]:
    """The number of B's boxes in the code for a block of K: for a whole tile, and in the code for tiles at the edge,
    which tests each of them. A single box has the same code for both."""
    boxes = len(segments(params.gemm.block_n))
    return boxes, boxes if boxes > 1 else 0


def has_ramp(params: KernelParams) -> bool:
    """Whether loads of the ring's first round have a loop of their own, without waits."""
    return params.gemm.num_stages >= 8


def pauses(params: KernelParams) -> bool:
    """Whether early loads are spaced. Not in rings with few stages, or with more bytes of tokens than of weights."""
    config = params.gemm
    return config.num_stages >= 4 and config.block_n >= config.block_m


@each(GEMMS)
def test_producers_go_round_short_loops(built: Built, params: KernelParams) -> None:
    """A stage of a narrow tile is filled in less than 200 cycles. Values that are constant within a tile are computed
    before the loop: with a third more instructions 64x32 tiles took 6% longer at 64 x 2112 x 7168."""
    lines = [line.strip() for line in built.sass.splitlines()]
    lines = [line for line in lines if re.match(r"/\*[0-9a-f]{4,}\*/|\.L_\w+:", line)]
    places = {line.rstrip(":"): index for index, line in enumerate(lines) if line.startswith(".L_")}
    loads = [index for index, line in enumerate(lines) if "UTMALDG" in line]
    whole, edge = boxes_of_weights(params)
    assert len(loads) >= 2 * (whole + edge) + 2  # of B with and without a hint, of A, and of its scales
    for load in loads:
        jumps = ((index, re.search(r"BRA `\((\.L_\w+)\)", line)) for index, line in enumerate(lines[load:], load))
        end, begin = next((index, places[jump[1]]) for index, jump in jumps if jump and places[jump[1]] <= load)
        round_ = [line for line in lines[begin:end] if not line.startswith(".L_")]
        loads_in_round = sum("UTMALDG" in line for line in round_)
        assert loads_in_round in (1, whole, 2 * edge), "a map is chosen in each round"
        paused = pauses(params) and not has_ramp(params)  # the pause is skipped after the first round
        assert len(round_) <= 32 + 14 * (loads_in_round - 1) + 12 * paused


@each(GEMMS)
def test_constant_weights_are_not_asked_for_too_fast(built: Built, params: KernelParams) -> None:
    """The outputs of the previous kernel are loaded after them. Rings with few stages wait for a free stage anyway."""
    loads = built.sass.split("UTMALDG")
    clocks = ["SR_CLOCKLO" in after for after in loads[1:]]
    assert any(clocks) == pauses(params)
    # Only the loops that load weights have pauses: with and without the policy, and at the edge. Theirs are the first
    # loads of the code.
    whole, edge = boxes_of_weights(params)
    first = 2 * (whole + edge) * (1 + has_ramp(params))
    assert sum(clocks) == sum(clocks[:first]) == (2 + (edge > 0) if any(clocks) else 0)


@each(GEMMS)
def test_weights_wait_behind_early_ones(built: Built, params: KernelParams) -> None:
    """With and without the policy, and at the edge, the code has a wait, the loads, and a wait after the early loads.
    Rings with few stages know none. (In clusters they also wait twice: CTAs outside have code of their own.)"""
    config = params.gemm
    order = "".join(found[0] for found in re.findall(r"ACQBULK|UTMALDG", built.sass))
    whole, edge = (boxes * (1 + has_ramp(params)) for boxes in boxes_of_weights(params))
    at_edge = f"AU{{{2 * edge}}}A+" if edge else ""
    waits = re.search(f"{at_edge}(AU{{{whole}}}A+){{2}}", order)
    if config.num_stages >= 4:
        assert waits, order
    elif config.cluster_m * config.cluster_n == 1:
        assert not waits, order


@each(GEMMS)
def test_consumers_with_time_to_lose_look_early_for_the_next_stage(built: Built, params: KernelParams) -> None:
    """They test the next stage's barrier once for each block of the loop, while the block's products run, and before
    the previous block is promoted."""
    config = upright(params)
    loop = built.loop
    steps = [re.sub(r"^@\S+ ", "", step).split(" ")[0] for step in loop]
    looks = [index for index, step in enumerate(steps) if step == "SYNCS.PHASECHK.TRANS64"]
    if config is None or config.block_m * config.block_n >= 128 * 128 or config.num_partials == 1:
        assert not looks
        return
    each_block = 4 * slices(config) * (config.block_n // PLAIN.template.mma_n(config))
    assert sum("GMMA" in step for step in steps) == each_block * len(looks) > 0
    for look in looks:  # promotion lies between the test and the use of its result
        onwards = (steps + steps)[look + 1 :]
        until = onwards.index("SYNCS.PHASECHK.TRANS64.TRYWAIT")
        assert onwards[:until].count("FFMA") >= config.block_n / 4


@each(filter(starts_before_it_stores, GEMMS))
def test_no_tile_ends_with_a_wait_for_the_first_product_of_the_next(built: Built, params: KernelParams) -> None:
    """That product is the last in the code. The loop over blocks, which comes earlier in the code, waits for it."""
    code = built.sass
    last = code.rindex("GMMA.")
    assert "WARPGROUP.DEPBAR" in code[:last]
    assert "WARPGROUP.DEPBAR" not in code[last:]


@each(GEMMS)
def test_promotion_comes_in_bursts(built: Built, params: KernelParams, caplog: pytest.LogCaptureFixture) -> None:
    # The hints were recognised and edited. A second edit changes nothing and gives no warning.
    with caplog.at_level(logging.WARNING, logger=log.name):
        assert bursts.in_bursts(built.binary.cubin, built.binary.name) == built.binary.cubin
    assert not caplog.records
    ((_, words),) = bursts.code_sections(built.binary.cubin)
    found = bursts.runs(words)
    assert found
    # Nearly all FFMA are in runs, and a run is as long as a thread's columns with one scale. ptxas sometimes moves one
    # of eight or four FFMA away from the others, and one of sixteen where there are several scales.
    if config := upright(params):
        several = len(segments(config.block_n)) > 1
        columns = min(64 if several else 128, segments(config.block_n)[0]) // 4
        moved = columns <= 8 or several
        assert max(last - first for first, last in found) >= columns - moved
        assert sum(last - first for first, last in found) >= 0.8 * len(re.findall(r"\bFFMA\b", built.sass))
    for line, after in kept_operands(built.sass):
        assert not after.startswith(".L_"), f"{line} keeps an operand for what is jumped to as well"


@each(filter(adds_no_residual, GEMMS))
def test_sums_lie_in_another_bank_than_products(built: Built, params: KernelParams) -> None:
    assert in_one_bank(built.loop) == []
