"""bf16_gemm, fp16_gemm and cublaslt_gemm on the CPU: layouts, accumulation, strides, and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops import checks, cublaslt, reference
from deep_gemm.testing import guarded

FORMS = ("nt", "nn", "tn", "tt")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
M, N, K = 20, 24, 40


def function(kind: str, form: str) -> Callable[..., None]:
    found: Callable[..., None] = getattr(deep_gemm, f"{kind}_gemm_{form}")
    return found


def given_as(form: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) and b (N, K) in the layout of a form."""
    return (a.t() if form[0] == "t" else a), (b.t() if form[1] == "n" else b)


def random(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "cublaslt bf16", "cublaslt fp16"])
def test_every_form_and_accumulation(kind: str, form: str, wide: bool) -> None:
    name, _, precision = kind.partition(" ")
    dtype = DTYPES[precision or name]
    out = torch.float32 if wide else dtype
    a, b, c = random(M, K, dtype, 1), random(N, K, dtype, 2), random(M, N, out, 3)
    product = a.double() @ b.double().t()
    call = function(name, form)
    d = torch.full((M, N), float("nan"), dtype=out)
    assert call(*given_as(form, a, b), d) is None
    assert torch.equal(d, product.to(out))
    before = c.clone()
    call(*given_as(form, a, b), d, c)
    assert torch.equal(d, (product + c.double()).to(out))
    assert torch.equal(c, before)
    call(*given_as(form, a, b), c, c=c)
    assert torch.equal(c, d)


def test_what_is_added_is_rounded_once() -> None:
    """256 + 1 + 1 is 258 in bfloat16; 256 + 1 is 256."""
    d = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(ones, ones, d, c=d)
    assert d.item() == 258.0


