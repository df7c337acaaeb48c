"""The filesystem calls of a warm start, counted in a new process: they must stay few."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler

from deep_gemm import arch, kernels, ops, select
from deep_gemm.jit import Builder, include_dir, template_dir
from deep_gemm.jit.binary import packed
from deep_gemm.jit.cache import pack as packs
from deep_gemm.jit.cache import solid_writer
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.runtime import engine
from deep_gemm.select import calibration

# Cases of one kernel family; the first includes what a process does once.
FAMILY = "sm90_fp8_gemm"
START = """
import json, os, sys
from pathlib import Path
from jit_fakes import FakeCompiler
from deep_gemm import kernels
from deep_gemm.runtime import engine
from deep_gemm.jit import Builder
from deep_gemm.jit.cache.packs import Packs

root, packs = Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]]
build = Builder(root, FakeCompiler(), packs=Packs(packs))
engine.default_builder = lambda: build
cases = kernels.get("sm90_fp8_gemm").cases()
first = engine.build(cases[0]).layer

seen = []
def hook(event, arguments):
    if event == "open" or event in ("os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.utime"):
        seen.append((event, str(arguments[0])))
def counted(name):
    real = getattr(os, name)
    def call(path, *rest, **named):
        seen.append((name, str(path)))
        return real(path, *rest, **named)
    setattr(os, name, call)
real_read = os.read
def read(descriptor, size):
    seen.append(("read", [size, os.fstat(descriptor).st_size]))
    return real_read(descriptor, size)

sys.addaudithook(hook)
counted("stat"), counted("lstat"), setattr(os, "read", read)
second = engine.build(cases[1]).layer
print(json.dumps([first, second, seen]))
"""

FIRST = """
import json, os, sys
from pathlib import Path

import deep_gemm
deep_gemm.fp8_gemm_nt
from deep_gemm import arch, ops, select
from deep_gemm.jit import Builder
from deep_gemm.jit.cache.packs import Packs
from deep_gemm.runtime import engine
from deep_gemm.select import calibration

build = Builder(Path(sys.argv[1]), packs=Packs([Path(sys.argv[2])]))
engine.default_builder = lambda: build
asked = ops.spec(64, 7168, 2048, 132, "fp8_gemm_nt")
known, opened, stats = set(sys.modules), [], []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
stat = os.stat
os.stat = lambda path, *rest, **named: (stats.append(str(path)), stat(path, *rest, **named))[1]
choice = select.select(asked, arch.SM90, calibration.for_device(sys.argv[3], 132, 3350.0))
layer = engine.build(engine.kernel_params(asked, choice.config, arch.SM90)).layer
print(json.dumps([layer, sorted(set(sys.modules) - known), opened, stats]))
"""


@pytest.mark.parametrize("device", [pytest.param("NVIDIA H100 80GB HBM3", marks=pytest.mark.long), "NVIDIA H200"])
def test_a_first_choice_and_its_kernel_import_little_and_read_each_file_once(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import takes 0.3 ms and more, and a file 0.05 ms, of the first call of a process whose kernels are packed. The
    H200's file lacks the speed of some products: the H100's is scaled to it by the spec sheets."""
    build = Builder(tmp_path / "root", FakeCompiler(), packs=Packs([]))
    monkeypatch.setattr(engine, "default_builder", lambda: build)
    asked = ops.spec(64, 7168, 2048, 132, "fp8_gemm_nt")
    config = select.select(asked, arch.SM90, calibration.for_device(device, 132, 3350.0)).config
    params = engine.kernel_params(asked, config, arch.SM90)
    pack = tmp_path / "a.dgpack"
    solid_writer.write(pack, [[packed(engine.build(params), engine.build_request(params))]])
    command = [sys.executable, "-c", FIRST, str(tmp_path / "none"), str(pack), device]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    layer, new, opened, stats = json.loads(done.stdout)
    scales = device == "NVIDIA H200"
    assert (layer, new) == ("pack", ["deep_gemm.select.sheets"] if scales else [])
    # The pack's table, and its kernel.
    assert {path: count for path, count in Counter(opened).items() if count > 1} == {str(pack): 2}
    own = [path for path in stats if path in own_files()]
    assert len(own) == len(set(own)) > 20
    calibrations = {Path(path).stem for path in opened if path.endswith(".json")}
    assert calibrations == {"nvidia_h100_80gb_hbm3"} | ({"nvidia_h200"} if scales else set())


def second_hit(root: Path, *packs: Path) -> tuple[list[str], list[tuple[str, Any]]]:
    """The layers of the first two kernels of a new process, and the filesystem calls (call, path) of the second."""
    command = [sys.executable, "-c", START, str(root), *map(str, packs)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1], timeout=120
    )
    first, second, seen = json.loads(done.stdout)
    return [first, second], [(name, what) for name, what in seen]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two kernels and their sources."""
    build = Builder(tmp_path / "root", FakeCompiler(), packs=Packs([]))
    monkeypatch.setattr(engine, "default_builder", lambda: build)
    assert [engine.build(case).layer for case in kernels.get(FAMILY).cases()[:2]] == ["compiled", "compiled"]
    return tmp_path / "root"


def looked_at(seen: list[tuple[str, Any]]) -> Counter[str]:
    return Counter(what for name, what in seen if name == "stat")


def own_files() -> set[str]:
    """Templates, their directory and headers: a change of any of them has to be seen."""
    names = [*template_dir().iterdir(), *include_dir().iterdir()]
    return {str(template_dir())} | {str(path) for path in names if path.suffix in (".jinja", ".cuh")}


def test_a_kernel_on_disk_takes_four_files_and_one_look_at_each_header(stored: Path) -> None:
    """No more is read than a file holds: os.read() allocates the size that it is given, and a limit of 1 GB meant a
    mapping of 1 GB for each file."""
    layers, seen = second_hit(stored)
    sizes = [what for name, what in seen if name == "read"]
    assert len(sizes) == 4
    assert all(asked == held + 1 for asked, held in sizes)
    assert layers == ["disk", "disk"]
    opened = [Path(what).name for name, what in seen if name == "open"]
    # The rendered source and the entry; each directory on the way is opened once, since it is checked after opening.
    assert opened[:2] == ["root", "rendered"]
    assert len(opened[2]) == 40
    assert opened[3:5] == ["root", "sm_90a"]
    assert [name.partition("-")[0] for name in opened[5:7]] == ["cuda", "driver"]
    assert opened[7].startswith("fp8_gemm_")
    assert opened[8:] == ["kernel.json", "kernel.cu", "kernel.cubin"]
    assert {name for name, _ in seen} == {"open", "stat", "read"}
    found = looked_at(seen)
    assert set(found.values()) == {1}
    assert found.keys() <= own_files()


def test_a_kernel_in_a_pack_takes_its_two_members_and_nothing_of_the_root(tmp_path: Path, stored: Path) -> None:
    pack = tmp_path / "a.dgpack"
    made = [(engine.build(case), engine.build_request(case)) for case in kernels.get(FAMILY).cases()[:2]]
    packs.write(pack, [packed(binary, asked) for binary, asked in made])
    layers, seen = second_hit(stored, pack)
    assert layers == ["pack", "pack"]
    assert [what for name, what in seen if name == "open"] == [str(pack)] * 2
    assert {name for name, _ in seen} == {"open", "stat"}
    found = looked_at(seen)
    assert set(found.values()) == {1}
    assert found.keys() <= own_files()
