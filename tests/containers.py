"""Processes that can write nowhere, as in a container whose root filesystem is read-only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

# In a namespace of its own a process may remount what it sees: the root, and what is mounted below it but for the
# kernel's own, which container runtimes leave writable too (a driver cannot be used otherwise).
_REMOUNT = """
while read -r _ at _; do
  case "$at" in
    /dev | /dev/* | /proc | /proc/* | /sys | /sys/*) ;;
    *) mount -o remount,bind,ro "$at" 2>/dev/null ;;
  esac
done < /proc/mounts
exec "$@"
"""
_NAMESPACE = ("--mount", "--map-root-user", "sh", "-c", _REMOUNT, "sh")


def read_only(writable: Path) -> list[str]:
    """What to put before a command so that it runs where no file can be written, not by root either. Skips the test
    where that cannot be had: `writable`, a directory of the test's, is tried, and where programs write by habit."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    prefix = [unshare, *_NAMESPACE]
    for place in (writable, Path("/"), Path("/tmp"), Path.home()):
        tried = place / "written by a test of deep_gemm"
        outcome = subprocess.run([*prefix, "touch", tried], capture_output=True, text=True, timeout=60, check=False)
        if outcome.returncode == 0:
            tried.unlink()
        if "Read-only file system" not in outcome.stderr and place.exists():
            pytest.skip(f"no namespace with a read-only root can be had here: {outcome.stderr.strip() or place}")
    return prefix
