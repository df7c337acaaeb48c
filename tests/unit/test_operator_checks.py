"""Operators refuse what functions refuse: what comes through either door is checked in `KernelOperation.check`."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from operator_cases import arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops import logits
from deep_gemm.runtime import operators
from deep_gemm.runtime.operation import REQUIRED

NAMES = [name for name in deep_gemm.register_operators() if not name.endswith("_functional")]
OPS = torch.ops.deep_gemm_jit
BF16, F32, I32, E4M3 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn

TEXTS = ("", "x", "n", "TT", "ntn", "nt\n", "none+none", "bmk,bnk->mn", "0", "bias:f32+", "relu+silu", "clamp:x")
NUMBERS = (0, -1, 3, 2**31, 2**62)
WRONG: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("form", "blocks", "plain_blocks", "transposed_blocks", "approximate", "epilogue"), TEXTS),
    "compiled_dims": ("x", "nkx"), **dict.fromkeys(("alignment", "num_splits"), NUMBERS), "expected_m": NUMBERS[:2],
    "columns": NUMBERS[1:], **dict.fromkeys(("alpha", "epsilon", "eps"), (float("nan"), float("inf"), 1e39)),
    "limit": (float("nan"), -1.0),
}  # fmt: skip
"""Values that no operator takes, by parameter."""


def spoiled(x: Tensor) -> Iterator[tuple[str, Tensor, bool]]:
    """An output of another dtype, shape or layout, and whether its shape or dtype alone is wrong."""
    for dtype in (torch.int8, torch.float64, torch.complex64):
        yield str(dtype), torch.zeros(x.shape, dtype=dtype), True
    yield "half", x[: x.shape[0] // 2], True
    yield "larger", x.new_zeros([size + 8 for size in x.shape]), True
    yield "more dimensions", x[None, None], True
    yield "in one place", x.new_zeros([1] * x.dim()).expand(x.shape), False


def calls(name: str) -> Iterator[tuple[str, list[Any], bool]]:
    """Wrong calls of an operator: what is wrong, the arguments, and whether fake tensors show it."""
    variants, _ = operators._entries[name]
    flat = [(own, part, x) for x in operators._passed(variants[0]) for own, part in operators._parts(x)]
    given = list(arguments()[name])
    given += [None if x.default is REQUIRED else x.default for *_, x in flat[len(given) :]]
    written = operators._written(variants)
    for index, (own, part, parameter) in enumerate(flat):
        changed: list[tuple[Any, Any, bool]] = [(value, value, True) for value in WRONG.get(own, ())]
        value = given[index]
        if isinstance(value, Tensor) and part in written:
            changed += [
                each for each in spoiled(value.clone()) if own not in ("y", "dx") or each[0] != "more dimensions"
            ]
        if value is None and "Tensor" in parameter.type:
            changed.append(("given", torch.ones(2, 3, 5), True))
        for label, other, shows in changed:
            called = [x.clone() if isinstance(x, Tensor) else x for x in given]
            called[index] = other
            yield f"{own} = {label}", called, shows


def is_refused(operator: str, given: Sequence[Any]) -> bool:
    try:
        getattr(OPS, operator)(*given)
    except (InvalidInputError, UnsupportedError):
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_what_no_function_takes_no_operator_takes(name: str) -> None:
    tried = 0
    for what, given, shows in calls(name):
        before = [x.clone() if isinstance(x, Tensor) else x for x in given]
        # A functional one may be given a d whose elements share memory: its own has others.
        for operator in (name, *([f"{name}_functional"] if shows else [])):
            assert is_refused(operator, given), f"{operator} took {what}"
        assert all(torch.equal(x.view(-1), y.view(-1)) for x, y in pairs(given, before)), f"{what} was written"
        tried += 1
        if shows:
            with FakeTensorMode() as mode:
                fake = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given]
                assert is_refused(name, fake), f"{name} took {what} of fake tensors"
    assert tried >= 6


def pairs(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in zip(one, other, strict=True):
        if isinstance(x, Tensor) and x.dtype in (BF16, F32) and x.is_contiguous():
            yield x, y


A, B, D = torch.ones(8, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16), torch.zeros(8, 32, dtype=BF16)
BIAS, GROUPS = torch.ones(32), torch.zeros(8, dtype=I32)
X, OUT = torch.ones(8, 256), (torch.empty(8, 256).to(E4M3), torch.empty(8, 2))
Q, KEYS, ENDS = torch.ones(300, 32, 64).to(E4M3), torch.ones(900, 64).to(E4M3), torch.full((300,), 900, dtype=I32)
PROMPT = Q, KEYS, torch.ones(900), torch.ones(300, 32), torch.zeros(300, dtype=I32), ENDS
LENGTHS = torch.full((2, 1), 60, dtype=I32)
PAGES = torch.ones(2, 1, 32, 64).to(E4M3), torch.zeros(4, 64, 1, 68, dtype=torch.uint8), torch.ones(2, 32), LENGTHS
TABLE, SCHEDULE = torch.zeros(2, 1, dtype=I32), torch.zeros(3, 2, dtype=I32)
SPACED = torch.zeros(3, 4, dtype=I32)[:, ::2]
WHOLE = torch.zeros(300, 1024)


def finished(text: str, alpha: float = 1.0, **more: Tensor) -> Any:
    return lambda: OPS.bf16_gemm_epilogue(A, B, D, None, alpha=alpha, epilogue=text, form="nt", **more)


SENTENCES: dict[str, tuple[Any, str]] = {
    "a form in capitals": (lambda: OPS.bf16_gemm(A, B, D, form="TT"),
        "form must be 'nt' or 'nn' or 'tn' or 'tt', but it is 'TT'"),
    "no alignment": (lambda: OPS.m_grouped_bf16_gemm_contiguous(A, B[None], D, GROUPS, alignment=0),
        "alignment must be a positive multiple of 16"),
    "blocks of rows of the transpose": (lambda: OPS.quantize_transposed(X, *OUT, "row"),
        "transposed_blocks must be 'column' or 'tile', but it is 'row'"),
    "no bias": (finished("bias:f32"), "bias must be given: the epilogue is 'bias:f32', which has bias"),
    "a bias too much": (finished("none", bias=BIAS), "bias must be None: the epilogue is 'none', which has no bias"),
    "a bias of 16 bits": (finished("bias:f32+relu", bias=BIAS.to(BF16)),
        "bias must be torch.float32, as the epilogue 'bias:f32[+]relu' says, but it is torch.bfloat16"),
    "an alpha too much": (finished("relu", alpha=2.0), "alpha must be 1.0, as the epilogue is 'relu', but it is 2.0"),
    "an alpha past float32": (finished("alpha", alpha=1e39), "alpha must be a finite float32 number"),
    "no epilogue": (finished("x"), "an epilogue must be a deep_gemm.Epilogue or the text of its parts"),
    "a limit below zero": (finished("swiglu+clamp:-1.0"), "an epilogue must be a deep_gemm.Epilogue or the text of"),
    "parts that exclude each other": (finished("swiglu+residual"), "swiglu and a residual cannot be combined"),
    "vectors of no expression": (finished("relu", vector_0=BIAS), "vector_0 must be None"),
    "a vector of bytes": (finished("custom:f(;v) return x + v;", vector_0=BIAS.to(torch.uint8)),
        r"columns\['v'\] of f must be torch.float32 and contiguous"),
    "an expression without a name": (finished("custom:1(;) return x;"), "an expression of an epilogue must be given"),
    "few logits": (lambda: OPS.fp8_mqa_logits(*PROMPT, torch.zeros(2, 512), True, 0),
        r"out must be torch.float32 or torch.bfloat16 \(300, 900\).* but it is torch.float32 \(2, 512\)"),
    "logits in the weights": (
        lambda: OPS.fp8_mqa_logits(*PROMPT[:3], WHOLE[:, :32], *PROMPT[4:], WHOLE[:, 28:928], True, 0),
        "out and weights share memory"),
    "logits off alignment": (lambda: OPS.fp8_mqa_logits(*PROMPT, torch.zeros(300, 901)[:, :900], True, 0),
        "rows of out must begin at multiples of 16 bytes"),
    "clean and compressed logits": (lambda: OPS.fp8_mqa_logits(*PROMPT, torch.zeros(300, 64), True, 64),
        "clean_logits must be False with max_seqlen_k"),
    "logits of one request": (lambda: OPS.fp8_paged_mqa_logits(*PAGES, TABLE, SCHEDULE, torch.zeros(1, 64)),
        r"out must be torch.float32 or torch.bfloat16 \(2, 64\): a row for each token, but it is .* \(1, 64\)"),
    "a schedule of floats": (lambda: OPS.get_paged_mqa_logits_metadata(LENGTHS, torch.zeros(3, 2)),
        r"out must be torch.int32 \(3, 2\)"),
    "a strided schedule": (lambda: OPS.get_paged_mqa_logits_metadata(LENGTHS, SPACED), "out must be contiguous"),
    "a schedule of no CTA": (lambda: OPS.get_paged_mqa_logits_metadata(LENGTHS, torch.zeros(1, 2, dtype=I32)),
        "out must have a row for each CTA and one more"),
    "elements in one place": (lambda: OPS.cublaslt_gemm(A, B, torch.zeros(1, 32, dtype=BF16).expand(8, 32)),
        "elements of d must not share memory"),
}  # fmt: skip


@pytest.mark.parametrize("what", SENTENCES)
def test_operators_say_what_is_wrong(what: str) -> None:
    call, sentence = SENTENCES[what]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        call()


def test_a_functional_operator_keeps_strides() -> None:
    """Rows of logits begin at multiples of 16 bytes, as kernels need."""
    out = logits.empty_logits(300, 900, F32, Q.device)
    found = OPS.fp8_mqa_logits_functional(*PROMPT, out, True, 0)
    assert found.stride() == out.stride() == (1024, 1)
    assert torch.equal(found, deep_gemm.fp8_mqa_logits(Q, PROMPT[1:3], *PROMPT[3:]))
