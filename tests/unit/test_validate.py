"""Every way of getting a call wrong has a sentence of its own, and everything that is right goes through."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import InvalidInputError, UnsupportedError, validate
from deep_gemm.spec import align, ceil_div
from deep_gemm.testing import guarded

E4M3 = torch.float8_e4m3fn
M, N, K = 20, 200, 272


def arguments(m: int = M, n: int = N, k: int = K) -> dict[str, Any]:
    """The arguments of a call that is right."""
    return {
        "a": (torch.zeros(m, k).to(E4M3), torch.ones(m, ceil_div(k, 128))),
        "b": (torch.zeros(n, k).to(E4M3), torch.ones(ceil_div(n, 128), ceil_div(k, 128))),
        "d": torch.zeros(m, n, dtype=torch.bfloat16),
    }


def fp8(rows: int, k: int, stride: int | None = None, offset: int = 0) -> torch.Tensor:
    return guarded((rows, k), E4M3, "cpu", (stride or k, 1), offset).tensor


def bf16(rows: int, n: int, stride: int | None = None, offset: int = 0) -> torch.Tensor:
    return guarded((rows, n), torch.bfloat16, "cpu", (stride or n, 1), offset).tensor


def with_a(x: Any) -> dict[str, Any]:
    return arguments() | {"a": (x, arguments()["a"][1])}


def with_sfa(sf: Any) -> dict[str, Any]:
    return arguments() | {"a": (arguments()["a"][0], sf)}


def with_b(x: Any) -> dict[str, Any]:
    return arguments() | {"b": (x, arguments()["b"][1])}


def with_sfb(sf: Any) -> dict[str, Any]:
    return arguments() | {"b": (arguments()["b"][0], sf)}


def with_d(d: Any) -> dict[str, Any]:
    return arguments() | {"d": d}


def sharing(name: str) -> dict[str, Any]:
    """d in the memory of one of the inputs."""
    args = arguments()
    operand = args[name[0]][1 if "scales" in name else 0]
    memory = torch.zeros(align(operand.numel() * operand.element_size(), 64) + M * N * 2, dtype=torch.uint8)
    inside = memory[: operand.numel() * operand.element_size()].view(operand.dtype).view(operand.shape)
    pair = list(args[name[0]])
    pair[1 if "scales" in name else 0] = inside
    d = memory[16 : 16 + M * N * 2].view(torch.bfloat16).view(M, N)
    return args | {name[0]: tuple(pair), "d": d}


def test_a_right_call() -> None:
    args = arguments()
    operands = validate.fp8_gemm(**args)
    assert (operands.m, operands.n, operands.k) == (M, N, K)
    assert operands.a is args["a"][0]
    assert operands.sfa is args["a"][1]
    assert operands.b is args["b"][0]
    assert operands.sfb is args["b"][1]
    assert operands.d is args["d"]
    assert operands.device == torch.device("cpu")
    assert operands.compiled_dims == "nk"
    assert operands.d_tma
    assert not operands.sfa_ready
    with pytest.raises(FrozenInstanceError):
        operands.m = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": None},
        {"recipe": (1, 128, 128)},
        {"recipe": [1, 128, 128]},
        {"recipe_a": (1, 128), "recipe_b": (128, 128)},
        {"disable_ue8m0_cast": True},
        {"c": None},
        {"compiled_dims": ""},
        {"compiled_dims": "mnk"},
    ],
    ids=str,
)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    assert validate.fp8_gemm(**arguments(), **options).m == M


def test_compiled_dims_are_put_in_order() -> None:
    assert validate.fp8_gemm(**arguments(), compiled_dims="kkn").compiled_dims == "nk"


def test_lists_are_pairs_too() -> None:
    args = arguments()
    validate.fp8_gemm(list(args["a"]), list(args["b"]), args["d"])


@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, N, K), (M, N, 0), (0, 1, 0), (1, 1, 16), (1, N, K), (M, 1, K), (3, 129, 144)]
)
def test_sizes_at_the_edges(m: int, n: int, k: int) -> None:
    operands = validate.fp8_gemm(**arguments(m, n, k))
    assert (operands.m, operands.n, operands.k) == (m, n, k)


RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "rows with padding": lambda: with_a(fp8(M, K, stride=K + 48)) | {"b": (fp8(N, K, K + 16), arguments()["b"][1])},
    "one row with any stride": lambda: arguments(m=1) | {"a": (fp8(1, K, stride=K + 7), torch.ones(1, 3))},
    "one row that was expanded": lambda: arguments(m=1) | {"a": (fp8(1, K).expand(1, K), torch.ones(1, 3))},
    "expanded scales": lambda: with_sfa(torch.ones(1, 1).expand(M, 3)),
    "sliced scales": lambda: with_sfa(torch.ones(M + 9, 5)[4:-5, 1:4]),
    "transposed scales of b": lambda: with_sfb(torch.ones(3, 2).t()),
    "d with padded rows": lambda: with_d(bf16(M, N, stride=N + 3)),
    "d off alignment": lambda: with_d(bf16(M, N, offset=2)),
    "d of one column, any stride": lambda: arguments(n=1) | {"d": torch.zeros(M, 5, dtype=torch.bfloat16)[:, 2:3]},
    "d of one row, any stride": lambda: arguments(m=1) | {"d": torch.zeros(2, N + 1, dtype=torch.bfloat16)[1:, :N]},
    "d requires grad under no_grad": lambda: with_d(torch.zeros(M, N, dtype=torch.bfloat16, requires_grad=True)),
    "d beside a in one allocation": lambda: beside(),
}


def beside() -> dict[str, Any]:
    memory = torch.zeros(M * K + M * N * 2, dtype=torch.uint8)
    a = memory[: M * K].view(E4M3).view(M, K)
    return with_a(a) | {"d": memory[M * K :].view(torch.bfloat16).view(M, N)}


@pytest.mark.parametrize("case", RIGHT)
def test_unusual_but_right(case: str) -> None:
    with torch.no_grad():
        validate.fp8_gemm(**RIGHT[case]())


INVALID: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a is a tensor": (lambda: arguments() | {"a": arguments()["a"][0]}, r"a must be a pair .*float8_e4m3fn tensor"),
    "b is None": (lambda: arguments() | {"b": None}, r"b must be a pair .*NoneType"),
    "three in a pair": (lambda: arguments() | {"a": (1, 2, 3)}, "a must be a pair .* 3 elements"),
    "a is no tensor": (lambda: with_a([1.0]), "a must be a torch.Tensor, but it is of type list"),
    "scales are no tensor": (lambda: with_sfb(1.0), "the scales of b must be a torch.Tensor.*float"),
    "d is no tensor": (lambda: with_d(None), "d must be a torch.Tensor.*NoneType"),
    "a is bfloat16": (lambda: with_a(torch.zeros(M, K, dtype=torch.bfloat16)), r"a must be .*E4M3.*bfloat16"),
    "b is E5M2": (lambda: with_b(torch.zeros(N, K).to(torch.float8_e5m2)), r"b must be .*E4M3.*e5m2"),
    "a has rank 3": (lambda: with_a(fp8(M, K)[None]), r"a must have 2 dimensions, but it has 3: \(1, 20, 272\)"),
    "a has rank 1": (lambda: with_a(fp8(1, K)[0]), "a must have 2 dimensions, but it has 1"),
    "d has rank 3": (lambda: with_d(bf16(M, N)[None]), "d must have 2 dimensions"),
    "scales of rank 1": (lambda: with_sfa(torch.ones(M)), "the scales of a must have 2 dimensions"),
    "k differs": (lambda: arguments() | {"b": arguments(k=288)["b"]}, r"agree in K.*\(20, 272\).*\(200, 288\)"),
    "n is zero": (lambda: arguments(n=0), r"at least one row \(N >= 1\)"),
    "k is no multiple of 16": (lambda: arguments(k=264), r"K must be a multiple of 16.*a is \(20, 264\).*K = 272"),
    "a is M-major": (lambda: with_a(fp8(K, M).t()), r"a must be K-major.*strides \(1, 20\).*contiguous"),
    "b skips columns": (lambda: with_b(fp8(N, 2 * K)[:, ::2]), "b must be K-major"),
    "a starts off": (lambda: with_a(fp8(M, K, offset=8)), "a must start at a multiple of 16 bytes.* 8 past.*clone"),
    "b starts off": (lambda: with_b(fp8(N, K, offset=1)), "b must start at a multiple of 16 bytes.* 1 past"),
    "rows of a overlap": (lambda: with_a(fp8(1, K).expand(M, K)), "the rows of a overlap"),
    "row stride of b": (lambda: with_b(fp8(N, K, stride=K + 8)), "row stride of b must be a multiple of 16.*280"),
    "scales of a transposed": (lambda: with_sfa(torch.ones(3, M)), r"scales of a must have the shape \(20, 3\)"),
    "too many scales of b": (lambda: with_sfb(torch.ones(2, 4)), r"scales of b must have the shape \(2, 3\)"),
    "scales of b per row": (lambda: with_sfb(torch.ones(N, 3)), r"one per 128 x 128 block"),
    "scales are bfloat16": (
        lambda: with_sfa(torch.ones(M, 3).bfloat16()),
        "must be torch.float32, but they are.*float()",
    ),
    "scales are float64": (lambda: with_sfb(torch.ones(2, 3).double()), "the scales of b must be torch.float32"),
    "d is float16": (lambda: with_d(torch.zeros(M, N).half()), "d must be torch.bfloat16.*float16"),
    "d has another shape": (lambda: with_d(bf16(N, M)), r"d must have the shape \(20, 200\).*\(200, 20\)"),
    "d is column-major": (lambda: with_d(bf16(N, M).t()), "d must be row-major"),
    "d is expanded": (lambda: with_d(bf16(1, N).expand(M, N)), "rows of d overlap"),
    "rows of d overlap": (lambda: with_d(bf16(M, 2 * N).as_strided((M, N), (N - 8, 1))), "rows of d overlap"),
    "d on a": (lambda: sharing("a"), "d and a share memory"),
    "d on b": (lambda: sharing("b"), "d and b share memory"),
    "d on scales": (lambda: sharing("a scales"), "d and the scales of a share memory"),
    "d on scales of b": (lambda: sharing("b scales"), "d and the scales of b share memory"),
    "a is meta": (lambda: with_a(torch.zeros(M, K, dtype=E4M3, device="meta")), "a is a meta tensor"),
    "d is meta": (lambda: with_d(torch.zeros(M, N, dtype=torch.bfloat16, device="meta")), "d is a meta tensor"),
    "scales are sparse": (lambda: with_sfa(torch.ones(M, 3).to_sparse()), "the scales of a has the layout .*dense"),
    "d requires grad": (lambda: with_d(torch.zeros(M, N, dtype=torch.bfloat16, requires_grad=True)), "d requires grad"),
    "a requires grad": (lambda: with_a(fp8(M, K).requires_grad_()), "a requires grad.*no_grad"),
    "scales require grad": (lambda: with_sfb(torch.ones(2, 3, requires_grad=True)), "scales of b requires grad"),
    "half a recipe pair": (lambda: arguments() | {"recipe_a": (1, 128)}, "recipe_a is given and recipe_b is not"),
    "other half": (lambda: arguments() | {"recipe_b": (128, 128)}, "recipe_b is given and recipe_a is not"),
    "both kinds of recipe": (
        lambda: arguments() | {"recipe": (1, 128, 128), "recipe_a": (1, 128), "recipe_b": (128, 128)},
        "one or the other",
    ),
    "a recipe of two": (lambda: arguments() | {"recipe": (1, 128)}, r"recipe must be 3 positive integers.*\(1, 128\)"),
    "a recipe of floats": (lambda: arguments() | {"recipe": (1.0, 128, 128)}, "recipe must be 3 positive integers"),
    "recipe is a number": (lambda: arguments() | {"recipe": 128}, "recipe must be 3 positive integers"),
    "compiled_dims": (lambda: arguments() | {"compiled_dims": "nx"}, "compiled_dims must be .*'nx'"),
    "compiled_dims is None": (lambda: arguments() | {"compiled_dims": None}, "compiled_dims must be .*None"),
    "disable_ue8m0_cast": (lambda: arguments() | {"disable_ue8m0_cast": 1}, "disable_ue8m0_cast must be True or False"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_the_caller_can_put_right(case: str) -> None:
    make, words = INVALID[case]
    with pytest.raises(InvalidInputError, match=words) as caught:
        validate.fp8_gemm(**make())
    # Clients of libraries like this one catch either.
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    validate.fp8_gemm(**arguments())


def test_no_two_mistakes_share_a_sentence() -> None:
    """Apart from the argument's name: the words for each rule are its own."""
    sentences: dict[str, str] = {}
    for case in ("a is bfloat16", "a is M-major", "a starts off", "rows of a overlap", "k differs", "a is meta"):
        with pytest.raises(InvalidInputError) as caught:
            validate.fp8_gemm(**INVALID[case][0]())
        sentences[case] = str(caught.value)
    assert len(set(sentences.values())) == len(sentences)


