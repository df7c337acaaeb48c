"""Which operands and options products accept, and what they say of others. `tests/house.json` records what the usual
mistakes say: other dtypes, shapes, ranks and layouts of each argument. Here are those that need other tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from call_kinds import BF16, E4M3, F32, FP16, KINDS, G, K, Kind, M, N
from grouped_cases import call as grouped
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops.dense import Dense
from deep_gemm.testing import guarded

FORMS = ("nt", "nn", "tn", "tt")
DENSE_FP8 = KINDS["fp8"]
Change = dict[str, Any]


def at(shape: Any, dtype: torch.dtype, strides: Any = None, offset: int = 0) -> torch.Tensor:
    """A tensor of other strides, ``offset`` bytes past a multiple of 16."""
    return guarded(tuple(shape), dtype, "cpu", strides or torch.empty(shape).stride(), offset).tensor


def fp8(*shape: int, **where: Any) -> torch.Tensor:
    return at(shape, E4M3, **where)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


def scaled(m: int, n: int, k: int) -> Change:
    """Operands of `fp8_gemm_nt` of other sizes."""
    sizes = {"sfa": torch.ones(m, -(-k // 128)), "sfb": torch.ones(-(-n // 128), -(-k // 128))}
    return {"a": zeros(m, k, dtype=E4M3), "b": zeros(n, k, dtype=E4M3), "d": zeros(m, n), **sizes}


def in_one_buffer() -> Change:
    """d, and the scales of a in the columns behind it."""
    buffer = torch.zeros(M, 128)
    return {"sfa": buffer[:, 70:72], "d": buffer.view(BF16)[:, :N]}


def one_after_the_other() -> Change:
    memory = torch.zeros(M * K + M * N * 2, dtype=torch.uint8)
    return {"a": memory[: M * K].view(E4M3).view(M, K), "d": memory[M * K :].view(BF16).view(M, N)}


ONE, ANY = torch.tensor(0.5), {"recipe": None}
WORDS = partial(torch.full, fill_value=0x7F7F7F7F, dtype=torch.int32)
PACKED = {"sfa": WORDS((M, 1)), "sfb": WORDS((N, 1))}
"""Scales of 1.0 as exponents."""
# fmt: off
RIGHT: dict[str, Change] = {
    "no recipe": ANY,
    "a recipe as a list": {"recipe": [1, 128, 128]},
    "recipes of operands": ANY | {"recipe_a": (1, 128), "recipe_b": [128, 128]},
    "other options": {"disable_ue8m0_cast": True, "c": None, "compiled_dims": "", "pair": list},
    "the smallest sizes": scaled(1, 1, 16), "one row": scaled(1, N, K), "one column": scaled(M, 1, K),
    "sizes past blocks": scaled(3, 129, 144),
    "rows with padding": {"a": fp8(M, K, strides=(K + 48, 1)), "b": fp8(N, K, strides=(K + 16, 1))},
    "one row with any stride": scaled(1, N, K) | {"a": fp8(1, K, strides=(K + 7, 1))},
    "expanded scales": {"sfa": torch.ones(1, 1).expand(M, 2)},
    "sliced scales": {"sfa": torch.ones(M + 9, 5)[4:-5, 1:3]},
    "transposed scales of b": {"sfb": torch.ones(2, 2).t()},
    "d with padded rows": {"d": at((M, N), BF16, (N + 3, 1))}, "d off alignment": {"d": at((M, N), BF16, offset=2)},
    "d of one column": scaled(M, 1, K) | {"d": zeros(M, 5)[:, 2:3]},
    "d of one row": scaled(1, N, K) | {"d": zeros(2, N + 1)[1:, :N]},
    "one allocation": one_after_the_other(), "one buffer": in_one_buffer(),
}
SCALINGS: dict[str, tuple[Change, tuple[str, str]]] = {
    "blocks": ({}, ("1x128", "128x128")), "blocks, without a recipe": (ANY, ("1x128", "128x128")),
    "weight gradients": ({"sfb": torch.ones(N, 2), "recipe": (1, 1, 128)}, ("1x128", "1x128")),
    "the same as pairs": (ANY | {"sfb": torch.ones(N, 2), "recipe_a": (1, 128), "recipe_b": [1, 128]},
                          ("1x128", "1x128")),
    "one of each operand": (ANY | {"sfa": ONE, "sfb": ONE[None, None]}, ("row", "row")),
    "one of each row": (ANY | {"sfa": torch.ones(M, 1), "sfb": torch.ones(1, N)}, ("row", "row")),
    "as columns": (ANY | {"sfa": torch.ones(M, 1), "sfb": torch.ones(N, 1)}, ("row", "row")),
    "one, and one of each row": (ANY | {"sfa": ONE[None], "sfb": torch.ones(1, N)}, ("row", "row")),
    "exponents": (ANY | PACKED, ("ue8m0", "ue8m0")),
    "exponents, with a recipe": (PACKED | {"recipe": (1, 1, 128)}, ("ue8m0", "ue8m0")),
    "blocks, where K has one": (ANY | scaled(M, N, 128), ("1x128", "128x128")),
    "rows, where K has one block": (ANY | scaled(M, N, 128) | {"sfb": torch.ones(1, N)}, ("row", "row")),
}
# fmt: on


def run(kind: Kind, change: Change) -> None:
    tensors = kind.tensors()
    options = {name: value for name, value in change.items() if name not in tensors}
    kind(tensors | {name: value for name, value in change.items() if name in tensors}, **options)


@pytest.mark.parametrize("case", RIGHT)
def test_unusual_but_right(case: str) -> None:
    run(DENSE_FP8, RIGHT[case])


def checked(change: Change) -> Any:
    """The operands of `fp8_gemm_nt` after its check."""
    given = DENSE_FP8.tensors() | change
    pairs = {name: (given.pop(name), given.pop(f"sf{name}")) for name in "ab"}
    return Dense("fp8_gemm_nt", given.get("c") is not None).check(**pairs, **given)


@pytest.mark.parametrize("case", SCALINGS)
def test_scales_are_told_by_the_recipe_or_else_by_their_shapes(case: str) -> None:
    change, scaling = SCALINGS[case]
    assert checked(change).scaling == scaling


def exponents(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales that are powers of two, and the same four to an int32."""
    sf = 2.0 ** torch.randint(-4, 5, shape)
    return sf, deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)


