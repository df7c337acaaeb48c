"""Epilogues: what each part means, what is refused, and the arithmetic of activations."""

import ctypes
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_fakes import FakeGpu
from host_code import compiled, pairs

import deep_gemm
from deep_gemm import Epilogue, InvalidInputError, UnsupportedError
from deep_gemm.kernels.epilogues import device_name
from deep_gemm.ops.reference import ACTIVATIONS, exact_product
from deep_gemm.parts import Parts, parse

M, N, K = 9, 24, 256
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(kind: str) -> tuple[Any, Any, torch.Tensor]:
    """a and b of a product, and the exact product."""
    a, b = random(M, K, seed=1), random(N, K, seed=2)
    if kind == "fp8":
        x, y = deep_gemm.per_token_cast_to_fp8(a, False), deep_gemm.per_block_cast_to_fp8(b, False)
        return x, y, exact_product(*x, *y)
    a, b = (x.to({"bf16": BF16, "fp16": FP16}[kind]) for x in (a, b))
    return a, b, a.double() @ b.double().t()


def function(kind: str) -> Callable[..., None]:
    return {"fp8": deep_gemm.fp8_gemm_nt, "bf16": deep_gemm.bf16_gemm_nt, "fp16": deep_gemm.fp16_gemm_nt}[kind]


