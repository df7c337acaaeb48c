"""Where the disk cache is, and whether it is safe to use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deep_gemm.settings import settings


def default_root() -> Path | None:
    """DG_JIT_CACHE_DIR, else ~/.deep_gemm, else platformdirs' cache directory where there is no home, else None."""
    named = settings.cache_dir
    if named is not None:
        return named.absolute()
    try:
        home = Path.home()
        if home.is_absolute() and home.is_dir():
            return home / ".deep_gemm"
    except (RuntimeError, OSError):
        pass
    import platformdirs

    try:
        root = Path(platformdirs.user_cache_dir("deep_gemm", appauthor=False))
    except (RuntimeError, OSError, KeyError):
        return None
    return root if root.is_absolute() else None


def root_problem(root: str | Path, trust: bool) -> str | None:
    """Why `root` must not be used: a sentence that says what to do about it. None if it may be, or does not exist.

    A cubin is code. Whoever can write to the root can run code in this process, so it has to be ours alone.
    """
    try:
        status = os.lstat(root)
        if stat.S_ISLNK(status.st_mode):
            if not trust:
                return f"{root} is a symbolic link; give the directory that it points to, or {_TRUST}"
            if not os.path.exists(root):
                return f"{root} is a symbolic link that points nowhere; create its target"
            status = os.stat(root)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{root} cannot be examined: {error}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{root} is not a directory; set DG_JIT_CACHE_DIR to one"
    if trust:
        return None
    if status.st_uid != os.geteuid():
        return f"{root} belongs to user {status.st_uid}, not to you (user {os.geteuid()}); use another, or {_TRUST}"
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        return f"other users can write to {root} (mode {mode:04o}); run `chmod go-w` on it, or {_TRUST}"
    return None


_TRUST = "set DG_JIT_TRUST_CACHE_DIR=1 if you trust everybody who can write there"
