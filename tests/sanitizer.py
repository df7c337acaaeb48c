"""`make sanitize`: `sanitize.py` under compute-sanitizer. memcheck and racecheck must report nothing, and racecheck
must report each race that is added on purpose."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from racecheck_headers import RACES

PACKAGE = "nvidia-cuda-sanitizer-api"
REPORTED = 9
"""The exit status of compute-sanitizer if it reported anything."""


def tool() -> Path:
    """The compute-sanitizer of the installed package: the one of CUDA 13.0 reports false races, since it does not
    follow some waits."""
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here, and compute-sanitizer needs one: run `make sanitize` where there is one.")
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-2:] == ("bin", "compute-sanitizer"):
            return Path(str(file.locate()))
    sys.exit(f"The package {PACKAGE} is not installed here: run `make sanitize`, which installs it, or pip install it.")


def ends(sanitizer: Path, kind: str, *arguments: str) -> int:
    """The exit status of `sanitize.py` under a tool of compute-sanitizer's."""
    program = [sys.executable, str(Path(__file__).with_name("sanitize.py")), *arguments]
    command = [str(sanitizer), "--tool", kind, "--report-api-errors", "no", "--error-exitcode", str(REPORTED), *program]
    print(f"{kind}: sanitize.py {' '.join(arguments)}".rstrip(), flush=True)
    # torch's caching allocator would hide accesses out of bounds.
    return subprocess.run(command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).returncode


def failures(sanitizer: Path) -> list[str]:
    """What failed, a sentence each."""
    found = []
    for kind, arguments in (("memcheck", ()), ("racecheck", ("--racecheck",))):
        if status := ends(sanitizer, kind, *arguments):
            found.append(f"{kind} ended with {status} instead of 0: see its report above.")
    for race in RACES:
        if (status := ends(sanitizer, "racecheck", "--race", race)) != REPORTED:
            found.append(f"racecheck ended with {status} on the race {race!r}: it must report it ({REPORTED}).")
    return found


if __name__ == "__main__":
    wrong = failures(tool())
    print("\n".join(wrong) or f"memcheck and racecheck report nothing, but each of {len(RACES)} races on purpose.")
    sys.exit(bool(wrong))