@pytest.mark.parametrize("added", ["", "c", "d"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp16"])
def test_the_parts_come_in_one_order_and_are_rounded_once(kind: str, activation: str | None, added: str) -> None:
    a, b, product = operands(kind)
    for out, half in itertools.product(
        {"fp8": (BF16, F32), "bf16": (BF16, F32), "fp16": (FP16, F32)}[kind], (False, True)
    ):
        bias, factor = random(N, dtype=out if half else F32, seed=3), random(M, seed=4)
        residual, d = random(M, N, dtype=out, seed=5), random(M, N, dtype=out, seed=6)
        c = {"": None, "c": random(M, N, dtype=out, seed=7), "d": d}[added]
        x = product.float() * (torch.tensor(0.25) * factor)[:, None]
        x = (x if c is None else x + c) + bias
        wanted = (x if activation is None else ACTIVATIONS[activation](x)) + residual
        function(kind)(a, b, d, c, epilogue=Epilogue(bias, activation, 0.25, residual, factor))
        assert torch.equal(d, wanted.to(out))


def test_an_epilogue_may_be_left_out_given_by_position_or_in_deepgemms_words() -> None:
    a, b, product = operands("bf16")
    d = torch.empty(M, N, dtype=F32)
    for call in (
        lambda: deep_gemm.bf16_gemm_nt(a, b, d, None, None, 0.5),
        lambda: deep_gemm.bf16_gemm_nt(a, b, d, None, None, None, deep_gemm.epilogue.Alpha(0.5)),
        lambda: deep_gemm.bf16_gemm_nt(a, b, d, alpha=torch.tensor(0.5)),
        lambda: deep_gemm.bf16_gemm_nt(a, b, d, epilogue=Epilogue(row_factor=torch.full((M,), 0.5))),
    ):
        d.zero_()
        call()
        assert torch.equal(d, product.float() * 0.5)
    deep_gemm.bf16_gemm_nt(a, b, d, epilogue=deep_gemm.epilogue.Identity())
    assert torch.equal(d, product.float())


def by_position(name: str, *between: Any) -> Callable[[Any], torch.Tensor]:
    """A call of a product with these arguments between d and the last ones. It returns d, with one group or none."""
    kind = "fp8" if "fp8" in name else "bf16"
    a, b, product = operands(kind)
    d = torch.empty(M, N, dtype=BF16)
    if "m_grouped" in name:
        b = tuple(x[None] for x in b) if kind == "fp8" else b[None]
    if "masked" in name:
        a = tuple(x[None] for x in a) if kind == "fp8" else a[None]

    def call(*last: Any) -> torch.Tensor:
        getattr(deep_gemm, name)(a, b, d[None] if "masked" in name else d, *between, *last)
        return d.float() / product.float().bfloat16().float()

    return call


ROW_GROUPS, COUNTS = torch.zeros(M, dtype=torch.int32), torch.tensor([M], dtype=torch.int32)
POSITIONS: dict[str, tuple[Any, ...]] = {
    "fp8_gemm_nt": (None, None, None, None, "nk", False, None),
    "bf16_gemm_nt": (None, "nk", None),
    "m_grouped_fp8_gemm_nt_contiguous": (ROW_GROUPS, None, None, None, "nk", False, False, True, None),
    "m_grouped_bf16_gemm_nt_contiguous": (ROW_GROUPS, "nk", False, True, None),
    "m_grouped_fp8_gemm_nt_masked": (COUNTS, M, None, None, None, "nk", False),
    "m_grouped_bf16_gemm_nt_masked": (COUNTS, M, "nk"),
}
"""What DeepGEMM 2.8 has between d and the epilogue, which is the last argument."""


@pytest.mark.parametrize("name", POSITIONS)
def test_the_last_argument_is_an_epilogue(name: str) -> None:
    call = by_position(name, *POSITIONS[name])
    for last, factor in ((None, 1.0), (deep_gemm.epilogue.Identity(), 1.0), (deep_gemm.epilogue.Alpha(0.5), 0.5)):
        assert torch.equal(call(last), torch.full((M, N), factor))
    if "grouped" not in name:
        assert torch.equal(by_position(name, *POSITIONS[name][:-1])(0.5), torch.full((M, N), 0.5))  # alpha before it


def test_the_residual_may_be_d_and_k_may_be_0() -> None:
    a, b, product = operands("bf16")
    d = random(M, N, seed=5)
    before = d.clone()
    deep_gemm.bf16_gemm_nt(a, b, d, epilogue=Epilogue(activation="relu", residual=d))
    assert torch.equal(d, product.float().relu() + before)
    bias = random(N, seed=3)
    deep_gemm.bf16_gemm_nt(a[:, :0], b[:, :0], d, epilogue=Epilogue(bias, "relu2"))
    assert torch.equal(d, bias.relu().square().expand(M, N))


def given(make: Callable[..., Epilogue] = Epilogue, *names: str, **parts: Any) -> Callable[[], object]:
    """A call with an epilogue of these parts."""
    a, b, _ = operands("bf16")
    return lambda: deep_gemm.bf16_gemm_nt(a, b, torch.empty(M, N, dtype=BF16), epilogue=make(*names, **parts))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "activation": (
        given(activation="mish"),
        "activation of an epilogue must be None or one of 'silu', 'gelu', 'gelu_erf'",
    ),
    "alpha": (given(alpha="1"), "alpha must be a finite number or a float32 tensor of one element, but it is '1'"),
    "alpha, infinite": (given(alpha=float("inf")), "alpha must be a finite number"),
    "alpha, sparse": (given(alpha=torch.ones(1).to_sparse()), r"alpha has the layout torch\.sparse_coo\. Pass a dense"),
    "alpha of two": (given(alpha=torch.ones(2)), r"alpha must be .* of one element, but it is .* of \(2,\)"),
    "alpha and factors": (given(alpha=torch.ones(1), row_factor=torch.ones(M)), "Pass row_factor=alpha . row_factor"),
    "bias, a list": (given(bias=[1.0]), "bias must be a torch.Tensor, but it is of type list"),
    "bias, dtype": (given(bias=torch.ones(N).double()), "bias of an epilogue must be torch.float32 or torch.bfloat16"),
    "bias, shape": (given(bias=torch.ones(M)), r"bias of the epilogue must have the shape \(24,\), but it has \(9,\)"),
    "bias, stride": (given(bias=torch.ones(2 * N)[::2]), "bias of the epilogue must be contiguous"),
    "bias, rank": (given(bias=torch.ones(1, N)), "bias must have 1 dimension"),
    "bias, device": (given(bias=torch.ones(N, device="meta")), "bias is a meta tensor"),
    "residual, dtype": (
        given(residual=torch.ones(M, N)),
        "residual of the epilogue must have d's dtype, torch.bfloat16",
    ),
    "residual, shape": (
        given(residual=torch.ones(N, M).bfloat16()),
        r"residual of the epilogue must have the shape \(9, 24\)",
    ),
    "residual, layout": (
        given(residual=torch.ones(N, M).bfloat16().t()),
        "residual must be row-major with rows of its own",
    ),
    "factors, dtype": (given(row_factor=torch.ones(M).bfloat16()), "row_factor of an epilogue must be torch.float32"),
    "factors, shape": (given(row_factor=torch.ones(N)), r"row_factor of the epilogue must have the shape \(9,\)"),
    "a name": (
        lambda: deep_gemm.bf16_gemm_nt(*operands("bf16")[:2], torch.empty(M, N), epilogue="relu"),  # type: ignore[arg-type]
        r"Pass deep_gemm.Epilogue\(activation='relu'\)",
    ),
    "both": (
        lambda: deep_gemm.bf16_gemm_nt(
            *operands("bf16")[:2], torch.empty(M, N), alpha=1.0, epilogue=Epilogue(alpha=1.0)
        ),
        "alpha and epilogue cannot both be given",
    ),
    "FP8CastWithClamp": (lambda: deep_gemm.epilogue.FP8CastWithClamp(torch.ones(1)), "this version writes no FP8"),
    "BF16StochasticRounding": (deep_gemm.epilogue.BF16StochasticRounding, "this version rounds to nearest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises((InvalidInputError, UnsupportedError), match=sentence):
        call()


def test_a_residual_that_overlaps_d_is_refused() -> None:
    a, b, _ = operands("bf16")
    both = torch.zeros(M + 1, N)
    with pytest.raises(InvalidInputError, match="d and residual share memory"):
        deep_gemm.bf16_gemm_nt(a, b, both[1:], epilogue=Epilogue(residual=both[:-1]))
    with pytest.raises(InvalidInputError, match="d and residual share memory"):  # c is d, so d is read twice
        deep_gemm.bf16_gemm_nt(a, b, both[1:], both[1:], epilogue=Epilogue(residual=both[1:]))


PARTS = [
    Parts(*each)
    for each in itertools.product((False, True), (False, True), ("", "f32", "bf16"), ("", "gelu_erf"), (False, True))
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_a_text_names_all_parts(parts: Parts) -> None:
    assert parse(str(parts)) == parts


def test_kernels_get_the_parts_as_operands(gpu: FakeGpu) -> None:
    """The first call is remembered, others with other tensors are replays, and each alpha is another launch."""
    x, y = torch.zeros(M, K, dtype=BF16), torch.zeros(N, K, dtype=BF16)
    d, bias, residual = torch.zeros(M, N, dtype=BF16), torch.zeros(N), torch.zeros(M, N + 8, dtype=BF16)[:, :N]
    for alpha, prepared in ((0.5, 1), (0.5, 1), (2.0, 2), (2.0, 2)):
        deep_gemm.bf16_gemm_nt(x, y, d, epilogue=Epilogue(bias, "silu", alpha, residual))
        launched = gpu.launched[-1]
        assert str(launched.spec.epilogue) == "alpha+bias:f32+silu+residual"
        assert launched.numbers["alpha"] == alpha
        assert launched.strides["residual"] == (N + 8, 1)
        assert {name: launched.at[name] for name in ("bias", "residual")} == {
            "bias": bias.data_ptr(),
            "residual": residual.data_ptr(),
        }
        assert gpu.prepared == prepared
    deep_gemm.bf16_gemm_nt(x, y, d, epilogue=Epilogue(residual=torch.zeros(M, N + 1, dtype=BF16)[:, :N]))
    assert not gpu.launched[-1].spec.d.aligned


# ------------------------------------------------------------------------------------------------ arithmetic


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    each = "".join(
        f'extern "C" void {name}(float* x, long count) {{ for (long i = 0; i < count; i += 2) '
        f"{device_name(Parts(activation=name)).partition(',')[0]}::apply(x[i], x[i + 1]); }}\n"
        for name in ACTIVATIONS
    )
    return compiled(tmp_path_factory.mktemp("host"), "sum_activations.cuh", each)


EDGES = [
    0.0, -0.0, float("inf"), float("-inf"), float("nan"), 88.0, -88.0, 104.0, -104.0, 1e-38, -1e-38, 1e-42, 3e38, -3e38,
]  # fmt: skip


def _sigmoid(x: float) -> float:
    return 0.0 if x < -700 else 1 / (1 + math.exp(-x))


EXACT: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_erf": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "relu": lambda x: x if math.isnan(x) else max(x, 0.0),
    "relu2": lambda x: x if math.isnan(x) else max(x, 0.0) ** 2,
}
"""Of C's library, since torch's functions depend on the CPU: its gelu of infinity is NaN by oneDNN with AVX512."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_exact(library: ctypes.CDLL, name: str) -> None:
    """That of kernels and that of the reference. The error is relative to the exact value, also where that is tiny;
    below 2^-119 it may be zero. Infinity and NaN are where they belong."""
    edges = torch.tensor(EDGES)
    x = torch.cat([torch.linspace(-20, 20, 40000), torch.linspace(-110, 110, 2000), edges])
    exact = ACTIVATIONS[name](x.double())
    if name in EXACT:
        exact = torch.tensor([EXACT[name](value) for value in x.tolist()], dtype=torch.float64)
    finite = exact.isfinite() & (exact.abs() < 3e38)
    # exp(-x^2 / 2) has x^2 / 2 times the relative error of its argument; that of GELU with tanh grows with x^3.
    of_kernel = 2**-18 + x[finite].double().clamp(-30, 30).square() * 2**-22
    reference = [(ACTIVATIONS[name](x), 2**-23)] if name in EXACT else []
    for found, relative in ((pairs(library, name, x), of_kernel), *reference):
        error, bound = (found.double() - exact).abs()[finite], exact.abs()[finite] * relative + 2**-119
        assert (error <= bound).all(), (x[finite][(error - bound).argmax()], (error - bound).max())
        for ours, theirs in zip(found[-len(EDGES) :], exact.float()[-len(EDGES) :], strict=True):
            if not theirs.isfinite():
                torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_sum_that_is_not_finite_changes_no_other(library: ctypes.CDLL, name: str) -> None:
    """A thread applies it to two sums at once."""
    ordinary = torch.linspace(-50, 50, 101)
    alone = pairs(library, name, torch.stack([ordinary, torch.ones_like(ordinary)], 1).flatten())[::2]
    for edge, place in itertools.product(EDGES, (0, 1)):
        both = [ordinary, torch.full_like(ordinary, edge)]
        found = pairs(library, name, torch.stack(both if place == 0 else both[::-1], 1).flatten())[place::2]
        torch.testing.assert_close(found, alone, rtol=2**-21, atol=0)
