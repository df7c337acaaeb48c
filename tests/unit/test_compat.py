"""In the place of other programs' DeepGEMMs, before and after they are imported. Fake packages stand in for them."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import deep_gemm
from deep_gemm.cli import clients
from deep_gemm.cli.app import app
from deep_gemm.unsupported import REASONS

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