@pytest.mark.parametrize("kind", ["bf16", "fp16", "cublaslt"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_names_its_arguments(kind: str, form: str) -> None:
    parameters = inspect.signature(function(kind, form)).parameters.values()
    names = ["a", "b", "d", "c"] + (["compiled_dims"] if kind != "cublaslt" else [])
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [x.name for x in parameters if x.kind is positional] == names
    later = [] if kind == "cublaslt" else ["epilogue", "alpha"]
    assert [x.name for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY] == later
    assert [x.name for x in parameters if x.default is inspect.Parameter.empty] == names[:3]


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    sizes=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    ways=st.tuples(*[st.sampled_from(["rows", "columns", "sparse", "expanded"])] * 2),
    pads=st.tuples(*[st.integers(0, 9)] * 3),
    accumulate=st.sampled_from(["", "c", "d"]),
    wide=st.booleans(),
)
def test_strides_are_read_and_not_names(
    form: str,
    sizes: tuple[int, int, int],
    ways: tuple[str, str],
    pads: tuple[int, int, int],
    accumulate: str,
    wide: bool,
) -> None:
    """For any strides the product is right, and the memory between rows of d is not written."""
    m, n, k = sizes
    out = torch.float32 if wide else torch.bfloat16

    def laid_out(rows: int, way: str, pad: int, seed: int) -> torch.Tensor:
        strides = {"columns": (1, rows + pad), "sparse": (2 * k + pad, 2)}.get(way, (k + pad, 1))
        own = 1 if way == "expanded" else rows
        x = guarded((own, k), torch.bfloat16, "cpu", strides, offset=2 * pad).tensor
        if x.numel():
            x.copy_(random(own, k, torch.bfloat16, seed))
        return x.expand(rows, k)

    a, b = laid_out(m, ways[0], pads[0], 1), laid_out(n, ways[1], pads[1], 2)
    buffer = guarded((m, n), out, "cpu", (n + pads[2], 1), offset=out.itemsize * pads[2])
    d = buffer.tensor
    c = {"": None, "c": random(m, n, out, 3), "d": d}[accumulate]
    if c is d and d.numel():
        d.copy_(random(m, n, out, 3))
    expected = a.double() @ b.double().t() + (c.double() if c is not None else 0.0)
    function("bf16", form)(*given_as(form, a, b), d, c)
    assert torch.equal(d, expected.to(out))
    buffer.check("d")


@pytest.mark.parametrize("kind", ["bf16", "cublaslt"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sizes_of_zero(kind: str, accumulate: bool) -> None:
    for m, n, k in ((0, N, K), (M, 0, K), (M, N, 0), (0, 0, 0)):
        a, b = random(m, k, torch.bfloat16), random(n, k, torch.bfloat16)
        c = random(m, n, torch.bfloat16, 3) if accumulate else None
        d = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
        function(kind, "nt")(a, b, d, c)
        assert torch.equal(d, c if c is not None else torch.zeros(m, n, dtype=torch.bfloat16))
    d = random(M, N, torch.bfloat16, 3)
    before = d.clone()
    function(kind, "nt")(random(M, 0, torch.bfloat16), random(N, 0, torch.bfloat16), d, c=d)
    assert torch.equal(d, before)


def test_no_k_writes_where_inference_mode_made_d() -> None:
    with torch.inference_mode():
        d = torch.ones(2, 3, dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(torch.ones(2, 0).bfloat16(), torch.ones(3, 0).bfloat16(), d)
    assert not d.any()


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = random(77, 40, torch.bfloat16), random(55, 40, torch.bfloat16, 1), random(77, 55, torch.float32, 2)
    whole, parts = c.clone(), c.clone()
    deep_gemm.bf16_gemm_nt(a, b, whole, c=whole)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 500)
    deep_gemm.bf16_gemm_nt(a, b, parts, c=parts)
    assert torch.equal(whole, parts)


def test_what_a_process_has_switched_on_changes_nothing() -> None:
    a, b = random(M, 300, torch.float16), random(N, 300, torch.float16, 1)
    expected = (a.double() @ b.double().t()).float()
    d = torch.empty(M, N)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            deep_gemm.fp16_gemm_nt(a, b, d)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.equal(d, expected)


@pytest.mark.parametrize("fits", FORMS)
@pytest.mark.parametrize("called", FORMS)
def test_a_wrong_form_is_told_the_right_one(called: str, fits: str) -> None:
    a, b = halves((M, K) if fits[0] == "n" else (K, M)), halves((N, K) if fits[1] == "t" else (K, N))
    call = getattr(deep_gemm, f"bf16_gemm_{called}")
    if called == fits:
        call(a, b, halves((M, N)))
    else:
        with pytest.raises(InvalidInputError, match=f"They agree in the form {fits}: call bf16_gemm_{fits}"):
            call(a, b, halves((M, N)))


def test_fp8_without_scales_goes_through_torch() -> None:
    a, b = (random(rows, 32, torch.float32, rows).to(torch.float8_e4m3fn) for rows in (16, 32))
    d = torch.empty(16, 32, dtype=torch.bfloat16)
    deep_gemm.cublaslt_gemm_nt(a, b, d)
    assert torch.equal(d, (a.double() @ b.double().t()).bfloat16())


def arguments(m: int = M, n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {
        "a": torch.zeros(m, k, dtype=dtype),
        "b": torch.zeros(n, k, dtype=dtype),
        "d": torch.zeros(m, n, dtype=dtype),
    }


def halves(shape: tuple[int, int]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def overlapping(name: str) -> dict[str, Any]:
    """A d that begins in the memory of another operand."""
    memory = torch.zeros(8 * M * K, dtype=torch.bfloat16)
    made = arguments() | ({"c": halves((M, N))} if name == "c" else {})
    shape = made[name].shape
    size = made[name].numel()
    return made | {name: memory[:size].view(shape), "d": memory[8 : 8 + M * N].view(M, N)}


INVALID: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a is a pair": (lambda: arguments() | {"a": (1, 2)}, "a must be a torch.Tensor, but it is of type tuple"),
    "c is no tensor": (lambda: arguments() | {"c": 1.0}, "c must be a torch.Tensor.*float"),
    "rank of b": (lambda: arguments() | {"b": torch.zeros(2, N, K).bfloat16()}, "b must have 2 dimensions"),
    "float16 operands": (
        lambda: arguments(dtype=torch.float16),
        "a of bf16_gemm_nt must be torch.bfloat16, but it is torch.float16. fp16_gemm_nt takes torch.float16",
    ),
    "b is float32": (lambda: arguments() | {"b": torch.zeros(N, K)}, r"b of bf16_gemm_nt must be .*float32. Pass b.to"),
    "d is float16": (
        lambda: arguments() | {"d": torch.zeros(M, N).half()},
        "d of bf16_gemm_nt must be torch.bfloat16 or",
    ),
    "c of another dtype": (lambda: arguments() | {"c": torch.zeros(M, N)}, "c must have d's dtype, torch.bfloat16"),
    "k differs": (
        lambda: arguments() | {"b": halves((N, 41))},
        r"agree in K, .* nt, a is \(20, 40\) \(M, K\) and b is",
    ),
    "shape of d": (lambda: arguments() | {"d": halves((N, M))}, r"d must have the shape \(20, 24\)"),
    "shape of c": (lambda: arguments() | {"c": halves((1, N))}, r"c must have the shape \(20, 24\).*\(1, 24\)"),
    "c is expanded": (
        lambda: arguments() | {"c": halves((1, N)).expand(M, N)},
        "c must be row-major with rows of its own",
    ),
    "c is column-major": (lambda: arguments() | {"c": halves((N, M)).t()}, "c must be row-major"),
    "d is column-major": (lambda: arguments() | {"d": halves((N, M)).t()}, "d must be row-major"),
    "rows of d overlap": (lambda: arguments() | {"d": halves((1, N)).expand(M, N)}, "rows of d overlap"),
    "d on a": (lambda: overlapping("a"), "d and a share memory"),
    "d on b": (lambda: overlapping("b"), "d and b share memory"),
    "d partly on c": (lambda: overlapping("c"), "d and c share memory"),
    "d requires grad": (
        lambda: arguments() | {"d": torch.zeros(M, N, dtype=torch.bfloat16, requires_grad=True)},
        "d requires grad",
    ),
    "compiled_dims": (lambda: arguments() | {"compiled_dims": "x"}, "compiled_dims must be .*'x'"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_the_caller_can_put_right(case: str) -> None:
    make, words = INVALID[case]
    with pytest.raises(InvalidInputError, match=words):
        deep_gemm.bf16_gemm_nt(**make())
    deep_gemm.bf16_gemm_nt(**arguments())


def test_shapes_are_named_as_they_were_given() -> None:
    with pytest.raises(InvalidInputError, match=r"form tn, a is \(40, 20\) \(K, M\) and b is \(41, 24\) \(K, N\)"):
        deep_gemm.bf16_gemm_tn(halves((K, M)), halves((41, N)), halves((M, N)))


def test_each_function_takes_its_dtype() -> None:
    with pytest.raises(InvalidInputError, match=r"a of fp16_gemm_nt must be torch.float16.*bf16_gemm_nt takes"):
        deep_gemm.fp16_gemm_nn(halves((M, K)), halves((K, N)), halves((M, N)))


@pytest.mark.parametrize("keyword", ["epilogue", "alpha"])
def test_keywords_of_later_versions_must_be_none(keyword: str) -> None:
    for kind, dtype in DTYPES.items():
        for form in FORMS:
            x = arguments(dtype=dtype)
            a, b = given_as(form, x["a"], x["b"])
            function(kind, form)(a, b, x["d"], epilogue=None, alpha=None)
            with pytest.raises(UnsupportedError, match=f"{keyword} must be None"):
                function(kind, form)(a, b, x["d"], **{keyword: "x"})


CUBLASLT = {
    "dtypes": ({"b": torch.zeros(N, K).half()}, "a and b must both be torch.bfloat16"),
    "k": ({"b": halves((N, 41))}, "agree in K"),
    "d": ({"d": halves((N, M))}, r"d must have the shape \(20, 24\)"),
    "c": ({"c": halves((1, N))}, "c must be as d is"),
}


@pytest.mark.parametrize("case", CUBLASLT)
def test_cublaslt_says_what_is_wrong(case: str) -> None:
    other, words = CUBLASLT[case]
    with pytest.raises(InvalidInputError, match=words):
        deep_gemm.cublaslt_gemm_nt(**(arguments() | other))


def test_what_torch_cannot_do_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such\n  algorithm")

    monkeypatch.setattr(cublaslt, "_multiply", fails)
    monkeypatch.setattr(cublaslt, "plain_arithmetic", lambda device: torch.inference_mode())
    monkeypatch.setattr(checks, "check_devices", lambda named: SimpleNamespace(type="cuda"))
    with pytest.raises(UnsupportedError, match=r"torch .* cannot multiply torch.bfloat16 .*: no such algorithm"):
        deep_gemm.cublaslt_gemm_nt(**arguments())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_given_to_torch(monkeypatch: pytest.MonkeyPatch, form: str, accumulate: bool) -> None:
    """The code path of a GPU, which torch can also run on the CPU if the output's dtype is the inputs'."""
    a, b, d = (random(*shape, torch.bfloat16) for shape in ((M, K), (N, K), (M, N)))
    expected = (a.double() @ b.double().t() + (d.double() if accumulate else 0.0)).bfloat16()
    monkeypatch.setattr(cublaslt, "plain_arithmetic", lambda device: torch.inference_mode())
    monkeypatch.setattr(checks, "check_devices", lambda named: SimpleNamespace(type="cuda"))
    function("cublaslt", form)(*given_as(form, a, b), d, d if accumulate else None)
    assert torch.allclose(d.float(), expected.float(), rtol=2**-7)
