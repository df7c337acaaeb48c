"""Operators of torch: what is traced by `torch.compile` and `torch.export` computes what a plain call does."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_cases import arguments
from torch import Tensor

import deep_gemm
from deep_gemm import InvalidInputError, fused, quantize
from deep_gemm.ops.dense import Dense
from deep_gemm.runtime import operators

BF16, M, N, K, GROUPS = torch.bfloat16, 200, 256, 128, 2
OPERATORS = deep_gemm.register_operators()
WRITING = [name for name in OPERATORS if not name.endswith("_functional")]
ROWS = (384, 640, 896)
"""None is a size of the weights: sizes that are equal in the first call would be taken for one."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


W, EXPERTS = matrix(N, K), matrix(GROUPS, N, K)
FP8_W = quantize.blocks(W)
FP8_EXPERTS = tuple(torch.stack(parts) for parts in zip(*map(quantize.blocks, EXPERTS), strict=True))


def dense(x: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], N, dtype=x.dtype)
    deep_gemm.bf16_gemm_nt(x, W, d)
    return d


def dense_added(x: Tensor) -> Tensor:
    d = torch.ones(x.shape[0], N)
    deep_gemm.bf16_gemm_nn(x, W.t(), d, d)
    return d


def fp8(x: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], N, dtype=BF16)
    deep_gemm.fp8_gemm_nt(quantize.rows(x), FP8_W, d, recipe=(1, 128, 128))
    return d


def token_cast(x: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], N, dtype=BF16)
    deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(x, False), FP8_W, d)
    return d


def casts(x: Tensor) -> tuple[Tensor, ...]:
    first, second = quantize.rows_and_columns(x)
    rows, blocks = quantize.rows_and_blocks_transposed(x)
    return *first, *second, *rows, *blocks, *quantize.columns(x)


def contiguous_fp8(x: Tensor) -> Tensor:
    d = torch.empty(x.shape[0], N, dtype=BF16)
    groups = torch.ones(x.shape[0], dtype=torch.int32)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(quantize.rows(x), FP8_EXPERTS, d, groups)
    return d


def masked(x: Tensor) -> Tensor:
    d = torch.zeros(GROUPS, x.shape[0], N, dtype=BF16)
    counts = torch.tensor([3, 5], dtype=torch.int32)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(torch.stack([x, x]), EXPERTS, d, counts, 4)
    return d[:, :3]


def logits(x: Tensor) -> Tensor:
    q = x.view(x.shape[0], 1, K).expand(-1, 32, -1).contiguous().to(torch.float8_e4m3fn)
    keys, scales = W.to(torch.float8_e4m3fn), torch.ones(N)
    ends = torch.full((x.shape[0],), N, dtype=torch.int32)
    weights = torch.ones(x.shape[0], 32)
    return deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, torch.zeros_like(ends), ends)


def norms(x: Tensor) -> tuple[Tensor, ...]:
    residual, weight = x + 1, W[0, :K]
    pair = fused.rms_norm(x, weight, torch.float8_e4m3fn, residual=residual, use_ue8m0=True)
    return *pair, residual, fused.layer_norm(x, weight, None, x.clone())


def activations(x: Tensor) -> tuple[Tensor, ...]:
    bias = W[0, :K]
    pair = fused.silu_and_mul(x, torch.float8_e4m3fn, factors=torch.ones(x.shape[0]))
    return fused.silu_and_mul(x, limit=3.0), *pair, fused.add_gelu(x, bias, torch.float32), fused.mul_add(x, bias, x)


LAYERS = [dense_added, fp8, casts, contiguous_fp8, masked, logits, norms, activations]
"""With values made inside. Each public function alone is compiled in test_compiled_calls.py."""


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)], ids=["static", "dynamic"])
def test_a_compiled_layer_is_one_graph_for_all_m(
    layer: Callable[[Tensor], Any], dynamic: bool, fresh_compiler: Any
) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in ROWS if dynamic else ROWS[:1]:
        x = matrix(m, K)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
    assert fresh_compiler["stats"]["unique_graphs"] == 1
    assert not fresh_compiler["graph_break"]


EXPORTED = [(dense, "bf16_gemm"), (token_cast, "fp8_gemm"), (fp8, "quantize_plain")]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(("layer", "name"), EXPORTED)
def test_an_exported_program_calls_the_operator(layer: Callable[[Tensor], Any], name: str, strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return layer(x)

    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Layer(), (matrix(64, K),), dynamic_shapes=({0: rows},), strict=strict)
    assert f"deep_gemm_jit.{name}" in str(program.graph)
    x = matrix(201, K)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=0, atol=0)