@pytest.mark.parametrize("name", ["fp8", "index fp8", "psum fp8", "masked fp8"])
def test_exponents_are_the_scales_of_rows(name: str) -> None:
    """A product has the values that it has with float32 scales of blocks, if all rows of a block share one."""
    found, k = [], K + 384  # five blocks, which are in two elements
    given = KINDS[name].tensors()
    given |= {part: torch.randn(*given[part].shape[:-1], k).to(E4M3) for part in "ab"}
    if "layout" in given and name != "index fp8":
        given["layout"] = torch.full_like(given["layout"], M)
    of_a, packed_a = exponents(*given["a"].shape[:-1], 5)
    blocks = 2.0 ** torch.randint(-4, 5, (*given["b"].shape[:-2], -(-N // 128), 5))
    of_b = blocks.repeat_interleave(128, -2)[..., :N, :]
    packed_b = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(of_b)
    packed = packed_a, packed_b
    recipes: list[Change] = [{"recipe": None}, {"recipe": (1, 1, 128)}]
    for (sfa, sfb), more in (((of_a, blocks), {}), *((packed, recipe) for recipe in recipes)):
        d = torch.zeros_like(given["d"])
        KINDS[name](given | {"sfa": sfa, "sfb": sfb, "d": d}, **more)
        found.append(d)
    assert found[0].any()
    assert all(torch.equal(d, found[0]) for d in found)


def test_what_a_check_finds() -> None:
    d = zeros(M, N)
    assert [checked({"d": d, "c": c}).accumulate for c in (None, d, d.clone())] == ["none", "in place", "from c"]
    x = checked({"d": d, "compiled_dims": "kkn"})
    assert (x.m, x.n, x.k, x.compiled_dims, x.device) == (M, N, K, "nk", torch.device("cpu"))
    assert list(x.tensors) == ["a", "sfa", "b", "sfb", "d"]
    assert x.tensors["d"] is d


@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb"])
@pytest.mark.parametrize("leaf", [True, False])
def test_inputs_may_require_grad(name: str, leaf: bool) -> None:
    """As weights of a module do inside an autograd.Function. Nothing is recorded for backward."""
    given = DENSE_FP8.tensors()
    given[name] = torch.nn.Parameter(given[name])
    given[name] = given[name] if leaf else given[name].view_as(given[name])
    DENSE_FP8(given)
    assert not given["d"].requires_grad


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a second device, since there may be none."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def part_of_d() -> Change:
    memory = zeros(M + 1, N)
    return {"d": memory[1:], "c": memory[:-1]}


ROWS = {"sfa": torch.ones(M, 1), "sfb": torch.ones(1, N)}
ODD = {"a": zeros(M, 72), "b": zeros(G, 72, N).mT}
MATRIX = {"layout": torch.tensor([100, 120], dtype=torch.int32)}
DEPTHS = {"layout": torch.tensor([100, 200], dtype=torch.int32)}
Wrong = tuple[str, Change, type[Exception], str]
BAD, CANNOT = InvalidInputError, UnsupportedError
# fmt: off
WRONG: list[Wrong] = [
    ("fp8", {"b": zeros(N, K, dtype=torch.float8_e5m2)}, CANNOT, r"b is torch.float8_e5m2. It is multiplied"),
    ("fp8", ROWS, BAD, r"scales of a must have the shape \(24, 2\)"),
    ("fp8", part_of_d(), BAD, "d and c share"),
    ("fp8", {"sfb": torch.ones(2, 2).as_subclass(Elsewhere)}, BAD,
     "one device.*a on cpu.*the scales of b on cuda:1.*d on cpu"),
    ("fp8", {"d": zeros(M, N).requires_grad_()}, BAD, "d requires grad.*no_grad.*detached"),
    ("fp8", {"recipe_a": (1, 128), "recipe_b": (128, 128)}, BAD, "one or the other"),
    ("fp8", {"recipe": (1.0, 128, 128)}, BAD, "recipe must be 3 positive integers"),
    ("fp8", ANY | {"recipe_a": (1, 32), "recipe_b": (1, 32)}, CANNOT, r"\(1, 32, 1, 32\) is not supp"),
    ("fp8", {"sfb": torch.ones(2, 2).to(torch.float8_e8m0fnu)}, CANNOT, "scales of b are .*e8m0fnu"),
    ("bf16", {name: torch.zeros(shape, dtype=FP16) for name, shape in (("a", (M, K)), ("b", (N, K)))}, BAD,
     "a of bf16_gemm_nt must be torch.bfloat16, but it is torch.float16. fp16_gemm_nt takes torch.float16"),
    ("index fp8", {"layout": torch.zeros(M, 2, dtype=torch.int32)[:, 0]}, BAD, "contiguous, but its stride is 2"),
    ("index fp8", {"sfa": torch.ones(M, 1).int()}, BAD, "must both be torch.int32 or both torch.float32"),
    ("index fp8", {"recipe_a": (1, 128), "recipe_b": (1, 128)}, CANNOT, r"not supported by .*: only \(1, 128, 128"),
    ("psum bf16", ODD, CANNOT, "^K must be a multiple of 64 if N of b is contiguous, but it is 72"),
    ("psum bf16", {"a": zeros(M, 0), "b": zeros(G, N, 0)}, BAD, "^K must be positive"),
    *(("psum bf16", {"expected_m_for_psum_layout": wrong}, BAD, "^expected_m_for_psum_layout must be a positive")
      for wrong in (0, 2.5, True, torch.tensor(4))),
    ("index bf16", {"expected_m_for_psum_layout": 4}, BAD, "but use_psum_layout is not set"),
    ("masked bf16", {"expected_m": torch.tensor(4)}, BAD, "^expected_m must be a positive integer"),
    *(("masked fp8", option, CANNOT, "^enable_overlap, max_block_n and signal")
      for option in ({"enable_overlap": True}, {"max_block_n": 256}, {"signal": torch.zeros(1)})),
    # What the reference reads in the layout, a kernel does not check.
    *((kind, {"layout": torch.tensor([0, rows], dtype=torch.int32)}, BAD, f"is {rows}, but it must be from 0 to 24")
      for kind, rows in (("psum bf16", 25), ("psum bf16", -1), ("masked bf16", 25))),
    *(("fp8", ANY | change, error, words) for change, error, words in (
        ({"sfa": WORDS((M, 1))}, BAD, "must both be torch.int32 or both torch.float32, but they are torch.int32 and"),
        (PACKED | {"sfb": WORDS((2, 1))}, BAD, r"the scales of b must have the shape \(136, 1\), four exponents"),
        (PACKED | {"recipe": (1, 128, 128)}, CANNOT, r"leave the recipe out, or pass recipe=\(1, 1, 128\)"),
        (PACKED | {"a": zeros(M, K, dtype=torch.float8_e5m2)}, CANNOT, "multiplied with float32 scales only"))),
    ("k padded", MATRIX | {"a": zeros(M + 1, K, dtype=E4M3)}, BAD, "must have the shape"),
    ("k padded", MATRIX | {"b": zeros(N, 384, dtype=E4M3)}, BAD, r"b must have the shape \(136, 256\)"),
    ("k padded", MATRIX | {"sfa": torch.ones(M, 3)}, BAD, r"the scales of a must have the shape \(24, 2\)"),
    ("k padded", MATRIX | {"sfb": torch.ones(N, 1)}, BAD, r"the scales of b must have the shape \(136, 2\)"),
    ("k padded", DEPTHS, BAD, "end at 328 of K, but K of a is 256"),
    ("k bf16", {"layout": torch.tensor([K, 1], dtype=torch.int32)}, BAD, "0 or more, and add up to at most 256"),
    ("k bf16", {"ks": [-64, 320]}, BAD, "ks_cpu must be a list of K"),
    ("k fp8", {"use_psum_layout": True}, CANNOT, "use_psum_layout"),
    ("k fp8", {"recipe": (128, 128, 128)}, CANNOT, "recipe"),
]
# fmt: on


@pytest.mark.parametrize(("name", "change", "error", "words"), WRONG, ids=lambda it: it if isinstance(it, str) else "")
def test_what_is_wrong_is_named(name: str, change: Change, error: type[Exception], words: str) -> None:
    """Clients catch ValueError or RuntimeError. The next right call works."""
    kind = KINDS[name]
    with pytest.raises(error, match=words) as caught:
        run(kind, change)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError) or error is UnsupportedError
    kind(kind.tensors())


PRODUCTS = [name for name in KINDS if "d" in KINDS[name].tensors()]


@pytest.mark.parametrize("name", PRODUCTS)
def test_d_lies_in_memory_of_its_own(name: str) -> None:
    kind = KINDS[name]
    for operand in kind.tensors():
        if operand == "d":
            continue
        given = kind.tensors()
        d, x = given["d"], given[operand]
        memory, start = torch.zeros(d.nbytes + x.nbytes, dtype=torch.uint8), 16 * (operand in ("c", "residual"))
        given["d"] = memory[: d.nbytes].view(d.dtype).view(d.shape)
        given[operand] = torch.as_strided(memory[start : start + x.nbytes].view(x.dtype), x.shape, x.stride()).copy_(x)
        with pytest.raises(InvalidInputError, match=f"d and {LABELS.get(operand, operand)} share memory"):
            kind(given)


def short_view(x: torch.Tensor) -> torch.Tensor:
    """A view of the end of a storage that was truncated by its last byte."""
    whole = torch.zeros(2 * x.nbytes, dtype=torch.uint8)
    part = torch.as_strided(whole[x.nbytes :].view(x.dtype), x.shape, x.stride())
    whole.untyped_storage().resize_(whole.numel() - 1)
    return part


LABELS = {"sfa": "the scales of a", "sfb": "the scales of b", "layout": "[a-z_]+"}
OPERANDS = [(name, operand) for name in PRODUCTS for operand in KINDS[name].tensors()]


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_a_view_past_the_end_of_its_memory_is_named(name: str, operand: str) -> None:
    """Otherwise a kernel would use memory that the tensor no longer owns. test_tensor_gate.py has other tensors
    without memory."""
    given = KINDS[name].tensors()
    given[operand] = short_view(given[operand])
    with pytest.raises(InvalidInputError, match=rf"^{LABELS.get(operand, operand)} has no memory: it needs \d+ bytes"):
        KINDS[name](given)


@pytest.mark.parametrize("operand", DENSE_FP8.tensors())
def test_transforms_are_refused_and_fake_tensors_taken(operand: str) -> None:
    """vmap's tensors have a shape without the batch dimension, and no address. torch.compile traces with fake tensors:
    all operands, or only d and the weights of a module. A real d would be left unwritten."""
    given = DENSE_FP8.tensors()

    def call(x: torch.Tensor) -> torch.Tensor:
        DENSE_FP8(given | {operand: x})
        return x.sum() if operand == "sfa" else x

    if operand == "sfa":
        with pytest.raises(InvalidInputError, match=r"^the scales of a is a Tensor without memory"):
            torch.func.grad(call)(given["sfa"])
    with FakeTensorMode():
        fakes = {
            x: torch.empty_strided(given[x].shape, given[x].stride(), dtype=given[x].dtype) for x in (operand, "d")
        }
    DENSE_FP8(given | fakes)
    if operand != "d":
        with pytest.raises(InvalidInputError, match=r"^d has memory, but other tensors are fake"):
            call(fakes[operand])


def test_tensors_without_elements_need_no_memory() -> None:
    for m, k in ((0, K), (M, 0)):
        given = scaled(m, N, k)
        for name in ("a", "sfa"):
            given[name].untyped_storage().resize_(0)
        run(DENSE_FP8, given)
    given["d"].untyped_storage().resize_(0)  # no K would write zeros
    with pytest.raises(InvalidInputError, match=r"^d has no memory"):
        run(DENSE_FP8, given)


@pytest.mark.parametrize("fits", FORMS)
@pytest.mark.parametrize("called", FORMS)
def test_a_wrong_form_is_told_the_right_one(called: str, fits: str) -> None:
    a, b = zeros(*((20, 40) if fits[0] == "n" else (40, 20))), zeros(*((24, 40) if fits[1] == "t" else (40, 24)))
    call: Callable[..., None] = getattr(deep_gemm, f"bf16_gemm_{called}")
    if called == fits:
        call(a, b, zeros(20, 24))
    else:
        with pytest.raises(InvalidInputError, match=f"They agree in the form {fits}: call bf16_gemm_{fits}"):
            call(a, b, zeros(20, 24))


def test_shapes_are_named_as_they_were_given() -> None:
    with pytest.raises(InvalidInputError, match=r"form tn, a is \(40, 20\) \(K, M\) and b is \(41, 24\) \(K, N\)"):
        deep_gemm.bf16_gemm_tn(zeros(40, 20), zeros(41, 24), zeros(20, 24))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [None, 3, torch.zeros(2, 2), (torch.zeros(2, 2),), (1, 2)])
def test_mistakes_are_told_by_every_form(form: str, wrong: Any) -> None:
    right = zeros(128, 128, dtype=E4M3), torch.ones(1, 1)
    call: Callable[..., None] = getattr(deep_gemm, f"fp8_gemm_{form}")
    d = torch.full((128, 128), 7.0, dtype=BF16)
    for name, given in (("a", (wrong, right)), ("b", (right, wrong))):
        with pytest.raises(InvalidInputError, match=f"{name} must be a"):
            call(*given, d)
    with pytest.raises(UnsupportedError):
        call(right, right, d, recipe=(1, 1, 32))
    assert bool((d == 7).all()), "an error leaves the output alone"


def test_what_there_is_no_form_of() -> None:
    with pytest.raises(UnsupportedError, match="k_grouped_fp8_gemm_tn_contiguous"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous((ONE, ONE), (ONE, ONE), ONE, [128], ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("form", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize(("m", "n", "groups"), [(0, 8, 2), (16, 0, 2), (16, 8, 0)])
def test_nothing_to_do(kind: str, form: str, m: int, n: int, groups: int) -> None:
    lead = (groups,) if form == "masked" else ()
    a, b = (zeros(*shape, dtype=E4M3 if kind == "fp8" else BF16) for shape in ((*lead, m, 128), (groups, n, 128)))
    layout = torch.zeros(m if form == "contiguous" else groups, dtype=torch.int32)
    d = torch.ones(*lead, m, n, dtype=BF16)
    sfa, sfb = torch.ones(*lead, m, 1, dtype=F32), torch.ones(groups, -(-n // 128), 1)
    given = ((a, sfa), (b, sfb)) if kind == "fp8" else (a, b)
    grouped(kind, form, *given, d, layout, **({"expected_m": 1} if form == "masked" else {}))
    assert bool((d == 1).all())
