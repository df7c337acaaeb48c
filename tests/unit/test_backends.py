"""The registry of backends: who has which operation, who is absent and why, and how others join."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparisons import MulAdd, registry_is_left_alone
from test_import import child

import deep_gemm
from deep_gemm import backends
from deep_gemm.backends import accuracy, deepgemm, registry
from deep_gemm.backends.operations import normal
from deep_gemm.backends.row_operations import FORMULAS
from deep_gemm.errors import InvalidInputError, UnsupportedError
from deep_gemm.ops.prenorm import rounded_to_tf32

CPU = torch.device("cpu")


__all__ = ["registry_is_left_alone"]


def test_an_import_looks_for_no_backend() -> None:
    code = "import sys, deep_gemm.backends; print(sorted({'torch', 'triton'} & {*sys.modules}))"
    assert child(code) == "[]\n"


def test_the_backends_have_the_operations() -> None:
    assert backends.names() == ["cuda", "cublaslt", "deepgemm", "triton", "torch"]
    assert backends.of("fp8_gemm_nt")[:3] == ["cuda", "cublaslt", "cublaslt:tensorwise"]
    gemms = [f"{dtype}_gemm_{form}" for dtype in ("bf16", "fp16") for form in ("nt", "nn", "tn", "tt")]
    assert {"fp8_gemm_nt", *gemms} <= set(backends.operation_names())
    for op in backends.operation_names():
        assert "torch" in backends.of(op)
    for op in gemms:
        assert {"cuda", "cublaslt"} <= set(backends.of(op))


SMALL = {
    op: (3, 40, 24, 48) if op.startswith("m_") else (3, 256, 40, 24) if op.startswith("k_") else (5, 24, 48)
    for op in backends.operation_names()
}
SMALL |= {"fp8_mqa_logits": (40, 300), "fp8_paged_mqa_logits": (3, 2, 200), "tf32_hc_prenorm_gemm": (40, 256)}
SMALL |= {f"fused_{name}": (5, 2048) for name in FORMULAS}
SMALL |= {op: (3, 40, 24, 96) if op.startswith("m_") else (5, 24, 96) for op in SMALL if "fp4" in op}
SMALL |= {op: (5, 3, 272, 136) for op in backends.operation_names() if "einsum" in op}


@pytest.mark.parametrize("op", SMALL)
def test_the_reference_is_right_on_the_cpu_and_ours_takes_the_same_operands(op: str) -> None:
    operation = backends.get_operation(op)
    operands = operation.make(SMALL[op], CPU)
    output = operation.output(operands)
    exact = operation.exact(*operands)
    for name in (name for name in backends.of(op) if name.partition(":")[0] in ("torch", "cuda")):
        output.fill_(float("nan"))
        kernel = backends.get_kernel(name, op)
        kernel(*operands)
        if kernel.easier:
            continue
        result = operation.result(operands)
        assert accuracy.examine(result, exact, operation.allowed(exact, *operands)).right, name
    assert result.numel() == operation.elements(SMALL[op])
    if not op.startswith("m_"):  # rows of padding are not counted
        tensors = [x for group in operands for x in (group if isinstance(group, tuple) else (group,))]
        total = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))
        assert abs(total - operation.bytes_moved(SMALL[op])) <= 4 * 24 * 2, "rows of scales may be padded"


@pytest.mark.parametrize("op", [op for op in SMALL if "grouped" in op])
def test_a_group_with_the_matrix_of_another_is_wrong(op: str) -> None:
    operation = backends.get_operation(op)
    operands = operation.make(SMALL[op], CPU)
    exact, wrong = operation.exact(*operands), operation.exact(*operation.make(SMALL[op], CPU, seed=1))
    assert not bool(((wrong - exact).abs() <= operation.allowed(exact, *operands)).all())
    assert len(set(operation.counts(SMALL[op]))) > 1  # type: ignore[attr-defined]


def bf16_scores(q: torch.Tensor, k: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("mhd,nd->mnh", q.float(), k.float()).clamp(min=0).bfloat16().float()
    return torch.einsum("mnh,mh->mn", scores, weights) * scales


def test_a_logit_without_a_head_or_of_another_key_is_wrong_and_one_of_rounded_scores_is_right() -> None:
    operation = backends.get_operation("fp8_mqa_logits")
    q, (k, scales), weights, start, end, out = operation.make((64, 512), CPU)
    operands = (q, (k, scales), weights, start, end, out)
    exact = operation.exact(*operands)
    allowed, known = operation.allowed(exact, *operands), exact.isfinite()
    assert torch.equal(known, torch.arange(512) < end[:, None])

    def share(found: torch.Tensor) -> torch.Tensor:
        return ((found.double() - exact).abs() / allowed)[known]

    assert 0.1 < float(share(bf16_scores(q, k, scales, weights)).max()) < 0.6
    short = weights.clone()
    short[:, 7] = 0
    for wrong in (bf16_scores(q, k, scales, short), bf16_scores(q, k.roll(1, 0), scales, weights)):
        assert float((share(wrong) > 1).float().mean()) > 0.3  # half of the scores are below 0


def test_a_prenorm_product_in_tf32_is_right_and_one_without_a_block_of_k_is_wrong() -> None:
    operation = backends.get_operation("tf32_hc_prenorm_gemm")
    a, b, out = operation.make((40, 28672), CPU)
    exact = operation.exact(a, b, out)
    allowed = operation.allowed(exact, a, b, out)
    cut = (b.view(torch.int32) & ~0x1FFF).view(torch.float32)
    x = a.float()
    for right in (b, cut, rounded_to_tf32(b)):
        found = torch.cat([(x @ right.t()).flatten(), x.square().sum(1)])
        assert float(((found - exact).abs() / allowed).max()) < 0.7
    x[:, :64] = 0
    found = torch.cat([(x @ b.t()).flatten(), x.square().sum(1)])
    wrong = (found - exact).abs() > allowed
    assert float(wrong[: 40 * 24].float().mean()) > 0.5
    assert float(wrong[40 * 24 :].float().mean()) > 0.5


@pytest.mark.parametrize(
    ("op", "dims", "why"),
    [
        ("fp8_mqa_logits", (5, 4), "there must be as many keys as queries, but there are 4"),
        ("fp8_paged_mqa_logits", (1, 5, 4), "there must be as many keys as tokens, but there are 4"),
        ("tf32_hc_prenorm_gemm", (5, 65), "K must be a multiple of 64, but it is 65"),
        ("bf16_fp4_gemm_nt", (5, 8, 48), "K must be a multiple of 32, but it is 48"),
    ],
)
def test_shapes_without_logits_or_a_product_are_skipped_with_the_reason(op: str, dims: Any, why: str) -> None:
    (row,) = backends.compare(op, [dims], ["torch"], device="cpu").results
    assert (row.status, row.why) == ("skipped", why)


@pytest.mark.parametrize(
    ("name", "op", "error", "message"),
    [
        ("nobody", "fp8_gemm_nt", InvalidInputError, "backend must be one of cuda, .*, torch, but it is 'nobody'"),
        ("torch", "fp8_gemm", InvalidInputError, "op must be one of fp8_gemm_nt, .*, but it is 'fp8_gemm'"),
        ("triton", "fp16_gemm_tt", UnsupportedError, "The backend triton "),
        ("cublaslt:other", "fp8_gemm_nt", UnsupportedError, "has no fp8_gemm_nt"),
    ],
)
def test_what_there_is_not_is_said_in_words(name: str, op: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        backends.get_kernel(name, op)


@pytest.mark.parametrize(
    ("name", "op", "function", "says"),
    [
        *((name, "fp8_gemm_nt", len, "name must be that of a backend") for name in ("", " ", ":", "a:", ":b", "a:b:c")),
        *((name, "fp8_gemm_nt", len, "name must be that of a backend") for name in ("a,b", None, 3)),
        *(("mine", op, len, "op must be the name of an operation") for op in ("", None)),
        ("mine", "fp8_gemm_nt", None, "mine must be a function of fp8_gemm_nt's operands"),
    ],
)
def test_a_kernel_that_no_compare_could_run_is_refused(name: Any, op: Any, function: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        backends.kernel(name, op)(function)
    assert backends.compare("fp8_gemm_nt", [(16, 16, 128)], ["torch"], device="cpu").results[0].status == "ok"


def test_an_absent_backend_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    @backends.backend
    class Far(backends.Backend):
        name = "far"
        requires = "a_module_that_nobody_has"
        install = "pip install far"

    reason = "the module a_module_that_nobody_has is not installed (pip install far)"
    assert backends.absent()["far"] == reason
    backends.kernel("far", "mul_add")(lambda x, y, z, out: None)
    assert "far" not in backends.of("mul_add")
    with pytest.raises(UnsupportedError, match=r"The backend far cannot be used here: the module a_module"):
        backends.get_kernel("far", "mul_add")
    monkeypatch.setitem(sys.modules, Far.requires, None)
    assert backends.absent()["far"] == reason


def test_a_backend_that_does_not_import_is_refused_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import ctypes\nctypes.CDLL('libnowhere.so.7')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    @backends.backend
    class Broken(backends.Backend):
        name = "broken"
        modules = ("half_installed",)

    with pytest.raises(UnsupportedError, match=r"The backend broken cannot be used here: OSError: libnowhere"):
        backends.get_kernel("broken", "mul_add")
    assert "torch" in backends.of("mul_add"), "the others go on"


def test_a_backend_is_one_function_and_an_operation_one_class() -> None:
    @backends.operation
    class Double(MulAdd):
        """out = 2 x."""

        name = "double"

        def make(self, dims: tuple[int, ...], device: torch.device, seed: int = 0) -> tuple[Any, ...]:
            return normal(device, seed)(*dims), torch.empty(dims, dtype=torch.bfloat16, device=device)

        def exact(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return 2 * x.double()

        def allowed(self, exact: torch.Tensor, *operands: Any) -> torch.Tensor:
            return 0 * exact

    @backends.kernel("mine", "double")
    def double(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(x, x, out=out)

    backends.kernel("mine:returning", "double", prepares=True)(lambda x, out: lambda: x + x)
    assert backends.of("double") == ["mine", "mine:returning"]
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    for name in backends.of("double"):
        out = torch.zeros_like(x)
        backends.get_kernel(name, "double")(x, out)
        assert out.tolist() == [[2.0, 6.0]]
    found = backends.compare("double", [(3, 8)])
    assert {row.backend: row.status for row in found.results if row.status != "absent"} == {
        "mine": "ok",
        "mine:returning": "ok",
    }


def entry_point(directory: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / f"{name}.py").write_text(text)
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[deep_gemm.backends]\n{name} = {name}\n")
    monkeypatch.syspath_prepend(str(directory))


def test_packages_join_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "from deep_gemm import backends\n@backends.kernel('theirs', 'mul_add')\ndef f(x, y, z, out): pass\n"
    entry_point(tmp_path, "their_backends", theirs, monkeypatch)
    entry_point(tmp_path, "their_ruins", "raise ImportError('no such symbol')\n", monkeypatch)
    registry._find.cache_clear()
    assert "theirs" in backends.of("mul_add")
    assert backends.absent()["their_ruins"] == "their_ruins does not load: ImportError: no such symbol"
    assert "their_ruins" in backends.names()
    with pytest.raises(UnsupportedError, match="their_ruins does not load"):
        backends.get_kernel("their_ruins", "mul_add")


def test_deepgemm_is_found_beside_ours_and_called_as_ours_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm, "_loaded", [])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "deep_gemm").exists()])
    assert "pip install --target" in backends.absent()["deepgemm"]
    package = tmp_path / "deep_gemm"
    (package / "include" / "deep_gemm").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '9'\ndef fp8_gemm_nt(*given): return given\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # syspath_prepend would put the shorter path back
    assert "deepgemm" not in backends.absent()
    assert backends.get_kernel("deepgemm", "fp8_gemm_nt").prepare(1, 2, 3)() == (1, 2, 3)
    with pytest.raises(UnsupportedError, match="this version has no fp8_mqa_logits"):
        backends.get_kernel("deepgemm", "fp8_mqa_logits").prepare(1, 2, 3)
    with pytest.raises(AttributeError, match="bf16_gemm_tt"):
        backends.get_kernel("deepgemm", "bf16_gemm_tt").prepare(1, 2, 3)
    assert deepgemm.use(SimpleNamespace(__version__="2.6")) == "2.6"


@pytest.mark.parametrize(
    ("op", "name", "q_is_a_pair", "options"),
    [
        ("fp8_mqa_logits", "fp8_mqa_logits", False, {"clean_logits": True}),
        ("fp8_paged_mqa_logits", "fp8_paged_mqa_logits", False, {"clean_logits": False}),
        ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits", True, {}),
        ("tf32_hc_prenorm_gemm", "tf32_hc_prenorm_gemm", False, {}),
        ("einsum_bhd_hdr_bhr", "einsum", False, {}),
        ("fp8_einsum", "fp8_einsum", False, {}),
    ],
)
def test_deepgemms_logits_and_product_have_our_operands(
    op: str, name: str, q_is_a_pair: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function is ours here, called as DeepGEMM's is: what it gives must be right."""
    given: dict[str, Any] = {}

    def theirs(first: Any, *rest: Any, **named: Any) -> Any:
        given.update(named)
        assert isinstance(first, tuple) == q_is_a_pair
        return getattr(deep_gemm, name)(first, *rest, **named)

    monkeypatch.setattr(deepgemm, "_loaded", [SimpleNamespace(**{name: theirs})])
    operation = backends.get_operation(op)
    operands = operation.make(SMALL[op], CPU)
    exact = operation.exact(*operands)
    operation.output(operands).fill_(float("nan"))
    backends.get_kernel("deepgemm", op)(*operands)
    assert accuracy.examine(operation.result(operands), exact, operation.allowed(exact, *operands)).right
    assert given == options
