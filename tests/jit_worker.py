"""A process of its own that builds kernels with the fake compiler: `python jit_worker.py '{"root": ..., ...}'`.

It prints one JSON line, and `ready` before it waits for the file `gate` to appear.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any


def without_torch() -> None:
    """Import deep_gemm's parts without its __init__: torch costs seconds, and none of this needs it."""
    spec = importlib.util.find_spec("deep_gemm")
    assert spec is not None
    package = types.ModuleType("deep_gemm")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["deep_gemm"] = package


def stall_before_rename(name: str) -> None:
    """Never get past publishing the file `name`: somebody kills us there."""
    real = os.rename

    def rename(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == name:
            print("stalled", flush=True)
            time.sleep(600)
        real(source, target, **options)

    os.rename = rename


def fork_while_locked(build: Any, request: Any) -> int:
    """The exit status of a child that wants the key which a thread of ours was compiling at the moment of the fork."""
    thread = threading.Thread(target=build.build, args=(request,))
    thread.start()
    while not build._compiler.calls:
        time.sleep(0.005)
    child = os.fork()
    if child == 0:
        # That thread does not exist here: without a new lock this would wait for it forever.
        signal.alarm(20)
        os._exit(0 if build.build(request).layer == "disk" else 1)
    status = os.waitpid(child, 0)[1]
    thread.join()
    return os.waitstatus_to_exitcode(status)


def main(job: dict[str, Any]) -> dict[str, Any]:
    without_torch()
    import jit_fakes

    logging.basicConfig(stream=sys.stderr)
    if "uid" in job:
        # Now, since another user may not be allowed to read where Python is installed.
        import filelock  # noqa: F401

        os.setgid(job["uid"])
        os.setuid(job["uid"])
    if "stall" in job:
        stall_before_rename(job["stall"])
    root = Path(job["root"])
    compiler = jit_fakes.FakeCompiler(Path(job["journal"]), seconds=job.get("seconds", 0.0))
    sources = [f"int body{i};\n" for i in range(job.get("keys", 1))]
    random.Random(job.get("seed", 0)).shuffle(sources)
    print("ready", flush=True)
    while "gate" in job and not Path(job["gate"]).exists():
        time.sleep(0.001)
    if job.get("fork"):
        build = jit_fakes.builder(root, compiler)
        return {"child": fork_while_locked(build, jit_fakes.request(source=sources[0]))}
    layers, wrong = [], 0
    until = time.monotonic() + job.get("repeat_for", 0.0)
    while True:
        build = jit_fakes.builder(root, compiler, lock_limit=job.get("lock_limit", 60.0))
        for source in sources:
            binary = build.build(jit_fakes.request(source=source))
            layers.append(binary.layer)
            wrong += binary.cubin != jit_fakes.cubin_of(source)
        if time.monotonic() >= until:
            return {"layers": layers, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
