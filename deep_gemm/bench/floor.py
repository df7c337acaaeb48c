"""The read floor: the time of merely reading weights, launched as a decoder's kernels are. No GEMM of few tokens is
faster.

Measured like the table in `shapes.READ_FLOOR_US`: one CTA on each SM; one thread issues bulk copies into a ring of 12
stages of 16 KB, and 128 threads touch what arrives; with programmatic dependent launch, a kernel reads before it waits
for its predecessor. Small sizes are divided evenly, so that no SM reads more than the others.

The full ring fills an SM, so the next launch begins where this one ends. *Overlapped*: the ring is no larger than the
data, which leaves room for the next launch; then 4 MB take 1.2 us on an H200 instead of 1.9.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deep_gemm import arch, options
from deep_gemm.jit.binary import BuildRequest
from deep_gemm.jit.builder import default_builder
from deep_gemm.jit.driver.launch import Launch, LaunchShape
from deep_gemm.jit.driver.module import Function, load_function
from deep_gemm.testing import timing

NAME = "read_floor"
STAGES, STAGE_BYTES, THREADS = 12, 16384, 160
BARRIER_BYTES = 256
"""Bytes of shared memory before the ring: a full and an empty barrier for each stage."""
SHARED_BYTES = BARRIER_BYTES + STAGES * STAGE_BYTES
UNIT = 128
"""Pieces begin at multiples of this many bytes, as L2's lines do. At multiples of 16, 28 MB took 8.3 us on an H200
instead of 6.5."""


def piece_bytes(size: int, ctas: int) -> int:
    """The pieces that CTAs read in turn, of `size` bytes in all: the largest that fit a stage and deal evenly."""
    return -(-size // (ctas * _rounds(size, ctas) * UNIT)) * UNIT


def shared_bytes(size: int, ctas: int, overlapped: bool = False) -> int:
    """Shared memory of a CTA: its barriers and the ring. With `overlapped`, the ring has at most as many stages as the
    CTA has pieces, of their size."""
    if not overlapped:
        return SHARED_BYTES
    return BARRIER_BYTES + min(STAGES, _rounds(size, ctas)) * piece_bytes(size, ctas)


def _rounds(size: int, ctas: int) -> int:
    return max(1, -(-size // (ctas * STAGE_BYTES)))


def runs_on(device: int) -> bool:
    """Whether CUDA device ``device`` has bulk copies, and shared memory for the ring."""
    found = arch.for_device(device)
    return found.capability >= (9, 0) and found.shared_per_cta >= SHARED_BYTES


def request(target: str) -> BuildRequest:
    """The kernel, for `target`, with the sizes of this module."""
    sizes = {"STAGES": STAGES, "CONSUMERS": THREADS - 32, "BARRIER_BYTES": BARRIER_BYTES}
    defines = "".join(f"#define READ_FLOOR_{name} {value}\n" for name, value in sizes.items())
    return BuildRequest(NAME, defines + Path(__file__).with_name("read_floor.cu").read_text(), target)


def read_floor_us(weights: Sequence[Tensor], overlapped: bool = False) -> float:
    """Microseconds a launch in a graph that reads these tensors, all of one size, in turn. `overlapped`: with no more
    shared memory than data to read, so that launches overlap."""
    device = weights[0].get_device()
    kernel, stream = _load(device), torch.cuda.Stream()
    out = torch.empty(THREADS, dtype=torch.float32, device=weights[0].device)
    size, ctas = weights[0].numel() * weights[0].element_size(), options.num_sms_for(device)
    shape = LaunchShape((ctas, 1, 1), THREADS, shared_bytes(size, ctas, overlapped), pdl=True)
    launches = [
        Launch(
            kernel,
            shape,
            stream.cuda_stream,
            [("ptr", x.data_ptr()), ("i64", size), ("u32", piece_bytes(size, ctas)), ("ptr", out.data_ptr())],
        )
        for x in weights
    ]
    count = max(64, len(launches))
    captured = timing.capture(launches, count, stream)
    samples = [timing.elapsed_us(captured.replay) for _ in range(12)][2:]
    return statistics.median(samples) / count


@functools.cache  # once: modules stay loaded, and each row would load it again
def _load(device: int) -> Function:
    binary = default_builder().build(request(arch.for_device(device).name))
    return load_function(binary.cubin, NAME, device, SHARED_BYTES)
