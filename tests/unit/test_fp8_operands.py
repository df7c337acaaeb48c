"""Every mistake in a call has its own sentence, and every right call is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError
from deep_gemm.ops.dense import Dense
from deep_gemm.spec import align, ceil_div
from deep_gemm.testing import guarded

E4M3 = torch.float8_e4m3fn
M, N, K = 20, 200, 272


def check(a: Any, b: Any, d: Any, c: Any = None, **options: Any) -> Any:
    """As a call of the public function is checked."""
    return Dense("fp8_gemm_nt", accumulates=c is not None).check(a, b, d, c, **options)


def arguments(m: int = M, n: int = N, k: int = K) -> dict[str, Any]:
    """The arguments of a right call."""
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


def with_rows(sfa: Any, sfb: Any) -> dict[str, Any]:
    args = arguments()
    return args | {"a": (args["a"][0], sfa), "b": (args["b"][0], sfb)}


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
    x = check(**args)
    assert x is not None
    assert (x.m, x.n, x.k) == (M, N, K)
    given = (*args["a"], *args["b"], args["d"])
    assert all(mine is theirs for mine, theirs in zip(x.tensors.values(), given, strict=True))
    assert list(x.tensors) == ["a", "sfa", "b", "sfb", "d"]
    assert (x.device, x.compiled_dims) == (torch.device("cpu"), "")


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
        {"compiled_dims": None},
        {"compiled_dims": "mnk"},
    ],
    ids=str,
)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    assert check(**arguments(), **options) is not None


ONE = torch.tensor(0.5)
SCALINGS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, str]]] = {
    "blocks": (arguments, ("1x128", "128x128")),
    "weight gradients": (
        lambda: with_sfb(torch.ones(N, 3)) | {"recipe": (1, 1, 128)},
        ("1x128", "1x128"),
    ),
    "the same as pairs": (
        lambda: with_sfb(torch.ones(N, 3)) | {"recipe_a": (1, 128), "recipe_b": [1, 128]},
        ("1x128", "1x128"),
    ),
    "one of each operand": (lambda: with_rows(ONE, ONE[None, None]), ("row", "row")),
    "one of each row": (lambda: with_rows(torch.ones(M, 1), torch.ones(1, N)), ("row", "row")),
    "one of each row, as columns": (lambda: with_rows(torch.ones(M, 1), torch.ones(N, 1)), ("row", "row")),
    "one, and one of each row": (lambda: with_rows(ONE[None], torch.ones(1, N)), ("row", "row")),
    "blocks, where K has one": (lambda: arguments(k=128), ("1x128", "128x128")),
    "rows, where K has one block": (
        lambda: arguments(k=128) | {"b": (arguments(k=128)["b"][0], torch.ones(1, N))},
        ("row", "row"),
    ),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_scales_are_told_by_the_recipe_or_else_by_their_shapes(case: str) -> None:
    make, scaling = SCALINGS[case]
    x = check(**make())
    assert x is not None
    assert x.scaling == scaling


def test_c_may_be_d_or_another_tensor() -> None:
    args = arguments()
    assert check(**args).accumulate == "none"
    assert check(**args, c=args["d"]).accumulate == "in place"
    assert check(**args, c=torch.zeros_like(args["d"])).accumulate == "from c"


def test_compiled_dims_are_put_in_order() -> None:
    x = check(**arguments(), compiled_dims="kkn")
    assert x is not None
    assert x.compiled_dims == "nk"


def test_lists_are_pairs_too() -> None:
    args = arguments()
    check(list(args["a"]), list(args["b"]), args["d"])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (1, N, K), (M, 1, K), (3, 129, 144)])
def test_sizes_at_the_edges(m: int, n: int, k: int) -> None:
    x = check(**arguments(m, n, k))
    assert x is not None
    assert (x.m, x.n, x.k) == (m, n, k)


@pytest.mark.parametrize(("m", "n", "k"), [(0, N, K), (M, 0, K), (M, N, 0), (0, 1, 0), (0, 0, 0)])
def test_there_is_nothing_to_launch_where_a_size_is_zero(m: int, n: int, k: int) -> None:
    args = arguments(m, n, k)
    args["d"].fill_(float("nan"))
    assert check(**args) is None
    assert not args["d"].any()


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
    "d beside a in one allocation": lambda: beside(),
    "d and scales in columns of one buffer": lambda: interleaved(),
}


def beside() -> dict[str, Any]:
    memory = torch.zeros(M * K + M * N * 2, dtype=torch.uint8)
    a = memory[: M * K].view(E4M3).view(M, K)
    return with_a(a) | {"d": memory[M * K :].view(torch.bfloat16).view(M, N)}


def interleaved() -> dict[str, Any]:
    buffer = torch.zeros(M, 128, dtype=torch.float32)  # rows of 512 bytes: 400 of d, and the scales of a
    return with_sfa(buffer[:, 101:104]) | {"d": buffer.view(torch.bfloat16)[:, :N]}


@pytest.mark.parametrize("case", RIGHT)
def test_unusual_but_right(case: str) -> None:
    assert check(**RIGHT[case]()) is not None


@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb"])
@pytest.mark.parametrize("leaf", [True, False])
def test_inputs_may_require_grad(name: str, leaf: bool) -> None:
    """As weights of a module do inside an autograd.Function. Nothing is recorded for backward."""
    args = arguments()
    pair = list(args[name[-1]])
    at = int(name.startswith("sf"))
    pair[at] = torch.nn.Parameter(pair[at])
    if not leaf:
        pair[at] = pair[at].view_as(pair[at])
    assert pair[at].requires_grad
    args[name[-1]] = tuple(pair)
    deep_gemm.fp8_gemm_nt(**args)
    assert not args["d"].requires_grad


def test_only_an_output_that_requires_grad_is_refused() -> None:
    d = torch.zeros(M, N, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(InvalidInputError, match=r"d requires grad.*no_grad.*detached"):
        deep_gemm.fp8_gemm_nt(**with_d(d))
    with torch.no_grad():
        deep_gemm.fp8_gemm_nt(**with_d(d))
    deep_gemm.fp8_gemm_nt(**with_d(d.detach()))


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
    "scales of rank 1": (lambda: with_sfa(torch.ones(M)), r"scales of a must have the shape \(20, 3\).*\(20,\)"),
    "scales of rank 3": (lambda: with_sfa(torch.ones(1, M, 3)), "the scales of a must have 2 dimensions"),
    "k differs": (lambda: arguments() | {"b": arguments(k=288)["b"]}, r"agree in K.*\(20, 272\).*\(200, 288\)"),
    "k is no multiple of 16": (lambda: arguments(k=264), r"K must be a multiple of 16.*a is \(20, 264\).*K = 272"),
    "b skips columns": (lambda: with_b(fp8(N, 2 * K)[:, ::2]), "b must have stride 1 along one dimension"),
    "columns of a overlap": (lambda: with_a(fp8(1, M).expand(K, M).t()), "a must have .* rows of its own"),
    "a starts off": (lambda: with_a(fp8(M, K, offset=8)), "a must start at a multiple of 16 bytes.* 8 past.*clone"),
    "b starts off": (lambda: with_b(fp8(N, K, offset=1)), "b must start at a multiple of 16 bytes.* 1 past"),
    "rows of a overlap": (lambda: with_a(fp8(1, K).expand(M, K)), "the rows of a overlap"),
    "row stride of b": (lambda: with_b(fp8(N, K, stride=K + 8)), "row stride of b must be a multiple of 16.*280"),
    "scales of a transposed": (lambda: with_sfa(torch.ones(3, M)), r"scales of a must have the shape \(20, 3\)"),
    "too many scales of b": (lambda: with_sfb(torch.ones(2, 4)), r"scales of b must have the shape \(2, 3\)"),
    "scales of b for too few rows": (lambda: with_sfb(torch.ones(N - 1, 3)), r"one per 128 x 128 block"),
    "scales are bfloat16": (
        lambda: with_sfa(torch.ones(M, 3).bfloat16()),
        "must be torch.float32, but they are.*float()",
    ),
    "scales are float64": (lambda: with_sfb(torch.ones(2, 3).double()), "the scales of b must be torch.float32"),
    "d is float64": (lambda: with_d(torch.zeros(M, N).double()), "d must be torch.bfloat16.*float64"),
    "c is float32": (lambda: arguments() | {"c": torch.zeros(M, N)}, "c must have d's dtype, torch.bfloat16"),
    "c has another shape": (lambda: arguments() | {"c": bf16(M, 8)}, r"c must have the shape \(20, 200\)"),
    "c is column-major": (lambda: arguments() | {"c": bf16(N, M).t()}, "c must be row-major"),
    "c is part of d": (lambda: (x := bf16(M + 1, N)) is not None and with_d(x[1:]) | {"c": x[:-1]}, "d and c share"),
    "scales of 128 rows with the 1D1D recipe": (
        lambda: arguments() | {"recipe": (1, 1, 128)},
        r"scales of b must have the shape \(200, 3\)",
    ),
    "scales of rows with a recipe": (
        lambda: with_rows(torch.ones(M, 1), torch.ones(1, N)) | {"recipe": (1, 128, 128)},
        r"scales of a must have the shape \(20, 3\)",
    ),
    "scales of rows for a alone": (
        lambda: with_sfa(torch.ones(M, 1)),
        r"scales of a must have .*or for each|one scale",
    ),
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
    "scales are quantised": (
        lambda: with_sfa(torch.quantize_per_tensor(torch.ones(M, 3), 1.0, 0, torch.qint8)),
        "the scales of a is a quantised tensor",
    ),
    "scales are nested": (
        lambda: with_sfa(torch.nested.nested_tensor([torch.ones(3)] * M)),
        "the scales of a is a nested tensor",
    ),
    "scales are negated": (
        lambda: with_sfa(torch._neg_view(torch.ones(M, 3))),
        "the scales of a is a view.*resolve_neg",
    ),
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
    "compiled_dims is a number": (lambda: arguments() | {"compiled_dims": 3}, "compiled_dims must be .*3"),
    "disable_ue8m0_cast": (lambda: arguments() | {"disable_ue8m0_cast": 1}, "disable_ue8m0_cast must be True or False"),
}


@pytest.mark.parametrize("case", INVALID)
def test_what_the_caller_can_put_right(case: str) -> None:
    make, words = INVALID[case]
    with pytest.raises(InvalidInputError, match=words) as caught:
        check(**make())
    # Clients catch either.
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    check(**arguments())


UNSUPPORTED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "gran_k 32": (lambda: arguments() | {"recipe_a": (1, 32), "recipe_b": (1, 32)}, r"\(1, 32, 1, 32\) is not supp"),
    "blocks of a": (lambda: arguments() | {"recipe": (128, 128, 128)}, r"recipe \(128, 128, 128\) is not supported"),
    "packed FP4": (lambda: with_b(torch.zeros(N, K // 2, dtype=torch.int8)), "b is torch.int8, as packed FP4"),
    "packed scales": (lambda: with_sfa(torch.ones(M, 1, dtype=torch.int32)), "scales of a are torch.int32.*UE8M0"),
    "e8m0 scales": (lambda: with_sfb(torch.ones(2, 3).to(torch.float8_e8m0fnu)), "scales of b are .*e8m0fnu"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_this_version_cannot_do(case: str) -> None:
    make, words = UNSUPPORTED[case]
    with pytest.raises(UnsupportedError, match=words) as caught:
        check(**make())
    assert isinstance(caught.value, RuntimeError)


def test_mixed_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # There may be no second device, so a tensor claims to be on one.
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 1)

    args = with_sfb(torch.ones(2, 3).as_subclass(Elsewhere))
    with pytest.raises(InvalidInputError, match=r"one device.*a on cpu.*the scales of b on cuda:1.*d on cpu"):
        check(**args)
