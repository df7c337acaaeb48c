"""Device headers for compute-sanitizer's racecheck, and versions with races, which it must report.

It does not always see that a thread that arrives at an mbarrier also arrives for others, which it has met at a named
barrier before: in the exchange of sums it reported the reads of exactly 127 of 128 threads. See CONTRIBUTING.md.
"""

from dataclasses import dataclass
from pathlib import Path

from headers import edit, edited_headers


def racecheck_headers(folder: Path) -> Path:
    """Copy the device headers to ``folder``, changed so that each lane arrives for itself, at the ring of its own CTA,
    at visits of logits, and in the exchange of sums. In a ring that a cluster fills together, one lane still arrives
    for a warp; no sums pass through such a ring."""
    edited_headers(
        folder,
        "split_k_exchange.cuh",
        ("kLocal ? (kSplits - 1) * 4 : 1);", "kLocal ? (kSplits - 1) * 128 : 1);"),
        ("if (thread % 32 == 0) barrier_arrive(barrier);", "barrier_arrive(barrier);"),
        ("to > 0 ? to : 1);", "(to > 0 ? to : 1) * 128);"),
        (
            "if (thread < kSplits && thread != split) {",
            "for (u32 other = 0; other < kSplits; ++other) {\n          if (other == split) continue;",
        ),
        ("empty(group * kConsumersK + thread % kConsumersK)", "empty(group * kConsumersK + other % kConsumersK)"),
        ("remote_address(sender, thread / kConsumersK)", "remote_address(sender, other / kConsumersK)"),
    )
    edit(
        folder / "pipeline.cuh",
        ("kConsumerWarps * kClusterSize);", "kConsumerWarps * (kClusterSize == 1 ? 32 : +kClusterSize));"),
        ("if (lane == 0) barrier_arrive(barrier);", "barrier_arrive(barrier);"),
    )
    edit(
        folder / "logits.cuh",
        ("barrier_init(barriers.empty(lane), 4);", "barrier_init(barriers.empty(lane), 128);"),
        (
            "barrier_init(visit_empty(lane), 4 * C::kConsumers);",
            "barrier_init(visit_empty(lane), 128 * C::kConsumers);",
        ),
        ("if (lane() == 0) barrier_arrive(places.visit_empty(slot));", "barrier_arrive(places.visit_empty(slot));"),
    )
    return folder


@dataclass(frozen=True)
class Race:
    """A mistake in a header: ``edits`` of ``file``, and part of the name of a kernel that shows it."""

    kernel: str
    file: str
    edits: tuple[tuple[str, str], ...]

    def put_into(self, folder: Path) -> Path:
        edit(folder / self.file, *self.edits)
        return folder


_PUBLISH = 'if (writes) asm volatile("st.shared.u32 [%0], %1;" ::"r"(place ^ 8), "r"(0) : "memory");'
RACES = {
    "hint-late": Race(  # publish a tile's column when consumers may read it already
        "128x144_s5_p1_tma",
        "tile_store.cuh",
        (
            ("    look_ahead();\n    if (elect_one()) tma", "    if (elect_one()) tma"),
            ("    Areas::free_all();\n", "    Areas::free_all();\n    look_ahead();\n"),
        ),
    ),
    "hint-early": Race(  # publish it in the slot of the tile before, which is still in use
        "128x256_s3_p1_tma",
        "next_tile_hint.cuh",
        (("    place ^= 8;\n  }\n\n  // Moves `tile`", f"    {_PUBLISH}\n    place ^= 8;\n  }}\n\n  // Moves `tile`"),),
    ),
    "logits": Race(  # read logits in shared memory that other threads may not have written
        "fp8_paged_mqa_logits_h64_d128_f32_q2",
        "logits.cuh",
        (("named_barrier_sync(kConsumerBarrier + consumer, 128);", ""),),
    ),
    "product": Race(  # add up partial sums that other warps may not have written
        "tf32_hc_prenorm_gemm_n24_32x1",
        "prenorm.cuh",
        (("    } else {\n      __syncthreads();\n    }\n", "    }\n"),),
    ),
    "norm": Race(  # add up sums that other warps may not have written
        "rms_norm_residual_bf16_e4m3_1x2048",
        "rows.cuh",
        (("      __syncthreads();\n", ""),),
    ),
    "exchange": Race(  # send sums to a slot whose last sums may not have been read
        "swapped_16x64_s20_p2_k1x2_tma",
        "split_k_exchange.cuh",
        (("if (receivers(split) > 0) barrier_wait<true>(empty(consumer), parity ^ 1);", ""),),
    ),
}
