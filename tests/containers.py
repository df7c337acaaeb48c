"""Processes that cannot write anywhere, as in a container with a read-only root filesystem."""

import shutil
import subprocess
from pathlib import Path

import pytest

# In its own namespace a process may remount the root and all mounts below it. /dev, /proc and /sys stay writable, as in
# container runtimes, since a driver needs them.
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
    """The command prefix under which nothing, not even root, can write a file. Tries it in `writable`, a directory of
    the test, in /, /tmp and the home directory, and skips the test if it does not work."""
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
