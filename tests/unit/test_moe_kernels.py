"""Kernels that send tokens to experts and add their results, on a CPU, beside their references bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import step_cases
import torch
from emulation import Emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.kernels.moe_kernels import GATED
from deep_gemm.ops import moe_rows
from deep_gemm.ops.moe_rows import Activate, Combine, Dispatch, Dots, Route, most_rows

E4M3, F32, I32, NAN = torch.float8_e4m3fn, torch.float32, torch.int32, float("nan")
ALIGNMENT, SMS = 16, 3
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


_made: dict[Any, Emulated] = {}


def run(x: Any, folder: Path, *edits: tuple[str, str, str], backwards: bool = False, sms: int = SMS) -> None:
    """The kernel for checked operands, which it writes."""
    spec = replace(x.spec, num_sms=sms) if hasattr(x.spec, "num_sms") else x.spec
    family: Any = kernels.for_helper(spec, SM90)
    params = family.params(spec, family.config_of(spec, SM90), SM90)
    key = params, edits
    if key not in _made:
        _made[key] = Emulated(folder / f"{len(_made)}", params, *edits)
    _made[key](spec, x.tensors, backwards=backwards)


def columns_first(*shape: int) -> Tensor:
    """Scales as products read them, of NaN: what is not written is seen."""
    return torch.full((*shape[:-2], shape[-1], shape[-2]), NAN).mT


def dispatched(sizes: tuple[int, ...], masked: bool, fp8: bool, given: tuple[str, ...], seed: int = 0) -> Tensors:
    """Operands for tokens, experts, top_k and width. Some choices are no experts, and in a masked form some repeat."""
    tokens, experts, top_k, width = sizes
    torch.manual_seed(seed)
    rows = (experts, -(-tokens // 4) * 4) if masked else (most_rows(tokens * top_k, experts, ALIGNMENT),)
    blocks = -(-width // 128)
    found = {"x": torch.randn(tokens, width).bfloat16()}
    if fp8:
        found = {"x": found["x"].to(E4M3), "sfx": torch.rand(blocks, tokens).t()}
    chosen = torch.randint(-2, experts + 3, (tokens, top_k))
    found |= {
        "chosen": chosen.masked_fill(chosen == experts + 2, 1 << 33),
        "layout": torch.full((experts,), -7, dtype=I32),
    }
    found |= {"places": torch.full((tokens, top_k), -7, dtype=I32)}
    found |= {"weights": torch.rand(tokens, top_k), "factors": torch.full(rows, NAN)} if "weights" in given else {}
    found |= {"stats": torch.arange(experts, dtype=I32)} if "stats" in given else {}
    if "copied" in given:
        return found | {"values": torch.full((*rows, width), NAN).bfloat16()}
    values = torch.full((*rows, width), 255, dtype=torch.uint8).view(E4M3)
    return found | {"values": values, "scales": columns_first(*rows, blocks)}


def both(sizes: tuple[int, ...], masked: bool, fp8: bool, given: tuple[str, ...], folder: Path, **how: Any) -> None:
    cast = "copied" not in given
    operation = Dispatch((*(["sfx"] if fp8 else []), *(name for name in given if name != "copied")), cast)
    results = []
    for seed in (0, 0):
        tensors = dispatched(sizes, masked, fp8, given, seed)
        out: Any = (tensors["values"], tensors["scales"]) if cast else tensors["values"]
        named = {name: x for name, x in tensors.items() if name not in ("values", "scales")}
        results.append(operation.check(**named, out=out, alignment=ALIGNMENT))
    operation.reference(results[0])
    run(results[1], folder, *how.pop("edits", ()), **how)
    for name, wanted in results[0].tensors.items():
        bits = torch.uint8 if wanted.element_size() == 1 else None
        found = results[1].tensors[name]
        wanted, found = (x.view(bits) if bits else x for x in (wanted, found))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


SIZES = [(1, 8, 2, 128), (7, 5, 3, 272), (40, 40, 4, 144), (3, 1500, 33, 1040)]
"""Tokens, experts, top_k, width: more choices than a warp takes at once, and more experts than a CTA has threads."""


LONG = pytest.mark.long


@pytest.mark.parametrize("given", [(), ("weights", "stats")], ids=["plain", "weights and stats"])
@pytest.mark.parametrize(
    ("masked", "fp8"),
    [
        pytest.param(False, False, id="psum-bf16", marks=LONG),
        pytest.param(False, True, id="psum-fp8"),
        pytest.param(True, False, id="masked-bf16"),
        pytest.param(True, True, id="masked-fp8", marks=LONG),
    ],
)
def test_tokens_are_sent_as_the_reference_sends_them(
    masked: bool, fp8: bool, given: tuple[str, ...], folder: Path
) -> None:
    for sizes in SIZES:
        both(sizes, masked, fp8, given, folder, backwards=sizes[0] == 7)


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=LONG)], ids=["psum", "masked"])
def test_tokens_are_copied_as_the_reference_copies_them(masked: bool, folder: Path) -> None:
    for sizes in SIZES:
        both(sizes, masked, False, ("copied",), folder)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.integers(1, 132), st.booleans())
def test_any_sizes(folder: Path, tokens: int, experts: int, top_k: int, sms: int, masked: bool) -> None:
    both((tokens, experts, top_k, 16), masked, False, (), folder, sms=sms)


BREAKS: dict[str, tuple[str, str]] = {
    "choices of other tokens": (
        "choice < from.rows * top_k; choice +=",
        "choice < split(blockIdx.x + 1) * top_k; choice +=",
    ),
    "before": ("choice < first * top_k", "choice <= first * top_k"),
    "the alignment": ("ceil_div(count, room) * room", "count"),
    "the order of a warp": ("__popc(lower)", "0"),
    "the row of the next": ("before[e] = row + 1", "before[e] = row"),
    "a barrier": (
        "    if (thread < 32) place(shared, first * top_k, last * top_k);\n    __syncthreads();",
        "    if (thread < 32) place(shared, first * top_k, last * top_k);",
    ),
    "unknown experts": ("e < 0 || e >= static_cast<i64>(experts)", "e < 0"),
    "columns": ("% across * 8", "% across * 16"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BREAKS)
def test_a_wrong_kernel_is_seen(name: str, folder: Path) -> None:
    edit = ("moe_dispatch.cuh", *BREAKS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        all_sizes(edit, folder)


def all_sizes(edit: tuple[str, str, str], folder: Path) -> None:
    for sizes in SIZES[:3]:
        both(sizes, False, False, (), folder, edits=(edit,), backwards=True)


def combined(tokens: int, top_k: int, width: int, weighted: bool, biased: bool) -> tuple[Tensors, Tensors]:
    """Operands for the reference, and the same for the kernel. Rows that no choice has are NaN."""
    torch.manual_seed(tokens)
    x = torch.full((tokens * top_k + 9, width), NAN).bfloat16()
    places = torch.randperm(len(x))[: tokens * top_k].view(tokens, top_k).int()
    x[places.flatten().long()] = torch.randn(tokens * top_k, width).bfloat16()
    places[torch.rand(places.shape) < 0.2] = -1
    found = {"x": x, "places": places, **({"weights": torch.rand(tokens, top_k)} if weighted else {})}
    if biased:
        found |= {"chosen": torch.randint(7, places.shape).masked_fill(places < 0, -1)}
        found |= {"bias": torch.randn(7, width).bfloat16()}
    wide = [torch.full((tokens, width + 8), 7.0).bfloat16() for _ in range(2)]
    first, second = ({**found, "y": each[:, :width]} for each in wide)
    return first, second


def check_sums(
    tokens: int,
    top_k: int,
    width: int,
    weighted: bool,
    folder: Path,
    *edits: tuple[str, str, str],
    biased: bool = False,
) -> None:
    operation = Combine(weighted, biased)
    wanted, found = (operation.check(**each) for each in combined(tokens, top_k, width, weighted, biased))
    assert wanted is not None
    assert found is not None
    operation.reference(wanted)
    run(found, folder, *edits)
    assert torch.equal(found.tensors["y"], wanted.tensors["y"])


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=LONG) for kind in ("plain", "weighted")), "weighted and biased"]
)
def test_rows_are_added_as_the_reference_adds_them(kind: str, folder: Path) -> None:
    for tokens, top_k, width in ((1, 1, 16), (5, 8, 272), (37, 6, 128), (2, 33, 4096)):
        check_sums(tokens, top_k, width, kind != "plain", folder, biased="biased" in kind)


@pytest.mark.long
@pytest.mark.parametrize(
    "edit",
    [
        ("input_stride + column) * 2, row >= 0,", "input_stride + column) * 2, true,"),
        ("__fadd_rn(sums[e],", "__fadd_rn(sums[0],"),
    ],
)
def test_a_wrong_sum_is_seen(edit: tuple[str, str], folder: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_sums(5, 8, 272, True, folder, ("moe_combine.cuh", *edit), biased=True)


def check_routed(sizes: tuple[int, int, int], folder: Path, *edits: tuple[str, str, str], **how: Any) -> None:
    given = step_cases.routed(*sizes, "cpu", ALIGNMENT)
    run(Route().check(**given), folder, *edits, **how)
    step_cases.check_routed(given)


@pytest.mark.parametrize("sizes", step_cases.ROUTED, ids=str)
def test_choices_get_the_rows_of_the_reference(sizes: tuple[int, int, int], folder: Path) -> None:
    check_routed(sizes, folder, backwards=sizes[0] == 7)
    given = step_cases.routed(*sizes, "cpu")
    moe_rows.route(*given.values())
    step_cases.check_routed(given)


@pytest.mark.parametrize(
    "edit",
    [
        ("e += gridDim.x)", "e += 2 * gridDim.x)"),
        ("row < capacity;", "row + 1 < capacity;"),
        ("row < 0 ?", "row < -1 ?"),
        ("(blockIdx.x == 0)", "(blockIdx.x == 1)"),
    ],
)
def test_a_wrong_row_is_seen(edit: tuple[str, str], folder: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_routed((40, 40, 4), folder, ("moe_route.cuh", *edit))


def check_dots(sizes: tuple[int, int, int], folder: Path, *edits: tuple[str, str, str]) -> None:
    given = step_cases.dots(*sizes, "cpu")
    run(Dots().check(**given), folder, *edits)
    step_cases.check_dots(**given)


@pytest.mark.parametrize("sizes", step_cases.DOTS, ids=str)
def test_dot_products_are_those_of_float64(sizes: tuple[int, int, int], folder: Path) -> None:
    wanted = step_cases.dots(*sizes, "cpu")
    step_cases.compute_dots(wanted)
    step_cases.check_dots(**wanted)
    check_dots(sizes, folder)


@pytest.mark.parametrize("edit", [("at[i] >= 0,", "true,"), ("i < kWarps; ++i)", "i < 1; ++i)")])
def test_a_wrong_dot_product_is_seen(edit: tuple[str, str], folder: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_dots((5, 8, 272), folder, ("moe_dots.cuh", *edit))


def activated(function: str, fp8: bool, biased: bool, masked: bool, columns: int) -> list[Tensors]:
    """Operands for the reference, and the same for the kernel: 9 tokens with 4 of 5 experts. Rows without a choice are
    NaN."""
    torch.manual_seed(columns)
    shape = (5, 12) if masked else (60,)
    x = torch.full((60, 2 * columns), NAN)
    places = torch.randperm(60)[:36].view(9, 4).int()
    x[places.flatten().long()] = 3 * torch.randn(36, 2 * columns)
    places[torch.rand(places.shape) < 0.2] = -1
    found = {"x": x.bfloat16().view(*shape, -1), "places": places}
    if biased:
        found |= {"chosen": torch.randint(5, (9, 4)), "bias": torch.randn(5, 2 * columns).bfloat16()}
    made = []
    for _ in range(2):
        values = torch.full((*shape, columns), 7.0).to(E4M3 if fp8 else torch.bfloat16)
        scales = {"scales": columns_first(*shape, -(-columns // 128))} if fp8 else {}
        made.append({**found, "values": values, **scales})
    return made


def check_activation(
    function: str, fp8: bool, biased: bool, masked: bool, columns: int, folder: Path, *edits: tuple[str, str, str]
) -> None:
    operation = Activate(function, fp8, biased)
    checked = []
    for tensors in activated(function, fp8, biased, masked, columns):
        named = {name: x for name, x in tensors.items() if name not in ("values", "scales")}
        out: Any = (tensors["values"], tensors["scales"]) if fp8 else tensors["values"]
        checked.append(operation.check(**named, out=out, limit=2.0))
    wanted, found = checked
    assert wanted is not None
    assert found is not None
    operation.reference(wanted)
    run(found, folder, *edits)
    if fp8:
        torch.testing.assert_close(found.tensors["scales"], wanted.tensors["scales"], rtol=1e-5, atol=0, equal_nan=True)
    spread = {"rtol": 1 / 8 if fp8 else 1 / 128, "atol": 0.1 if fp8 else 1e-5}  # one step of the dtype
    torch.testing.assert_close(found.tensors["values"].float(), wanted.tensors["values"].float(), **spread)
    unwritten = (found.tensors["values"].float() == 7).all(-1).sum()
    assert unwritten == 60 - (found.tensors["places"] >= 0).sum(), "rows that no choice has are not written"


@pytest.mark.parametrize(
    ("function", "fp8"),
    [
        pytest.param(function, fp8, marks=[LONG] * (fp8 != bool(i % 2)), id=f"{function}-{'fp8' if fp8 else 'bf16'}")
        for i, function in enumerate(GATED)
        for fp8 in (False, True)
    ],
)
def test_activations_are_those_of_the_reference(function: str, fp8: bool, folder: Path) -> None:
    for columns, masked in ((96, True), (288, False), (1120, True)):
        check_activation(function, fp8, function == "swigluoai", masked, columns, folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "edit",
    [
        ("if (row < 0) return;\n    tile.row = static_cast<u32>(row);", "tile.row = row < 0 ? 0 : row;"),
        ("static_cast<int>(chosen[choice])", "0"),
        ("tile.row / room * scale_stride_group", "0"),
        ("% across * Tile::kColumns", "% across * 0"),
    ],
    ids=str,
)
def test_a_wrong_activation_is_seen(edit: tuple[str, str], folder: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check_activation("swigluoai", True, True, True, 1120, folder, ("moe_activate.cuh", *edit))
