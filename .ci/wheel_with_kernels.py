"""Build the wheel that holds compiled kernels, in dist/kernels/. `make wheel-with-kernels` prepares the environment.

The plain wheel is built from the source distribution, as `make dist` does; its own code then compiles the kernels that
`deep_gemm.aot.shipped` lists into a pack inside it. Its build number tells the two wheels apart. Two builds of one
commit, with the same build of NVRTC and the same tools, give the same bytes: files have the time of the commit, or
SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 6_000_000
BUILD_NUMBER = "1kernels"

COMPILE = """
import pathlib, sys
import deep_gemm
from deep_gemm.aot import outcomes, shipped
here, path, root = map(pathlib.Path, sys.argv[1:4])
assert here in pathlib.Path(deep_gemm.__file__).parents, f"{deep_gemm.__file__} is imported, not the wheel in {here}"
found = shipped.write(path, root=root if sys.argv[3] else None, progress=outcomes.printed(10))
print(f"{len(found)} kernels, {path.stat().st_size} bytes")
"""


def run(*command: str | Path, why: str, env: dict[str, str], cwd: Path = ROOT) -> None:
    """Run a command and, if it fails, say why it was needed and end with its status."""
    status = subprocess.run([str(part) for part in command], cwd=cwd, env=env).returncode
    if status:
        print(f"wheel-with-kernels: {' '.join(map(str, command[:4]))} ... failed with status {status}; {why}")
        sys.exit(status)


def epoch() -> str:
    """The time of all files in the wheel, in seconds since 1970."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    try:
        command = ("git", "log", "-1", "--format=%ct")
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # an unpacked source distribution
        return "315532800"  # the first time that a zip file can say


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line. Without --cache no kernels are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), default=ROOT / "dist" / "kernels")
    parser.add_argument(
        "--cache",
        type=lambda text: Path(text).absolute(),
        help="a directory that keeps compiled kernels, so that the next build is faster",
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    start = time.monotonic()
    os.umask(0o022)  # files in the wheel have the modes of those that are unpacked here
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DG_", "PYTHON"))}
    environment = clean | {"SOURCE_DATE_EPOCH": epoch(), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        plain, open_wheel, made = (Path(scratch, name) for name in ("plain", "open", "made"))
        build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", plain)
        run(*build, why="the plain wheel could not be built", env=environment)
        wheel = (sys.executable, "-m", "wheel")
        (built,) = plain.glob("*.whl")
        run(*wheel, "unpack", "--dest", open_wheel, built, why="the plain wheel could not be unpacked", env=environment)
        (content,) = open_wheel.iterdir()
        pack = content / "deep_gemm" / "shipped" / "sm_90a.dgpack"
        pack.parent.mkdir(exist_ok=True)
        compiling = environment | {"PYTHONPATH": str(content), "DG_JIT_CACHE_DIR": str(Path(scratch, "cache"))}
        compiler = (sys.executable, "-c", COMPILE, content, pack, options.cache or "")
        # Not in ROOT, whose deep_gemm would be imported.
        run(*compiler, why="its kernels could not be compiled", env=compiling, cwd=Path(scratch))
        made.mkdir()
        packing = ("pack", "--dest-dir", made, "--build-number", BUILD_NUMBER, content)
        run(*wheel, *packing, why="the wheel could not be written", env=environment)
        (found,) = made.glob("*.whl")
        if (size := found.stat().st_size) > MOST_BYTES:
            sys.exit(
                f"wheel-with-kernels: {found.name} has {size} bytes, but {MOST_BYTES} is the limit. Ship fewer kernels."
            )
        shutil.rmtree(options.out, ignore_errors=True)
        options.out.mkdir(parents=True)
        shutil.copy(found, options.out)
    took = time.monotonic() - start
    print(f"wheel-with-kernels: {options.out / found.name}: {size / 1e6:.2f} MB in {took / 60:.1f} minutes")


if __name__ == "__main__":
    main()