PACKAGE = """
import sys, torch, deep_gemm
if sys.argv[3] == "registered":
    deep_gemm.register_operators()
x, wanted = torch.load(sys.argv[2])
try:
    found = torch._inductor.aoti_load_package(sys.argv[1])(x)
    print(torch.equal(found, wanted))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.limit(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_package_runs_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AOTInductor, for other M than it was exported with. The process must have registered the operators."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # setuptools, which finds the compiler, adds to it

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(fp8(x)) + 1

    x = matrix(200, K)
    torch.save((x, Layer()(x)), tmp_path / "results")
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Layer(), (matrix(64, K),), dynamic_shapes=({0: rows},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    for how, said in (("registered", "True"), ("", "Could not find schema for deep_gemm_jit::")):
        command = [sys.executable, "-c", PACKAGE, package, str(tmp_path / "results"), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.stdout.startswith(said), done.stdout + done.stderr


def test_a_backend_may_call_while_it_compiles() -> None:
    """torch says of the whole process that something is compiled: real tensors are computed all the same."""
    seen: list[Tensor] = []

    def backend(graph: Any, examples: Any) -> Any:
        seen.append(dense(matrix(72, K)))
        return graph

    x = matrix(96, K)
    assert torch.equal(torch.compile(dense, fullgraph=True, backend=backend)(x), dense(x))
    assert seen[0].shape == (72, N)
    assert seen[0].isfinite().all()


def test_the_switch_for_the_same_bits_is_not_moved_behind_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    check = Dense.check

    def looked(*args: Any, **named: Any) -> Any:
        seen.append(deep_gemm.get_batch_invariant())
        return check(*args, **named)

    def switched(x: Tensor) -> Tensor:
        deep_gemm.set_batch_invariant(True)
        d = dense(x)
        deep_gemm.set_batch_invariant(False)
        return d

    compiled, x = torch.compile(switched, backend="eager"), matrix(96, K)
    compiled(x)
    monkeypatch.setattr(Dense, "check", looked)
    compiled(x)
    assert seen == [True]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="graph_break"):
        torch.compile(switched, backend="eager", fullgraph=True)(x)


def test_a_wrong_call_says_the_same_when_it_is_traced() -> None:
    def wrong(x: Tensor) -> Tensor:
        d = torch.empty(x.shape[0], N + 8, dtype=BF16)
        deep_gemm.bf16_gemm_nt(x, W, d)
        return d

    with pytest.raises(InvalidInputError) as plain:
        wrong(matrix(64, K))
    with pytest.raises(Exception, match="d must have the shape") as traced:
        torch.compile(wrong, fullgraph=True, backend="eager")(matrix(64, K))
    assert str(plain.value).partition(",")[0] in str(traced.value)


def own(values: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in values]


def equal(x: Any, y: Any) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if isinstance(x, Tensor) else x == y


SCALES = [torch.ones(M, 2), torch.ones(N, 2)]
ONES, HALF_ONES = [torch.ones(*shape) for shape in ((M, 256), (N, 256))], torch.ones(M, N).to(BF16)
FP8_ONES = [x.to(torch.float8_e4m3fn) for x in ONES]
BF16_ONES = [x.to(BF16) for x in ONES]
TO_FP8 = {"d": torch.zeros(M, N).to(torch.float8_e4m3fn), "sfd": torch.ones(M, 2), "row_factor": torch.ones(M)}

FORMS: dict[str, tuple[str, Sequence[Any], dict[str, Any]]] = {
    "1D1D": ("fp8_gemm", (FP8_ONES[0], SCALES[0], FP8_ONES[1], SCALES[1], ONES[0], ONES[0]),
        {"recipe": [1, 1, 128], "form": "nt"}),
    "rowwise": ("fp8_gemm", (FP8_ONES[0], SCALES[0][:, :1], FP8_ONES[1], SCALES[1][:, :1], HALF_ONES), {"form": "nt"}),
    "E5M2": ("fp8_gemm", (ONES[0].to(torch.float8_e5m2), torch.ones(()), FP8_ONES[1], torch.ones(1), HALF_ONES),
        {"form": "nt"}),
    "tn": ("bf16_gemm", (BF16_ONES[0].t(), BF16_ONES[1].t(), HALF_ONES), {"form": "tn"}),
    "ends of groups": ("m_grouped_bf16_gemm_contiguous",
        (BF16_ONES[0], torch.stack([BF16_ONES[1]] * 2), HALF_ONES, torch.tensor([8, 200], dtype=torch.int32)),
        {"use_psum_layout": True, "form": "nt"}),
    "a gate": ("bf16_gemm_epilogue", (*BF16_ONES, HALF_ONES[:, : N // 2]),
        {"epilogue": "swiglu+clamp:7.0", "form": "nt", "alpha": 1.0}),
    "FP8 d, from rows with factors": ("fp8_gemm_epilogue", (FP8_ONES[0], SCALES[0], FP8_ONES[1], SCALES[1][:2]),
        {**TO_FP8, "epilogue": "rows+silu+fp8", "form": "nt", "alpha": 1.0}),
    "residual": ("bf16_gemm_epilogue", (*BF16_ONES, HALF_ONES),
        {"epilogue": "alpha+gelu+residual", "form": "nt", "alpha": 0.5, "residual": HALF_ONES.clone()}),
}  # fmt: skip
"""Other forms than those of `arguments`: an operator, its first arguments, and others by name."""


@pytest.mark.parametrize("functional", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "functional"])
@pytest.mark.parametrize("form", FORMS)
def test_torch_finds_no_fault_with_other_forms(form: str, functional: bool) -> None:
    name, first, named = FORMS[form]
    operator = getattr(torch.ops.deep_gemm_jit, f"{name}_functional" if functional else name).default
    checked = ("test_faketensor", "test_aot_dispatch_dynamic")
    given = {key: own([value])[0] for key, value in named.items()}
    torch.library.opcheck(operator, tuple(own(first)), given, test_utils=checked)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WRITING else pytest.mark.long) for name in OPERATORS]
)
def test_torch_finds_no_fault_with_an_operator(name: str) -> None:
    given = arguments()[name.removesuffix("_functional")]
    checked = ["test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"]
    if not any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in given):
        checked.append("test_schema")  # which compares with arithmetic that FP8 has not
    torch.library.opcheck(getattr(torch.ops.deep_gemm_jit, name).default, tuple(own(given)), test_utils=checked)


@pytest.mark.parametrize("name", WRITING)
def test_a_functional_operator_returns_what_the_other_one_writes(name: str) -> None:
    given = arguments()[name]
    written, left = own(given), own(given)
    getattr(torch.ops.deep_gemm_jit, name)(*written)
    found = getattr(torch.ops.deep_gemm_jit, f"{name}_functional")(*left)
    assert all(map(equal, left, given))
    schema = getattr(torch.ops.deep_gemm_jit, name).default._schema
    results = [x for x, argument in zip(written, schema.arguments, strict=True) if is_written(argument)]
    returned = [found] if isinstance(found, Tensor) else found
    assert len(returned) == len([x for x in results if x is not None]) > 0
    assert all(map(equal, returned, [x for x in results if x is not None]))


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def test_a_norm_without_a_residual_is_traced() -> None:
    def norm(x: Tensor) -> Tensor:
        return fused.rms_norm(x, W[0, :K])

    x = matrix(96, K)
    assert torch.equal(torch.compile(norm, fullgraph=True, backend="aot_eager")(x), norm(x))


@pytest.mark.parametrize("name", WRITING)
def test_schemas_follow_from_the_parameters(name: str) -> None:
    variants, _ = operators._entries[name]
    parsed = torch._C.parse_schema(f"deep_gemm_jit::{name}{operators.schema(variants)}")
    assert any(argument.alias_info is not None and argument.alias_info.is_write for argument in parsed.arguments)
    assert len(operators._arguments(variants[0], [0] * len(parsed.arguments))) == len(variants[0].arguments)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_a_call_as_its_operator(mode: str) -> None:
    """Of CUDA tensors it would see no launch, and of fake ones it saw nothing: the graph read what nobody wrote."""

    from torch.fx.experimental.proxy_tensor import make_fx

    def product(a: Tensor, b: Tensor) -> Tensor:
        d = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype)
        deep_gemm.bf16_gemm_nt(a, b, d)
        return d + 1

    a, other, b = (torch.randn(m, 64).bfloat16() for m in (16, 16, 32))
    product(a, b)
    graph = make_fx(product, tracing_mode=mode)(a, b)
    assert torch.ops.deep_gemm_jit.bf16_gemm.default in [node.target for node in graph.graph.nodes]
    assert torch.equal(graph(other, b), product(other, b))


def test_a_list_of_torch_reaches_the_entry_as_a_tuple() -> None:
    """Keys of remembered calls hold it: with a list, no call would ever be a warm one."""
    seen: list[Any] = []
    real = operators._real(operators._entries["fp8_gemm"][0], lambda *arguments: seen.extend(arguments))
    real("a", "sfa", "b", "sfb", "d", None, [1, 128, 128])
    assert seen[:5] == [("a", "sfa"), ("b", "sfb"), "d", None, (1, 128, 128)]


def test_nothing_is_registered_before_it_is_needed() -> None:
    code = (
        "import sys, torch, deep_gemm; from deep_gemm.runtime import operators; deep_gemm.bf16_gemm_nt; "
        "print(set(operators._libraries), 'torch._dynamo' in sys.modules); print(*deep_gemm.register_operators())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["set() False", " ".join(OPERATORS)]
