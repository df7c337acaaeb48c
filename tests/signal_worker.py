"""A process that compiles with NVRTC until a signal ends it: `python signal_worker.py '{"handler": ..., ...}'`.

`parts` is how long the source is. `handler` is what the program does about signals: "default" (nothing), "function"
(prints a line and ends the process by the same signal), "interrupt" (raises KeyboardInterrupt, as Python does for
SIGINT), "exit" (ends the process with status 7) or "ends" (the main thread does so, without a signal). `where` is the
thread that compiles: "main" or "thread".
"""

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from jit_worker import without_torch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def slow_source(parts: int) -> str:
    """A kernel `k` that keeps NVRTC's front end busy, for about 0.03 s a part."""
    return (
        "template <int N> constexpr int sum() { int s = N; for (int i = 0; i < 100000; ++i) s ^= i; return s; }\n"
        + "".join(f"constexpr int part{i} = sum<{i}>();\n" for i in range(parts))
        + 'extern "C" __global__ void k(int* out) { *out = '
        + " ^ ".join(f"part{i}" for i in range(parts))
        + "; }\n"
    )


def handle(number: int, frame: Any) -> None:
    os.write(1, b"handled\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def leave(number: int, frame: Any) -> None:
    sys.exit(7)


def main(job: dict[str, Any]) -> None:
    without_torch()
    from deep_gemm.jit.compilers.find import choose
    from deep_gemm.settings import settings

    actions = {"function": handle, "interrupt": signal.default_int_handler, "exit": leave}
    for number in SIGNALS:
        signal.signal(number, actions.get(job["handler"], signal.SIG_DFL))
    with settings.override(use_nvrtc=True):
        compiler = choose()
    flags, source = compiler.flags("sm_90a"), slow_source(job["parts"])
    compiler._open()  # nothing is compiled before: only the first compilation of a process is dangerous

    def compile_for_ever() -> None:
        print("compiling", flush=True)
        while True:
            compiler.compile("k", source, "kernel.cu", flags, None)

    if job["where"] == "main":
        compile_for_ever()
    threading.Thread(target=compile_for_ever, daemon=True).start()
    if job["handler"] == "ends":
        time.sleep(random.random() * 0.5)
        sys.exit(7)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
