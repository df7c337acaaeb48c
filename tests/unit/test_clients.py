"""The interface as clients use it, also in the place of their own DeepGEMM: calls, probes, and helpers of tests."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import house
import pytest
import torch
from click.testing import CliRunner
from client_calls import ROWS
from public_calls import CALLS, G, K, paired
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import InvalidInputError, UnsupportedError, testing
from deep_gemm.cli import clients
from deep_gemm.cli.app import app
from deep_gemm.jit.compilers import find
from deep_gemm.ops.cast_reference import per_token_cast_to_fp8
from deep_gemm.settings import settings
from deep_gemm.testing import assert_bitwise_equal, calc_diff, ignore_env
from deep_gemm.unsupported import REASONS


@pytest.mark.parametrize("name", ROWS)
def test_a_call_in_a_clients_spelling(name: str) -> None:
    torch.manual_seed(0)
    for found, exact in ROWS[name]("cpu"):
        assert calc_diff(found, exact) < 1e-3


@pytest.mark.filterwarnings("error")  # torch warns when the address of a fake tensor is read
@pytest.mark.parametrize("name", ROWS)
def test_it_looks_at_no_data_when_it_is_traced(name: str) -> None:
    with FakeTensorMode():
        for found, exact in ROWS[name]("cpu"):
            assert found.shape == exact.shape


def test_nvrtc_0_after_the_import_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang exports it always."""
    monkeypatch.delenv("DG_JIT_USE_NVRTC", raising=False)
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", "")
    before = find.find_all()
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "0")
    assert settings.use_nvrtc is False
    assert find.find_all() == before
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    assert settings.use_nvrtc is True


def test_clients_catch_what_they_expect() -> None:
    """Transformers catches NotImplementedError and ValueError, and goes on with Triton; others catch RuntimeError."""
    x, d = torch.ones(4, 128), torch.empty(4, 4, dtype=torch.bfloat16)
    for caught in (ValueError, RuntimeError, InvalidInputError):
        with pytest.raises(caught):
            deep_gemm.bf16_gemm_nt(x, x, d)
    for caught in (NotImplementedError, RuntimeError, UnsupportedError):
        with pytest.raises(caught):
            deep_gemm.fp8_fp4_mega_moe()  # type: ignore[attr-defined]
        with pytest.raises(caught, match="signal"):
            deep_gemm.m_grouped_fp8_gemm_nt_masked(
                (x, x), (x, x), d, x, 1, enable_overlap=True, max_block_n=256, signal=x
            )


def test_tokenspeed_imports_all_its_names_in_one_statement() -> None:
    names = (
        *("ceil_div", "ceil_to_ue8m0", "fp8_einsum", "fp8_gemm_nt", "fp8_m_grouped_gemm_nt_masked", "fp8_mqa_logits"),
        *("fp8_paged_mqa_logits", "get_mk_alignment_for_contiguous_layout", "get_mn_major_tma_aligned_tensor"),
        *("get_mn_major_tma_aligned_packed_ue8m0_tensor", "get_num_sms", "get_paged_mqa_logits_metadata", "get_pdl"),
        *("get_tma_aligned_size", "m_grouped_fp8_gemm_nt_contiguous", "per_block_cast_to_fp8", "set_pdl"),
        *("per_token_cast_to_fp8", "set_num_sms", "tf32_hc_prenorm_gemm", "transform_sf_into_required_layout"),
    )
    scope: dict[str, object] = {}
    exec(f"from deep_gemm import {', '.join(names)}", scope)
    assert all(callable(scope[name]) for name in names)


