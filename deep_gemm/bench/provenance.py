"""The origin of a number: the sources, the device, the driver and the versions that it was measured with."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import subprocess
from pathlib import Path

_SUFFIXES = (".py", ".cuh", ".jinja", ".json")


def source_digest() -> str:
    """A short digest of the package's sources, device code included, this one excluded; the same for the wheel built
    from it."""
    digest = hashlib.sha256()
    for package in ("deep_gemm", "deep_gemm.jit", "deep_gemm.templates"):
        root = Path(next(iter(importlib.import_module(package).__path__)))
        # In a wheel jit and templates lie inside deep_gemm.
        nested = {"bench", "jit", "templates"} if package == "deep_gemm" else set()
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.suffix in _SUFFIXES and relative.parts[0] not in nested:
                digest.update(f"{package}/{relative.as_posix()}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def driver_version() -> str:
    """The display driver's version, such as "580.159.04"; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.split("\n")[0].strip() if result.returncode == 0 else ""


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def environment() -> dict[str, str]:
    """Device, driver, versions, date and source digest: the fields that every recorded row carries."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver_version(),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "date": today(),
        "source_digest": source_digest(),
    }