UNSUPPORTED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "d is float32": (lambda: with_d(torch.zeros(M, N)), "d is torch.float32.*bfloat16"),
    "c is given": (lambda: arguments() | {"c": torch.zeros(M, N)}, "c must be None"),
    "the 1D1D recipe": (lambda: arguments() | {"recipe": (1, 1, 128)}, r"recipe \(1, 1, 128\) is not supported"),
    "gran_k 32": (lambda: arguments() | {"recipe_a": (1, 32), "recipe_b": (1, 32)}, r"recipe_a \(1, 32\)"),
    "recipe_b per row": (lambda: arguments() | {"recipe_a": (1, 128), "recipe_b": (1, 128)}, r"recipe_b \(1, 128\)"),
    "packed FP4": (lambda: with_b(torch.zeros(N, K // 2, dtype=torch.int8)), "b is torch.int8, as packed FP4"),
    "packed scales": (lambda: with_sfa(torch.ones(M, 1, dtype=torch.int32)), "scales of a are torch.int32.*UE8M0"),
    "e8m0 scales": (lambda: with_sfb(torch.ones(2, 3).to(torch.float8_e8m0fnu)), "scales of b are .*e8m0fnu"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_this_version_cannot_do(case: str) -> None:
    make, words = UNSUPPORTED[case]
    with pytest.raises(UnsupportedError, match=words) as caught:
        validate.fp8_gemm(**make())
    assert isinstance(caught.value, RuntimeError)


def test_mixed_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a second device, a tensor that claims to be elsewhere has to do.
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 1)

    args = with_sfb(torch.ones(2, 3).as_subclass(Elsewhere))
    with pytest.raises(InvalidInputError, match=r"one device.*a on cpu.*the scales of b on cuda:1.*d on cpu"):
        validate.fp8_gemm(**args)


@pytest.mark.parametrize(
    ("stride", "offset", "ready"), [(N, 0, True), (N + 8, 0, True), (N + 4, 0, False), (N, 2, False), (N, 16, True)]
)
def test_whether_tma_can_write_d(stride: int, offset: int, ready: bool) -> None:
    assert validate.fp8_gemm(**with_d(bf16(M, N, stride, offset))).d_tma is ready


def test_tma_does_not_write_rows_that_end_inside_a_16_byte_unit() -> None:
    args = arguments(M, 156)
    args["d"] = bf16(M, 156, 160)
    assert not validate.fp8_gemm(**args).d_tma


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "ready"),
    [
        ((20, 3), (1, 20), 0, True),
        ((20, 3), (1, 24), 0, True),
        ((18, 3), (1, 20), 0, True),
        ((20, 3), (1, 22), 0, False),
        ((20, 3), (1, 20), 8, False),
        ((20, 3), (1, 20), 16, True),
        ((20, 3), (3, 1), 0, False),
        ((20, 3), (2, 40), 0, False),
        ((20, 3), (1, 16), 0, False),
        ((20, 3), (1, 0), 0, False),
        ((20, 3), (0, 0), 0, False),
        ((20, 1), (1, 1), 0, True),
        ((20, 1), (3, 1), 0, False),
        ((1, 3), (3, 1), 0, False),
        ((1, 3), (77, 4), 0, True),
        ((1, 1), (9, 9), 0, True),
        ((0, 3), (3, 1), 0, True),
        ((20, 0), (1, 1), 0, True),
    ],
)
def test_whether_tma_can_read_the_scales(
    shape: tuple[int, int], strides: tuple[int, int], offset: int, ready: bool
) -> None:
    sf = guarded(shape, torch.float32, "cpu", strides, offset).tensor
    assert validate.tma_ready_scales(sf) is ready


@settings(deadline=None)
@given(
    m=st.integers(0, 40),
    n=st.integers(1, 300),
    k=st.integers(0, 20).map(lambda x: 16 * x),
    pad_a=st.integers(0, 3),
    pad_d=st.integers(0, 9),
    offset_d=st.integers(0, 9),
)
def test_flags_say_what_they_promise(m: int, n: int, k: int, pad_a: int, pad_d: int, offset_d: int) -> None:
    args = arguments(m, n, k)
    args["a"] = (fp8(m, k, k + 16 * pad_a), args["a"][1])
    args["d"] = bf16(m, n, n + pad_d, 2 * offset_d)
    operands = validate.fp8_gemm(**args)
    rows_aligned = m <= 1 or operands.d.stride(0) * 2 % 16 == 0
    assert operands.d_tma == (operands.d.data_ptr() % 16 == 0 and rows_aligned and n * 2 % 16 == 0)


def test_it_is_cheap() -> None:
    args = arguments()
    best = min(timed(lambda: validate.fp8_gemm(**args)) for _ in range(50))
    assert best < 200e-6, f"{best * 1e6:.0f} us"


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
