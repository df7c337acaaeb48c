"""Packs from end to end, in real processes: built without a GPU, used without a compiler and under another path."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from containers import read_only

from deep_gemm.settings import child_environment

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "static_wheel"

# The start of a service. It needs no GPU until cubins are loaded.
USE = """
import json, sys
from pathlib import Path
import deep_gemm
from deep_gemm.aot import build, workload
from deep_gemm.jit.builder import default_builder
summary = build.precompile(workload.shapes_of(Path(sys.argv[1])), jobs=2)
print(json.dumps({
    "home": deep_gemm.__path__[0],
    "layers": sorted({outcome.binary.layer if outcome.binary else str(outcome.error) for outcome in summary.outcomes}),
    "cubins": {outcome.name: outcome.binary.cubin.hex()[:8] for outcome in summary.outcomes if outcome.binary},
    "stats": default_builder().stats,
    "packs": deep_gemm.cache_info()["packs"],
    "rendered": "jinja2" in sys.modules,
}))
"""


def install(source: Path, target: Path) -> Path:
    """`pip install --target` of a copy of a project's tree, without the network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", target, source], check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """This project, installed in one place, and a copy of that in another."""
    pytest.importorskip("setuptools")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the sources are not here")
    scratch = tmp_path_factory.mktemp("prefixes")
    for name in ("deep_gemm", "jit", "templates"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, scratch / "sources" / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, scratch / "sources")
    first = install(scratch / "sources", scratch / "one" / "lib")
    second = scratch / "another" / "deeper" / "site"
    shutil.copytree(first, second)
    return first, second


def python(
    *arguments: str | Path, path: list[Path], bare: bool = False, before: Sequence[str] = (), **environment: str | Path
) -> str:
    """Run a Python with `path` first in its module search path. `bare`: without other environment variables. `before`:
    a command prefix."""
    inherited = {} if bare else child_environment("PYTHONPATH", "DG_JIT_CACHE_DIR", "DG_JIT_PRECOMPILED")
    env = {**inherited, "PYTHONPATH": os.pathsep.join(map(str, path)), **{k: str(v) for k, v in environment.items()}}
    cwd = environment.get("PWD", path[0])
    done = subprocess.run(
        [*before, sys.executable, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def use(shapes: Path, path: list[Path], **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(python("-c", USE, shapes, path=path, **options).splitlines()[-1])
    return answer


def test_a_pack_made_without_a_gpu_in_one_prefix_serves_another(prefixes: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = prefixes
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([{"n": 576, "k": 7168, "m": [16]}]))
    pack = tmp_path / "built" / "sm_90a.dgpack"
    pack.parent.mkdir()
    command = ["-m", "deep_gemm", "precompile", "--file", str(shapes), "--pack", str(pack)]
    python(
        *command, path=[first], DG_JIT_CACHE_DIR=tmp_path / "cache one", DG_JIT_USE_NVRTC="1", CUDA_VISIBLE_DEVICES=""
    )
    forbidden = {"DG_JIT_FORBID_COMPILE": "1", "DG_JIT_NVCC_COMPILER": "/nonexistent"}
    found = use(shapes, [second], DG_JIT_CACHE_DIR=tmp_path / "cache two", DG_JIT_PRECOMPILED=pack, **forbidden)
    assert Path(found["home"]) == second / "deep_gemm"
    assert found["layers"] == ["pack"]
    assert (found["stats"]["compiled"], found["stats"]["misses"]) == (0, 0)
    assert found["stats"]["pack"] == len(found["cubins"]) == found["packs"][0]["kernels"] > 1
    assert not (tmp_path / "cache two").exists()
    # Without the pack the same process fails, so the kernels came from the pack.
    without = use(shapes, [second], DG_JIT_CACHE_DIR=tmp_path / "cache two", **forbidden)
    assert all("DG_JIT_FORBID_COMPILE forbids" in layer for layer in without["layers"])


@pytest.fixture(scope="module")
def with_wheel(prefixes: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's wheel, built with one installation of this project and installed into a separate directory."""
    scratch = tmp_path_factory.mktemp("wheel")
    shutil.copytree(EXAMPLE, scratch / "sources")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", scratch]
    # Without a GPU, as build machines are.
    settings = {"DG_JIT_CACHE_DIR": scratch / "cache", "DG_JIT_USE_NVRTC": "1", "CUDA_VISIBLE_DEVICES": ""}
    python(*command, scratch / "sources", path=[prefixes[0]], **settings)
    (wheel,) = scratch.glob("*.whl")
    return install(wheel, scratch / "installed")


def served(found: dict[str, Any], site: Path, prefix: Path) -> None:
    assert Path(found["home"]) == prefix / "deep_gemm"
    assert found["layers"] == ["pack"]
    assert not found["rendered"], "the pack's sources save importing Jinja"
    assert (found["stats"]["compiled"], found["stats"]["misses"]) == (0, 0)
    (pack,) = found["packs"]
    assert pack["path"] == str(site / "gemm_kernels" / "sm_90a.dgpack")
    assert (pack["by"], pack["problem"]) == ("package gemm_kernels", None)
    assert pack["kernels"] == found["stats"]["pack"] > 2


def test_a_wheel_carries_its_kernels(with_wheel: Path, prefixes: tuple[Path, Path], tmp_path: Path) -> None:
    settings = {"DG_JIT_FORBID_COMPILE": "1", "DG_JIT_NVCC_COMPILER": "/nonexistent"}
    found = use(EXAMPLE / "shapes.json", [with_wheel, prefixes[1]], DG_JIT_CACHE_DIR=tmp_path / "cache", **settings)
    served(found, with_wheel, prefixes[1])


def test_a_wheel_serves_a_bare_container(with_wheel: Path, prefixes: tuple[Path, Path], tmp_path: Path) -> None:
    """There is no HOME and no PATH, and neither the current directory nor the cache directory can be written."""
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    (read_only / "cache").mkdir(mode=0o500)
    read_only.chmod(0o500)
    settings = {"DG_JIT_FORBID_COMPILE": "1", "DG_JIT_NVCC_COMPILER": "/nonexistent", "PWD": str(read_only)}
    path = [with_wheel, prefixes[1]]
    found = use(EXAMPLE / "shapes.json", path, bare=True, DG_JIT_CACHE_DIR=read_only / "cache", **settings)
    read_only.chmod(0o700)
    served(found, with_wheel, prefixes[1])
    # Nothing was written, even by root, who may write anywhere.
    assert list((read_only / "cache").iterdir()) == []
    assert [path.name for path in read_only.iterdir()] == ["cache"]


def test_a_wheel_serves_where_the_whole_root_is_read_only(
    with_wheel: Path, prefixes: tuple[Path, Path], tmp_path: Path
) -> None:
    """As in a container that was started with --read-only and without mounts."""
    before = read_only(tmp_path)
    settings = {"DG_JIT_FORBID_COMPILE": "1", "DG_JIT_NVCC_COMPILER": "/nonexistent", "PWD": str(tmp_path)}
    path = [with_wheel, prefixes[1]]
    served(use(EXAMPLE / "shapes.json", path, bare=True, before=before, **settings), with_wheel, prefixes[1])
    assert list(tmp_path.iterdir()) == []
