"""Make the virtual environment that `make` works in. Standard library only, since nothing is installed yet.

Where the Python that runs this already has a CUDA build of torch, its packages are shared and only what is missing is
installed: replacing a working CUDA torch costs gigabytes and may not fit the driver. If nothing is missing, no index is
asked, so it also works offline. Otherwise torch comes from constraints.txt.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# requirement -> how to see that it is there, any one of: a module, "file:" and a pattern in a directory of packages,
# "tool:" and a program. tests/unit/test_repository.py compares the requirements with pyproject.toml.
BASE = {
    "torch>=2.7": ("torch",),
    "cuda-python>=12.9,<14": ("cuda.bindings.driver",),
    "nvidia-cuda-nvrtc-cu12>=12.3": ("file:nvidia/*/lib/libnvrtc.so.*",),
    "jinja2>=3.1.6": ("jinja2",),
    "platformdirs>=4": ("platformdirs",),
}
TEST = {
    "pytest>=8": ("pytest",),
    "hypothesis>=6.100": ("hypothesis",),
    "numpy>=1.26": ("numpy",),
    "nvidia-cuda-nvdisasm": ("tool:nvdisasm", "tool:cuobjdump", "file:nvidia/*/bin/nvdisasm"),
    "pyyaml>=6": ("yaml",),
    "click>=8.1": ("click",),
    "rich>=13": ("rich",),
    "safetensors>=0.4": ("safetensors",),
}
LINT = {
    "ruff>=0.9": ("ruff",),
    "mypy>=1.15": ("mypy",),
    "types-PyYAML": ("yaml-stubs",),
}
DOCS = {
    "sphinx>=8.1": ("sphinx",),
    "myst-parser>=4": ("myst_parser",),
    "furo>=2024.8": ("furo",),
    "matplotlib>=3.8": ("matplotlib",),
}
DIST = {"build>=1.2": ("build.__main__",), "twine>=6.1": ("twine",)}
XDIST = {"pytest-xdist>=3.6": ("xdist",)}
SANITIZE = {"nvidia-cuda-sanitizer-api>=13.5": ("file:nvidia_cuda_sanitizer_api-13.[5-9]*.dist-info",)}
BUILD = {"setuptools>=68": ("setuptools",), "wheel": ("wheel",)}

PROBE = """
import importlib.util, pathlib, shutil, sys
def there(name):
    kind, _, rest = name.rpartition(":")
    if kind == "file":
        return any(any(pathlib.Path(entry).glob(rest)) for entry in sys.path if entry)
    if kind == "tool":
        return shutil.which(rest) is not None or pathlib.Path("/usr/local/cuda/bin", rest).exists()
    try:
        return importlib.util.find_spec(rest) is not None
    except ImportError:
        return False
for line in sys.stdin.read().splitlines():
    requirement, ways = line.split("|")
    if not any(there(way) for way in ways.split(",")):
        print(requirement)
"""


def run(*command: str | Path, why: str) -> None:
    """Run a command and, if it fails, say why it was needed and end with its status."""
    result = subprocess.run([str(part) for part in command], cwd=ROOT)
    if result.returncode:
        print(f"bootstrap: {' '.join(map(str, command))}\nbootstrap: failed with status {result.returncode}; {why}")
        sys.exit(result.returncode)


def cuda_torch() -> str | None:
    """The version of a CUDA build of torch in the Python that runs this, or None; also None if it is too old for us."""
    code = (
        "import torch; new = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 7); "
        "print(torch.__version__ if torch.version.cuda and new else '')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    return result.stdout.strip() or None if result.returncode == 0 else None


def has_gpu() -> bool:
    """Whether an NVIDIA device node is there. Cheap on purpose: it only chooses which torch to install."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))


def create(directory: Path, shared: bool) -> Path:
    """Create the environment if it is not there, and return its Python."""
    python = directory / "bin" / "python"
    if not python.exists():
        # A distribution's Python may come without ensurepip; a shared one then lends its own pip.
        try:
            venv.create(directory, system_site_packages=shared, with_pip=True)
        except subprocess.CalledProcessError:
            venv.create(directory, system_site_packages=shared, with_pip=False, clear=True)
    if shared and sys.prefix != sys.base_prefix:
        # The Python that runs this is itself a virtual environment: "system" would mean the one below it.
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        lines = [f"import site; site.addsitedir({path!r})" for path in paths]
        Path(own.stdout.strip(), "_shared.pth").write_text("\n".join(lines) + "\n")
    return python


def missing(python: Path, wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """The requirements that cannot be found from the environment's Python."""
    lines = "\n".join(f"{requirement}|{','.join(ways)}" for requirement, ways in wanted.items())
    result = subprocess.run([python, "-c", PROBE], input=lines, capture_output=True, text=True, cwd="/", check=True)
    return result.stdout.split("\n")[:-1]


def install_project(python: Path, mode: str) -> None:
    """Install this project: editable, or as the wheel that users get."""
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    if mode == "editable":
        run(*pip, "-e", ROOT, why="the project could not be installed from its sources")
        return
    # From a copy: a build directory left in the tree would pack files that were deleted since.
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("deep_gemm", "jit", "templates"):
            shutil.copytree(ROOT / name, Path(scratch, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, scratch)
        run(*pip, "--force-reinstall", scratch, why="the project's wheel could not be built or installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=lambda text: Path(text).absolute(), default=ROOT / ".venv")
    parser.add_argument("--mode", choices=("editable", "wheel"), default="editable")
    parser.add_argument("--lint", action="store_true", help="also install the linter and the type checker")
    parser.add_argument("--docs", action="store_true", help="also install what builds the documentation and its charts")
    parser.add_argument("--dist", action="store_true", help="also install what builds and checks distributions")
    parser.add_argument("--xdist", action="store_true", help="also install pytest-xdist, to run tests side by side")
    parser.add_argument("--sanitizer", action="store_true", help="also install compute-sanitizer, for make sanitize")
    options = parser.parse_args()

    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        found = sys.version.split()[0]
        sys.exit(f"bootstrap: Python 3.10 to 3.13 is needed, this is {found}. Name another one: make PYTHON=python3.12")
    torch = cuda_torch()
    python = create(options.venv, shared=torch is not None)
    groups = BASE | TEST | BUILD | (LINT if options.lint else {})
    groups |= (DOCS if options.docs else {}) | (DIST if options.dist else {})
    groups |= (XDIST if options.xdist else {}) | (SANITIZE if options.sanitizer else {})
    wanted = missing(python, groups)
    if wanted:
        constraint = options.venv / "constraints.txt"
        if torch:
            constraint.write_text(f"torch=={torch}\n")
        else:
            constraint.write_text("" if has_gpu() else (ROOT / "constraints.txt").read_text())
        print(f"bootstrap: installing {', '.join(wanted)}", flush=True)
        pip = (python, "-m", "pip", "install", "--quiet", "--constraint", constraint)
        run(*pip, *wanted, why="these packages are missing here, and pip's index did not give them")
    install_project(python, options.mode)
    origin = f"shares torch {torch} of {sys.executable}" if torch else "has its own torch"
    print(f"bootstrap: {options.venv} is ready ({options.mode} install, {origin})")


if __name__ == "__main__":
    main()
