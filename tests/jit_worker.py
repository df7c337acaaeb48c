"""A worker process that builds kernels with the fake compiler: `python jit_worker.py '{"root": ..., ...}'`.

It prints one JSON line, and `ready` before it waits for the file `gate` to appear.
"""

import importlib.util
import json
import logging
import os
import pwd
import random
import resource
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
    """Stop just before the file `name` is published, to be killed there."""
    real = os.rename

    def rename(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == name:
            print("stalled", flush=True)
            time.sleep(600)
        real(source, target, **options)

    os.rename = rename


def restrict(job: dict[str, Any]) -> None:
    """Take away from this process what the job says."""
    if "file_limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"],) * 2)
    if "uid" in job:
        # Imported now: another user may not be allowed to read Python's directory.
        import platformdirs

        for late in ("disassembler", "compilers.find", "compilers.nvcc", "compilers.nvrtc", "cache.packs"):
            importlib.import_module(f"deep_gemm.jit.{late}")
        platformdirs.user_cache_dir  # noqa: B018 # loaded at first use
        os.setgid(job["uid"])
        os.setuid(job["uid"])
    if job.get("homeless"):

        def unknown(uid: int) -> Any:
            raise KeyError(f"getpwuid(): uid not found: {uid}")

        pwd.getpwuid = unknown


def open_compiler(job: dict[str, Any]) -> Any:
    """The fake compiler, or a real one that prints a line when it begins."""
    import jit_fakes

    if "real" not in job:
        journal = Path(job["journal"])
        return jit_fakes.FakeCompiler(journal, seconds=job.get("seconds", 0.0), tag=job.get("tag", ""))
    from deep_gemm.jit.compilers.find import choose
    from deep_gemm.settings import settings

    with settings.override(use_nvrtc=job["real"] == "nvrtc"):
        compiler = choose()
    assert compiler.kind == job["real"]
    compiler.calls, compile = [], compiler.compile

    def announced(*arguments: Any, **options: Any) -> Any:
        compiler.calls.append(arguments)
        print("compiling", flush=True)
        return compile(*arguments, **options)

    compiler.compile = announced
    return compiler


def fork_while_locked(build: Any, request: Any, other: Any = None) -> int:
    """The exit status of a forked child that builds the key that a thread of the parent was compiling during the fork,
    or `other`, which it has to compile itself."""
    thread = threading.Thread(target=build.build, args=(request,))
    thread.start()
    while not build._compiler.calls:
        time.sleep(0.005)
    if other is not None:
        time.sleep(0.1)  # into the compiler
    assert thread.is_alive()
    child = os.fork()
    if child == 0:
        # That thread does not exist here: without a new lock this would wait for ever.
        signal.alarm(20)
        wanted, layer = (request, "disk") if other is None else (other, "compiled")
        os._exit(0 if build.build(wanted).layer == layer else 1)
    status = os.waitpid(child, 0)[1]
    thread.join()
    return os.waitstatus_to_exitcode(status)


def leave_a_child_behind(build: Any, request: Any) -> None:
    """Compile for ever in a thread, fork a child that lives on, print its process id, and wait to be killed."""
    threading.Thread(target=build.build, args=(request,), daemon=True).start()
    while not build._compiler.calls:
        time.sleep(0.005)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(600)


def main(job: dict[str, Any]) -> dict[str, Any]:
    without_torch()
    import jit_fakes

    from deep_gemm.jit.builder import Builder

    logging.basicConfig(stream=sys.stderr)
    signal.alarm(120)
    restrict(job)
    if "stall" in job:
        stall_before_rename(job["stall"])
    if "schema" in job:
        from deep_gemm.jit import key

        key.SCHEMA = job["schema"]
    # Without a root, the one of the settings.
    root = Path(job["root"]) if job["root"] else None
    include = Path(job.get("include", "/no-headers"))
    compiler = open_compiler(job)
    sources = job.get("sources") or [f"int body{i};\n" for i in range(job.get("keys", 1))]
    random.Random(job.get("seed", 0)).shuffle(sources)
    print("ready", flush=True)
    while "gate" in job and not Path(job["gate"]).exists():
        time.sleep(0.03)  # dozens of processes wait here, while others need the CPU to start
    if job.get("fork"):
        build = Builder(root, compiler, include)
        return {"child": fork_while_locked(build, *(jit_fakes.request(source=source) for source in sources))}
    if job.get("abandon"):
        leave_a_child_behind(Builder(root, compiler, include), jit_fakes.request(source=sources[0]))
    layers, wrong, evictions = [], 0, 0
    until = time.monotonic() + job.get("repeat_for", 0.0)
    while True:
        build = Builder(root, compiler, include, job.get("lock_limit", 60.0))
        for source in sources:
            binary = build.build(jit_fakes.request(source=source))
            layers.append(binary.layer)
            wrong += binary.cubin != jit_fakes.cubin_of(source + job.get("tag", ""))
        evictions += int(build.stats["evictions"])
        if time.monotonic() >= until and len(layers) >= len(sources) * job.get("rounds", 1):
            disk = build.disk()
            at = str(disk.root) if disk else None
            left = len(list(disk.root.glob("tmp/*"))) if disk else 0
            answer = {"layers": layers, "wrong": wrong, "evictions": evictions, "stats": build.stats}
            return {**answer, "root": at, "left": left}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
