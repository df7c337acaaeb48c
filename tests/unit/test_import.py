"""Importing is light and complete, and touches neither files, environment nor GPU."""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import deep_gemm
from deep_gemm.settings import child_environment

ROOT = Path(__file__).resolve().parents[2]


def child(code: str, *options: str, **environment: str) -> str:
    env = child_environment("HOME", "CUDA_HOME", "CUDA_PATH") | environment
    done = subprocess.run([sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_each_public_name_leads_to_what_its_import_names() -> None:
    """For type checkers a name that is imported "as" itself is public; here it is the one list of names."""
    names = deep_gemm.__all__
    assert len(names) == len(set(names)) > 100
    for name in names:
        module = deep_gemm._modules()[name]
        place = importlib.import_module(f"deep_gemm.{module}" if module else f"deep_gemm.{name}")
        assert getattr(deep_gemm, name) is (getattr(place, name) if module else place)
    assert not {"TYPE_CHECKING", "Any", "importlib", "Mapping"} & set(names)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deep_gemm.nothing  # noqa: B018


def test_dir_shows_what_is_public() -> None:
    shown = {name for name in dir(deep_gemm) if not name.startswith("__")}
    assert shown == set(deep_gemm.__all__)


def test_names_and_modules_do_not_hide_one_another_and_a_process_may_fork_afterwards() -> None:
    code = """
import deep_gemm.aot.build, deep_gemm.aot.distributed, deep_gemm.settings, deep_gemm.testing, deep_gemm.utils
import deep_gemm
from deep_gemm import precompile, settings
assert callable(deep_gemm.precompile) and deep_gemm.precompile is precompile is deep_gemm.aot.build.precompile
assert type(deep_gemm.settings).__name__ == "Settings" and settings is deep_gemm.settings
import os, torch
pid = os.fork()
if pid == 0:
    a, b = torch.ones(4, 128), torch.ones(128, 128)
    d = torch.zeros(4, 128, dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(deep_gemm.per_token_cast_to_fp8(a, False), deep_gemm.per_block_cast_to_fp8(b, False), d)
    os._exit(0 if bool((d == 128).all()) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    child(code)


def test_importing_the_package_alone_needs_no_torch() -> None:
    child("import sys, deep_gemm\nfrom deep_gemm import InvalidInputError, settings\nassert 'torch' not in sys.modules")


def test_the_old_places_lead_to_the_same_functions() -> None:
    from deep_gemm.testing import bench, bench_kineto, calc_diff, count_bytes, get_arch_major
    from deep_gemm.utils import align, ceil_div, per_block_cast_to_fp8, per_token_cast_to_fp8
    from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor, get_tma_aligned_size
    from deep_gemm.utils.math import per_channel_cast_to_fp8, per_custom_dims_cast_to_fp8

    assert all(callable(f) for f in (bench, bench_kineto, calc_diff, count_bytes, get_arch_major))
    assert align is deep_gemm.align
    assert ceil_div is deep_gemm.ceil_div
    assert per_block_cast_to_fp8 is deep_gemm.per_block_cast_to_fp8
    assert per_token_cast_to_fp8 is deep_gemm.per_token_cast_to_fp8
    assert per_channel_cast_to_fp8 is deep_gemm.per_channel_cast_to_fp8
    assert per_custom_dims_cast_to_fp8 is deep_gemm.per_custom_dims_cast_to_fp8
    assert get_mn_major_tma_aligned_tensor is deep_gemm.get_mn_major_tma_aligned_tensor
    assert get_tma_aligned_size is deep_gemm.get_tma_aligned_size


def test_the_version_is_that_of_the_distribution() -> None:
    assert deep_gemm.__version__ == importlib.metadata.version("deep-gemm-jit")


def test_importing_is_light_and_touches_no_environment_disk_or_process(tmp_path: Path) -> None:
    """For the number of modules see test_budgets.py."""
    code = f"""
import os, sys, torch
before = set(sys.modules)

class Watched(dict):
    def __getitem__(self, key): raise AssertionError("read of " + repr(key))
    get = __contains__ = __getitem__

def hook(event, args):
    if event == "open" and isinstance(args[0], str) and not args[0].endswith((".py", ".pyc")):
        # Looking into directories on the path for modules is what an import is.
        raise AssertionError(f"opened {{args[0]}}")
    if event.startswith(("subprocess", "os.exec", "os.posix_spawn", "os.mkdir", "os.remove", "ctypes.dlopen")):
        raise AssertionError(f"{{event}} {{args}}")

sys.dont_write_bytecode = True
sys.addaudithook(hook)
environ, os.environ = os.environ, Watched()
import deep_gemm
for name in set(deep_gemm.__all__) - {{"precompile", "testing"}}:
    getattr(deep_gemm, name)
heavy = {{"jinja2", "cuda", "platformdirs", "click", "rich", "matplotlib", "yaml", "triton", "pytest"}}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert not new & heavy, new & heavy
assert not torch.cuda.is_initialized()
from deep_gemm import *
os.environ = environ
assert os.listdir({str(tmp_path)!r}) == []
"""
    child(code, HOME=str(tmp_path))


@pytest.mark.parametrize("way", ["example", pytest.param("doctor", marks=pytest.mark.long)])
def test_python_started_in_a_checkout_needs_no_editable_install(way: str, tmp_path: Path) -> None:
    """-S, and packages by PYTHONPATH: no .pth file is read, so that no editable install helps."""
    for name in ("deep_gemm", "jit", "templates"):
        (tmp_path / name).symlink_to(ROOT / name)
    example = (ROOT / "README.md").read_text().split("<!-- example:begin -->\n```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(f"{example}print(deep_gemm.__file__, deep_gemm.jit.__file__)\n")
    command = {"example": ["example.py"], "doctor": ["-m", "deep_gemm", "doctor", "--json"]}[way]
    packages = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    env = child_environment("HOME", "CUDA_HOME", "CUDA_PATH") | {"PYTHONPATH": packages}
    done = subprocess.run([sys.executable, "-S", *command], cwd=tmp_path, env=env, capture_output=True, text=True)
    if way == "example":
        assert done.stdout.split() == [str(tmp_path / name / "__init__.py") for name in ("deep_gemm", "jit")], done
    else:
        assert json.loads(done.stdout)["package"]["path"] == str(tmp_path / "deep_gemm"), done


def test_a_zip_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    package = Path(deep_gemm.__file__ or "").parent
    with zipfile.ZipFile(tmp_path / "deep_gemm.zip", "w") as archive:
        for path in package.glob("*.py"):
            archive.write(path, f"deep_gemm/{path.name}")
    code = f"""
import sys
import zipfile
sys.path.insert(0, {str(tmp_path / "deep_gemm.zip")!r})
try:
    import deep_gemm
except ImportError as error:
    assert str(error).endswith("Unpack it, or install it with pip."), error
else:
    raise AssertionError(deep_gemm.__file__)
"""
    child(code)


@pytest.mark.parametrize("closed", ["sys.stderr.close()", "sys.stderr = None", "os.close(2)"])
def test_what_a_setting_prints_needs_no_stderr(closed: str, tmp_path: Path) -> None:
    code = f"""
import os, sys
from deep_gemm.log import say
{closed}
say("hello")
open({str(tmp_path / "done")!r}, "w").close()
os._exit(0)
"""
    child(code)
    assert (tmp_path / "done").exists()
