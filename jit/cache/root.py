"""Where the disk cache is, and whether it is safe to use."""

from __future__ import annotations

import os
from pathlib import Path

from deep_gemm.jit.cache.files import Folder, LinkError, UnsafeError, absolute
from deep_gemm.jit.forking import late
from deep_gemm.settings import settings


def default_root() -> Path | None:
    """DG_JIT_CACHE_DIR, else ~/.deep_gemm, else platformdirs' cache directory where there is no home, else None."""
    named = settings.cache_dir
    if named is not None:
        return absolute(named)
    try:
        home = Path.home()
        if home.is_absolute() and home.is_dir():
            return home / ".deep_gemm"
    except (RuntimeError, OSError):
        pass
    try:
        root = Path(late("platformdirs").user_cache_dir("deep_gemm", appauthor=False))
    except (RuntimeError, OSError, KeyError):
        return None
    return root if root.is_absolute() else None


def open_root(root: str | Path, trust: bool) -> Folder:
    """The root, opened and checked. Raises FileNotFoundError if there is none, and UnsafeError if it must not be used:
    its text says why and what to do about it.

    A cubin is code. Whoever can write to the root can run code in this process, so nobody but this user or root may.
    """
    try:
        return Folder.open(root, trust)
    except LinkError as error:
        link = os.path.islink(root)
        problem = f"{root} is not a directory; set DG_JIT_CACHE_DIR to one"
        if link and not trust:
            problem = f"{root} is a symbolic link; give the directory that it points to, or {_TRUST}"
        raise UnsafeError(problem) from error
    except UnsafeError as error:
        raise UnsafeError(f"{error}, or {_TRUST}") from error
    except FileNotFoundError as error:
        if os.path.islink(root):
            raise UnsafeError(f"{root} is a symbolic link that points nowhere; create its target") from error
        raise
    except PermissionError as error:
        raise UnsafeError(
            f"user {os.geteuid()} cannot read {root}; set DG_JIT_CACHE_DIR to another directory, or let its owner run "
            "`chmod -R go+rX` on it"
        ) from error
    except OSError as error:
        raise UnsafeError(f"{root} cannot be examined: {error}") from error


def root_problem(root: str | Path, trust: bool) -> str | None:
    """Why `root` must not be used: a sentence that says what to do about it. None if it may be, or does not exist."""
    try:
        with open_root(root, trust):
            return None
    except FileNotFoundError:
        return None
    except UnsafeError as error:
        return str(error)


_TRUST = "set DG_JIT_TRUST_CACHE_DIR=1 if you trust everybody who can write there"
