"""Epilogues with an expression of a user: what it is given, what is refused, what torch records."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from test_epilogues import BF16, FP16, K, M, N, function, given, operands, random

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, UnsupportedError
from deep_gemm.arch import SM90
from deep_gemm.expression import Expression
from deep_gemm.kernels.families import B16_GEMM, B16_GROUPED
from deep_gemm.parts import VECTORS, Parts, parse
from deep_gemm.runtime import engine
from deep_gemm.spec import GemmSpec, Operand


def own(name: str = "own", body: str = "return x * v;", **parts: Any) -> Callable[[], object]:
    return given(Epilogue.custom, name, body, **parts)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "name": (own("1st"), "name of an expression must be a name that C.. can have, .* but it is '1st'"),
    "a keyword": (own("while"), "name of an expression must be"),
    "a long name": (own("a" * 41), "of at most 40 letters"),
    "no text": (own(body=b"return x;"), "body of own must be statements in C.. that return a float"),  # type: ignore[arg-type]
    "half of a surrogate pair": (own(body="return x; // \ud800"), "body of own must be statements in C.."),
    "NUL": (own(body="return x;\0"), "body of own must be statements in C.. that return a float"),
    "no statement": (own(body="x * x"), "must be statements .*, but it is 'x . x'"),
    "a list": (own(rows=[torch.ones(M)]), "rows of own must be a dictionary of vectors, but it is of type list"),
    "a name of ours": (
        own(rows={"row": torch.ones(M)}),
        r"rows\['row'\] of own: its name must .* not be x, row or",
    ),
    "no vector": (
        own(columns={"v": 2.0}),
        r"columns\['v'\] of own must be a torch.Tensor, but it is of type float",
    ),
    "rank": (own(columns={"v": torch.ones(1, N)}), r"columns\['v'\] of own must have 1 dimension"),
    "dtype": (own(columns={"v": torch.ones(N).half()}), r"columns\['v'\] of own must be torch.float32"),
    "strides": (own(columns={"v": torch.ones(2 * N)[::2]}), r"must be torch.float32 and contiguous, .* \(2,\)"),
    "rows": (own(rows={"v": torch.ones(N)}), r"rows\['v'\] of own must have the shape \(9,\), but it has \(24,\)"),
    "columns": (own(columns={"v": torch.ones(M)}), r"columns\['v'\] of own must have the shape \(24,\)"),
    "unused": (own(body="return x;", rows={"v": torch.ones(M)}), r"body of own does not use rows\['v'\]"),
    "twice": (
        own(rows={"v": torch.ones(M)}, columns={"v": torch.ones(N)}),
        r"must be at most 4 vectors with different names, but they are rows\['v'\], columns\['v'\]",
    ),
    "five": (
        own(body="return v + a + b + c + e;", rows=dict.fromkeys("vabce", torch.ones(M))),
        "rows and columns of own must be at most 4 vectors",
    ),
    "own and activation": (own(activation="relu"), "activation and own cannot both be given"),
    "no reference": (own(columns={"v": torch.ones(N)}), "own has no reference to run in torch: pass CUDA tensors"),
    "a reference of another shape": (
        own(columns={"v": torch.ones(N)}, reference=lambda x, v: v),
        r"the reference of own must return .* the shape of x, \(9, 24\), but it returned one of \(1, 24\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        call()


PARTS = [
    Parts(True, residual=True, expression=Expression("own", body, *vectors))
    for body, vectors in itertools.product(
        ("return x + 1;", "// custom:other(a;b)\nreturn x;", "return f(x)\n + (x);"),
        ((), (("v",), ()), ((), ("v", "w")), (("u", "v"), ("w", "z"))),
    )
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_text_names_all_parts(parts: Parts) -> None:
    assert parse(str(parts)) == parts


def causal(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
    return torch.where(column > row, x * weight, x * scale)


CAUSAL = "causal", "return column > row ? x * weight : x * scale;"


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp16"])
def test_an_expression_gets_the_sum_its_place_and_vectors_there(kind: str) -> None:
    a, b, product = operands(kind)
    weight, scale, bias, residual = random(M, seed=3), random(N, seed=4), random(N, seed=5), random(M, N, dtype=BF16)
    d = torch.empty(M, N, dtype=FP16 if kind == "fp16" else BF16)
    residual = residual.to(d.dtype)
    epilogue = Epilogue.custom(
        *CAUSAL,
        rows={"weight": weight},
        columns={"scale": scale},
        reference=causal,
        bias=bias,
        alpha=0.5,
        residual=residual,
    )
    function(kind)(a, b, d, epilogue=epilogue)
    x = product.float() * 0.5 + bias
    place = torch.arange(M)[:, None], torch.arange(N)[None]
    assert torch.equal(d, (causal(x, *place, weight[:, None], scale[None]) + residual).to(d.dtype))


def test_an_expression_is_part_of_the_key_and_its_vectors_are_operands(gpu: FakeGpu) -> None:
    """Another body, or another name of a vector, is another kernel."""
    x, y, d = torch.zeros(M, K, dtype=BF16), torch.zeros(N, K, dtype=BF16), torch.zeros(M, N, dtype=BF16)
    found, weight, scale = [], torch.zeros(M), torch.zeros(N)
    for body, name, prepared in (
        ("return x + v + s;", "v", 1),
        ("  return x + v + s;\n", "v", 1),
        ("return x - v + s;", "v", 2),
        ("return x - w + s;", "w", 3),
    ):
        epilogue = Epilogue.custom("own", body, rows={name: weight}, columns={"s": scale})
        deep_gemm.bf16_gemm_nt(x, y, d, epilogue=epilogue)
        launched = gpu.launched[-1]
        assert [launched.at[name] for name in VECTORS[:2]] == [weight.data_ptr(), scale.data_ptr()]
        assert gpu.prepared == prepared
        found.append(launched.spec.epilogue)
    assert len(set(found)) == 3
    assert {parts.label for parts in found} == {"own"}


def test_k_may_be_0_for_an_expression_with_a_reference() -> None:
    d = torch.empty(M, N)
    epilogue = Epilogue.custom("one", "return x + 1.0f;", reference=lambda x: x + 1)
    deep_gemm.bf16_gemm_nt(*(torch.empty(size, 0, dtype=BF16) for size in (M, N)), d, epilogue=epilogue)
    assert torch.equal(d, torch.ones(M, N))


def test_groups_take_no_expression() -> None:
    a, b, d = (torch.zeros(*shape, dtype=BF16) for shape in ((128, 64), (1, 32, 64), (128, 32)))
    epilogue, labels = Epilogue.custom("own", "return x;"), torch.zeros(128, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"a GEMM grouped by M takes no Epilogue.custom"):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, labels, epilogue=epilogue)
    own = Parts(expression=Expression("own", "return x;"))
    spec = GemmSpec(64, 64, 64, *(Operand("bf16", "k"),) * 2, Operand("bf16", "mn"), 132, grouping="psum", epilogue=own)
    assert B16_GROUPED.refuses(spec) == "with groups it takes no expression of a user"
    assert B16_GROUPED.refuses(replace(spec, epilogue=Parts(activation="relu"))) is None


@pytest.mark.parametrize("way", ["compile", "export"])
def test_torch_records_a_call_with_an_expression(way: str) -> None:
    """The epilogue is made before, with its reference."""
    a, b, _ = operands("bf16")
    rows, columns = {"weight": random(M, seed=3)}, {"scale": random(N, seed=4)}
    epilogue = Epilogue.custom(*CAUSAL, rows=rows, columns=columns, reference=causal)

    class Own(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            d = torch.empty(M, N)
            deep_gemm.bf16_gemm_nt(a, b, d, epilogue=epilogue)
            return d + 1

    wanted = Own()(a, b)
    if way == "compile":
        assert torch.equal(torch.compile(Own(), backend="eager", fullgraph=True)(a, b), wanted)
    else:
        assert torch.equal(torch.export.export(Own(), (a, b), strict=False).module()(a, b), wanted)


def test_a_comment_of_an_expression_is_text() -> None:
    comment = "/*{ cycler.__init__.__globals__ }*/ /*% if x %*/ {{ 7 * 7 }}"
    text = str(Parts(expression=Expression("own", f"return x; // {comment}")))
    request = engine.build_request(B16_GEMM.case(B16_GEMM.configs(SM90)[0], epilogue=text))
    assert f"    return x; // {comment}\n" in request.source
