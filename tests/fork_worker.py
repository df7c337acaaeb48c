"""A small process that forks often: `python fork_worker.py beside-threads|interrupted`.

It prints one JSON line: how many forks and interrupts there were, what exceptions Python ignored in what it calls
around a fork, and whether another thread can use NVRTC afterwards. With torch, a fork may take 0.1 s.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from jit_worker import without_torch


def beside_threads(builder: Any) -> int:
    """Fork beside threads that ask for new kernels: one lock is made for each key."""
    sys.setswitchinterval(1e-4)
    end = time.monotonic() + 2

    def ask() -> None:
        count = 0
        while time.monotonic() < end:
            with builder._thread_lock((str(threading.get_ident()), str(count))).lock:
                count += 1

    for _ in range(2):
        threading.Thread(target=ask, daemon=True).start()
    forks = 0
    while time.monotonic() < end or forks < 100:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            with builder._lock.lock:  # one of the threads may have held it
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        forks += 1
    return forks


def interrupted(waits: Any) -> int:
    """Fork while a signal handler raises, also in what is called around a fork."""
    forks = 0
    while interrupts < 300 and forks < 3000:
        forks += 1
        try:
            signal.setitimer(signal.ITIMER_REAL, 20e-6 + (forks % 97) * 5e-6)
            waits.run(int)
            child = os.fork()
            if child == 0:  # has no timer
                os._exit(0)
            os.waitpid(child, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
    return forks


interrupts = 0


def interrupt(*_: object) -> None:
    global interrupts
    interrupts += 1
    raise KeyboardInterrupt


def main(what: str) -> dict[str, Any]:
    without_torch()
    from pathlib import Path

    from jit_fakes import builder

    from deep_gemm.jit.compilers import nvrtc

    ignored: list[str] = []
    sys.unraisablehook = lambda problem: ignored.append(repr(problem.exc_value))
    if what == "interrupted":
        signal.signal(signal.SIGALRM, interrupt)
        forks = interrupted(nvrtc._at_work)
    else:
        forks = beside_threads(builder(Path("/nowhere/root")))
    done = threading.Event()

    threading.Thread(target=nvrtc._at_work.run, args=(done.set,), daemon=True).start()
    answer = {"forks": forks, "interrupts": interrupts, "ignored": sorted(set(ignored)), "free": done.wait(20)}
    child = os.fork()  # it waits for whoever seems to be inside
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return answer


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