@pytest.mark.parametrize("name", ["k_grouped_fp8_gemm_nt_contiguous", "k_grouped_bf16_gemm_tn_contiguous"])
def test_what_2_8_added_must_be_none(name: str) -> None:
    x, function = CALLS[name].tensors(), getattr(deep_gemm, name)
    operands = paired(x, "a"), paired(x, "b"), x["d"]
    sizes = ([K // G] * G, x["layout"], x["c"])
    function(*operands, *sizes, epilogue=None)
    with pytest.raises(UnsupportedError, match="epilogue must be None here"):
        function(*operands, *sizes, epilogue=deep_gemm.Epilogue(activation="relu"))
    if name.startswith("k_grouped_fp8"):
        with pytest.raises(UnsupportedError, match="use_padded_sf_layout must be False"):
            function(*operands, *sizes, use_padded_sf_layout=True)


def test_shares_that_no_gpu_has_are_refused() -> None:
    for wrong in (lambda: deep_gemm.set_tc_util(101), lambda: deep_gemm.set_num_sms(10**6)):
        with pytest.raises(InvalidInputError, match=r"must be an integer from [01] to \d+"):
            wrong()


FRESH = """
import os, sys, torch, deep_gemm
os.environ["DG_JIT_CACHE_DIR"] = sys.argv[1]
print(deep_gemm.cache_info()["root"])
theirs = torch.library.Library("deep_gemm", "FRAGMENT")
theirs.define("bf16_gemm(Tensor a, Tensor b, Tensor(a!) d) -> ()")
theirs.impl("bf16_gemm", lambda a, b, d: None, "CompositeExplicitAutograd")
deep_gemm.register_operators()
a, d = torch.ones(16, 64).bfloat16(), torch.zeros(16, 16).bfloat16()
torch.ops.deep_gemm.bf16_gemm(a, a, d)
print(d.sum().item())
torch.ops.deep_gemm_jit.bf16_gemm(a, a, d)
print(d.sum().item())
"""


@pytest.mark.long
def test_a_fresh_process_of_sglang_beside_another_package(tmp_path: Path) -> None:
    """The cache's directory is set after the import, and DeepGEMM's wheel has registered operators of the same name."""
    command = [sys.executable, "-c", FRESH, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [str(tmp_path / "cache"), "0.0", "16384.0"]


def test_a_batch_of_no_tokens_is_no_error() -> None:
    """A rank may get none: DeepSeek-V4's output projection."""
    a = torch.empty(0, G, K).to(torch.float8_e4m3fn), torch.empty(0, G, K // 128)
    b = torch.ones(G, 128, K).to(torch.float8_e4m3fn), torch.ones(G, 1, K // 128)
    d = torch.empty(0, G, 128, dtype=torch.bfloat16)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", a, b, d)
    assert d.shape == (0, G, 128)


PARTS = (
    "gemm_", "bf16_gemm", "bmn_bnk_mn_gemm_impl", "mqa_logits", "paged_mqa_logits", "tf32_hc_prenorm_gemm", "transpose",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_bench_kineto_finds_kernels_by_these_parts_of_names(part: str) -> None:
    """Clients' tests look them up so. Nothing here fills logits or packs scales by a kernel of its own."""
    assert any(part in name for name in house.cases())


def test_bits_are_compared() -> None:
    x = torch.tensor([[1.0, 0.0], [torch.nan, 3.0]])
    assert_bitwise_equal(x, x.clone())
    assert_bitwise_equal(x.t(), x.t().contiguous())
    assert_bitwise_equal(torch.zeros(0), torch.zeros(0))
    other = x.clone()
    other[0, 1] = -0.0
    with pytest.raises(AssertionError, match=r"1 of 4 elements of logits have .* the first at \(0, 1\): 0.0 and"):
        assert_bitwise_equal(x, other, "logits")
    with pytest.raises(AssertionError, match="shapes or dtypes differ"):
        assert_bitwise_equal(x, x.double())
    with pytest.raises(AssertionError, match="shapes or dtypes differ"):
        assert_bitwise_equal(x, x[0])


def test_a_filtered_test_is_not_called(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[int] = []
    wanted = False

    @testing.test_filter(lambda: wanted)
    def check(x: int) -> None:
        called.append(x)

    assert check(1) is None
    assert "check is left out" in capsys.readouterr().out
    wanted = True
    check(2)
    assert called == [2]
    assert check.__name__ == "check"


def test_a_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_SOME", "1")
    seen: list[str | None] = []
    wanted = True

    @ignore_env("DG_SOME", lambda: wanted)
    def check() -> None:
        seen.append(os.environ.get("DG_SOME"))
        if len(seen) == 3:
            raise ValueError

    check()
    wanted = False
    check()
    wanted = True
    with pytest.raises(ValueError):
        check()
    assert seen == [None, "1", None]
    assert os.environ["DG_SOME"] == "1"


def test_scales_of_each_row_of_b_without_a_recipe() -> None:
    """As Transformers gives weights whose scales were E8M0: repeated to (N, K / 128)."""
    m, n, k = 5, 576, 512
    a, b = torch.randn(m, k), torch.randn(n, k)
    (qa, sfa), (qb, sfb) = (per_token_cast_to_fp8(x, use_ue8m0=True) for x in (a, b))
    d, expected = (torch.empty(m, n, dtype=torch.bfloat16) for _ in range(2))
    deep_gemm.fp8_gemm_nt((qa, sfa), (qb, sfb), d)
    deep_gemm.fp8_gemm_nt((qa, sfa), (qb, sfb), expected, recipe=(1, 1, 128))
    assert torch.equal(d, expected)
    assert calc_diff(d, a @ b.t()) < 1e-3
    with pytest.raises(InvalidInputError, match=r"the scales of b must have the shape \(5, 4\)"):
        deep_gemm.fp8_gemm_nt((qa, sfa), (qb, sfb[:-1]), d)


@pytest.mark.parametrize("name", REASONS)
def test_it_exists_and_says_that_it_is_not_there(name: str) -> None:
    function = getattr(deep_gemm, name)
    assert function is getattr(deep_gemm, name)
    assert function.__name__ == name
    with pytest.raises(UnsupportedError, match=f"{name} is not implemented: this version has no "):
        function(1, 2, some="thing")
    assert name not in deep_gemm.__all__


@pytest.mark.parametrize("name", ["get_compile_mode", "set_compile_mode", "no_such_name"])
def test_what_clients_ask_for_by_hasattr_is_absent(name: str) -> None:
    assert not hasattr(deep_gemm, name)


COPY = "vllm/third_party/deep_gemm"
FILES = {
    "vllm/__init__.py": "", "vllm/third_party/__init__.py": "",
    f"{COPY}/__init__.py": "def fp8_gemm_nt(a, b, d): return 'theirs'\n",
    f"{COPY}/utils.py": "def per_block_cast_to_fp8(x): return 'theirs'\n",
    "vllm/by_module.py": "import vllm.third_party.deep_gemm as dg\n",
    "vllm/by_name.py": "from vllm.third_party.deep_gemm import fp8_gemm_nt as _impl\n",
    "vllm/own_utils.py": "from vllm.third_party.deep_gemm.utils import per_block_cast_to_fp8\n",
    "transformers/__init__.py": "", "transformers/integrations/__init__.py": "",
    "transformers/integrations/hub_kernels.py": "_KERNEL_MODULE_MAPPING = {}\n",
    "transformers/integrations/deepgemm.py": "_DEEPGEMM = None\n",
    "old/transformers/__init__.py": "", "old/transformers/integrations/__init__.py": "",
    "old/transformers/integrations/hub_kernels.py": "",
}  # fmt: skip


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(programs: Path, code: str) -> list[str]:
    """The lines that a process prints, and those of its log."""
    start = f"import sys; sys.path.append({str(programs)!r})\nimport deep_gemm\nfrom deep_gemm import compat\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


BEFORE = """
compat.enable()
assert "vllm" not in sys.modules and "torch" not in sys.modules
import vllm.by_module, vllm.by_name, vllm.own_utils, vllm.third_party
"""
AFTER = """
import vllm.by_module, vllm.third_party
compat.enable()
import vllm.by_name, vllm.own_utils
"""
OURS = """
import importlib.util
assert vllm.by_module.dg is vllm.third_party.deep_gemm is sys.modules["vllm.third_party.deep_gemm"] is deep_gemm
assert vllm.by_name._impl is deep_gemm.fp8_gemm_nt
assert vllm.own_utils.per_block_cast_to_fp8 is deep_gemm.utils.per_block_cast_to_fp8
assert importlib.util.find_spec("vllm.third_party.deep_gemm") is not None
assert deep_gemm.__spec__.name == deep_gemm.__name__ == "deep_gemm"
import vllm.third_party.deep_gemm.dense, deep_gemm.dense
assert sys.modules["vllm.third_party.deep_gemm.dense"] is deep_gemm.dense
try:
    import vllm.third_party.deep_gemm.mega
except ModuleNotFoundError as error:
    print(error)
compat.enable()
"""


@pytest.mark.parametrize("order", [BEFORE, pytest.param(AFTER, marks=pytest.mark.long)], ids=["before", "after"])
def test_a_copy_is_ours_and_that_is_said_once(programs: Path, order: str) -> None:
    absent, said = run(programs, order + OURS)
    assert absent == "No module named 'vllm.third_party.deep_gemm.mega'"
    assert said.startswith("deep_gemm in ")
    assert "is in the place of other DeepGEMMs: vllm.third_party.deep_gemm, tensorrt_llm.deep_gemm, tran" in said


def test_what_was_taken_from_a_copy_is_named_and_nothing_changes(programs: Path) -> None:
    code = """
import vllm.by_name, vllm.by_module
theirs, finders = sys.modules["vllm.third_party.deep_gemm"], list(sys.meta_path)
try:
    compat.enable()
except deep_gemm.UnsupportedError as error:
    print(error)
assert sys.modules["vllm.third_party.deep_gemm"] is theirs is vllm.by_module.dg and sys.meta_path == finders
"""
    (line,) = run(programs, code)
    assert "vllm.by_name has taken _impl from vllm.third_party.deep_gemm. What was taken stays. Call" in line
    assert "by_module" not in line


@pytest.mark.parametrize("late", [False, True])
def test_transformers_has_it_as_its_kernel(programs: Path, late: bool) -> None:
    first, second = ("from transformers.integrations import hub_kernels, deepgemm", "compat.enable()")
    lines = (first, second) if late else (second, first)
    code = "\n".join([*lines, "assert hub_kernels._KERNEL_MODULE_MAPPING['deep-gemm'] is deep_gemm"])
    run(programs, code)


@pytest.mark.long
def test_a_kernel_that_transformers_took_and_a_table_that_is_gone_are_told(programs: Path) -> None:
    code = """
from transformers.integrations import deepgemm
class Taken: fp8_fp4_matmul = print
deepgemm._DEEPGEMM = Taken
try:
    compat.enable()
except deep_gemm.UnsupportedError as error:
    print(error)
Taken.fp8_fp4_matmul = staticmethod(deep_gemm.fp8_fp4_gemm_nt)
compat.enable()
"""
    assert "transformers.integrations.deepgemm has taken fp8_fp4_gemm_nt from the kernel of" in run(programs, code)[0]
    code = "compat.enable()\nimport transformers.integrations.hub_kernels"
    assert "hub_kernels keeps no table of kernels: Transformers loads its own" in run(programs / "old", code)[1]


def test_another_package_under_our_name_is_told(programs: Path) -> None:
    code = """
import types
sys.modules["deep_gemm"] = types.ModuleType("deep_gemm")
try:
    compat.enable()
except compat.UnsupportedError as error:
    print(error)
"""
    (line,) = run(programs, code)
    assert line.startswith("deep_gemm is now the package in no directory, and this is the one in /")


@pytest.mark.parametrize("name", clients.CLIENTS)
def test_each_call_of_a_client_is_served_or_refused_in_words(name: str) -> None:
    for call in clients.CLIENTS[name].calls:
        assert hasattr(deep_gemm, call)
        assert (call in deep_gemm.__all__) != (call in REASONS)


def test_doctor_says_what_each_client_gets(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.33.0", "transformers": "5.24.0", "torchao": "0.18"}
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or version(name))
    monkeypatch.setattr(sys, "path", [*sys.path, str(programs)])
    found = {client["name"]: client for client in clients.examine()}
    assert list(found) == ["vllm", "transformers", "torchao"]
    first, second = clients.lines(found["vllm"])
    assert first == (
        "vllm 0.33.0 gets this library, by import deep_gemm; vllm.third_party.deep_gemm is its own until "
        "deep_gemm.compat.enable()"
    )
    assert second == "this library has {0} of the {0} functions that it calls".format(
        len(clients.CLIENTS["vllm"].calls)
    )
    assert "kernels-community/deep-gemm" in clients.lines(found["transformers"])[0]
    assert "fp8_fp4_mega_moe: no fused mixture-of-experts layer" in clients.lines(found["transformers"])[1]
    assert clients.lines(found["torchao"])[0] == "torchao 0.18 gets this library, by import deep_gemm"
    output = CliRunner().invoke(app, ["doctor"]).output
    assert "client     vllm 0.33.0 gets this library" in output

    (programs / "first" / "deep_gemm").mkdir(parents=True)
    (programs / "first" / "deep_gemm" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(programs / "first"), *sys.path])
    assert clients.examine()[2]["gets"] == f"another deep_gemm, {programs / 'first' / 'deep_gemm' / '__init__.py'}"
