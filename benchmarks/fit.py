"""Fitting a calibration to a survey: the constants with which the model selects best. Needs scipy."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from deep_gemm import arch as archs
from deep_gemm.benchmarks.survey import name_of, problem
from deep_gemm.params import FP8Config
from deep_gemm.select import candidates
from deep_gemm.select.calibration import Calibration
from deep_gemm.select.features import Features, features
from deep_gemm.select.model import parts
from deep_gemm.workload import GemmShape

BOUNDS: dict[str, tuple[float, float]] = {
    "clock_ghz": (1.5, 1.98),
    "tensor_ghz": (1.3, 1.98),
    "launch_us": (3.5, 6.5),
    "epilogue_us": (0.02, 2.0),
    "epilogue_elements_per_us": (5e3, 3e5),
    "narrow_store": (0.01, 1.5),
    "epilogue_hidden": (0.01, 0.99),
    "direct_elements_per_us": (300, 3e4),
    "transposed_elements_per_us": (5e3, 1e6),
    "cluster_2_us": (0.01, 3.0),
    "cluster_4_us": (0.01, 4.0),
    "cluster_8_us": (0.01, 4.0),
    "local_us": (0.01, 1.5),
    "exchange_us": (0.01, 2.5),
    "handed_per_us": (1e3, 3e5),
    "exchanged_per_us": (1e3, 2e5),
    "stream_us": (0.05, 5.0),
    "given_per_us": (5e3, 3e5),
    "gathered_per_us": (4e3, 2e5),
    "instruction_cycles": (8, 60),
    "chain_cycles": (30, 300),
    "promote_cycles": (0.35, 1.5),
    "token_cycles": (0.01, 6.0),
    "choice_cycles": (0.5, 60),
    "exposed": (0.02, 1.0),
    "in_step": (0.01, 1.0),
    "parts_cycles": (1, 100),
    "ahead_cycles": (30, 300),
    "issue_cycles": (15, 200),
    "shared_bytes_per_cycle": (130, 300),
    "fill_bytes_per_cycle": (50, 110),
    "line_cycles": (0.3, 4.0),
    "load_cycles": (600, 5000),
    "start_gb_per_s": (1500, 30000),
    "hbm_gb_per_s": (2500, 6000),
    "again": (0.005, 1.0),
    "l2_gb_per_s": (4000, 20000),
    "l2_sharing": (0.01, 0.5),
    "unaligned": (1.0, 3.0),
}
"""Where each constant may lie on a GPU of Hopper's kind; the search is uniform in its logarithm."""

SOFTNESS = 0.015
"""Configs whose estimates are this close (as logarithms) share a choice, so that the loss has slopes to go down."""
ACCURACY_WEIGHT = 0.1
"""What an error of the estimate itself costs, beside the time lost by a choice."""
REACH = 0.35
"""How far from the most accurate constants better choices are looked for, as a part of what bounds allow (as
logarithms): farther off the model chooses well where it was fitted, and anyhow elsewhere. Of the best on 37 shapes of
another survey: 0.959 with 0.2, 0.962 with 0.35, 0.956 with 0.6."""
HELD_OUT = 4
"""One shape in so many is kept for judging."""


@dataclass
class Data:
    """A survey as arrays: one entry for each pair of a shape (in a mode) and a config."""

    x: Features
    log_us: Any
    log_loss: Any
    """How much slower than the best of its shape, as a logarithm."""
    starts: Any
    groups: Any
    held_out: Any
    flush: Any

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], spec: archs.ArchSpec) -> Data:
        """The pairs of survey rows; configs that are not legal any more are left out."""
        import numpy as np

        x, log_us, log_loss, sizes, held_out, flush = [], [], [], [], [], []
        for row in rows:
            asked = problem(GemmShape(row["m"], row["n"], row["k"], ""), spec.num_sms)
            legal: dict[str, FP8Config] = {name_of(c, asked, spec): c for c in candidates(asked, spec)}
            names = [name for name in row["times"] if name in legal]
            if len(names) < 2:
                continue
            best = min(row["times"][name] for name in names)
            x += [features(asked, legal[name]) for name in names]
            log_us += [math.log(row["times"][name]) for name in names]
            log_loss += [math.log(row["times"][name] / best) for name in names]
            sizes.append(len(names))
            # By shape, not by row: its modes are kept together.
            shape = f"{row['m']} x {row['n']} x {row['k']}"
            held_out.append(zlib.crc32(shape.encode()) % HELD_OUT == 0)
            flush.append(row["mode"] == "flush")
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return cls(
            Features(*(np.array(column, dtype=np.float32) for column in zip(*x, strict=True))),
            np.array(log_us),
            np.array(log_loss),
            starts,
            np.repeat(np.arange(len(sizes)), sizes),
            np.array(held_out),
            np.array(flush),
        )

    def selected(self, calibration: Calibration) -> Any:
        """For each shape, the best time over that of the config that ``calibration`` selects."""
        import numpy as np

        estimates = parts(self.x, calibration, np.maximum)["total"]
        out = []
        for group, start in enumerate(self.starts):
            end = self.starts[group + 1] if group + 1 < len(self.starts) else len(estimates)
            out.append(math.exp(-self.log_loss[start + int(np.argmin(estimates[start:end]))]))
        return np.array(out)

    def errors(self, calibration: Calibration) -> Any:
        """How wrong the estimates are, as logarithms, for the shapes in flush mode that are not held out; configs that
        are much slower than the best count less."""
        import numpy as np

        some = ~self.held_out[self.groups] & self.flush[self.groups]
        columns: Any = self.x
        estimates = np.log(parts(Features(*(column[some] for column in columns)), calibration, np.maximum)["total"])
        return np.exp(-3 * np.expm1(self.log_loss[some])) * (estimates - self.log_us[some])

    def loss(self, calibration: Calibration) -> float:
        """Time lost by the choices on the shapes that are not held out, large losses counted more, and a little of how
        wrong the estimates are where they matter."""
        import numpy as np

        estimates = np.log(parts(self.x, calibration, np.maximum)["total"])
        best = np.minimum.reduceat(estimates, self.starts)
        weights = np.exp(-(estimates - best[self.groups]) / SOFTNESS)
        sums = np.add.reduceat(weights, self.starts)
        lost = np.add.reduceat(weights * self.log_loss, self.starts) / sums
        wrong = np.add.reduceat(weights * np.minimum(np.abs(estimates - self.log_us), 0.5), self.starts) / sums
        train = ~self.held_out
        timed = train & self.flush if (train & self.flush).any() else train
        return float((lost + 4 * np.maximum(lost - 0.1, 0))[train].mean() + ACCURACY_WEIGHT * wrong[timed].mean())


def fit(
    data: Data, known: Calibration, seconds: float, seed: int = 0, progress: Callable[[str], None] = print
) -> Calibration:
    """The calibration that loses least on ``data``: near the ``known`` one or near that whose estimates are closest (by
    least squares), whichever loses less, the one that chooses best, by differential evolution in about ``seconds``."""
    import time

    import numpy as np
    from scipy.optimize import differential_evolution, least_squares

    names = [field.name for field in fields(Calibration)]
    low = np.log([BOUNDS[name][0] for name in names])
    high = np.log([BOUNDS[name][1] for name in names])

    def calibration(point: Any) -> Calibration:
        values = np.exp(low + point * (high - low))
        return Calibration(**{name: float(f"{value:.5g}") for name, value in zip(names, values, strict=True)})

    here = np.clip((np.log([getattr(known, name) for name in names]) - low) / (high - low), 0.0, 1.0)
    accurate = least_squares(
        lambda point: data.errors(calibration(point)),
        np.clip(here, 0.02, 0.98),
        bounds=(0, 1),
        diff_step=1e-3,
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=100,
    ).x
    losses = [data.loss(calibration(point)) for point in (here, accurate)]
    progress(f"loss {losses[0]:.4f} as it was, {losses[1]:.4f} where estimates are closest")
    start = here if losses[0] < losses[1] else accurate
    end = time.monotonic() + seconds
    found = differential_evolution(
        lambda point: data.loss(calibration(point)),
        [(max(0.0, at - REACH), min(1.0, at + REACH)) for at in start],
        popsize=3,
        maxiter=1_000_000,
        tol=0,
        mutation=(0.3, 0.9),
        recombination=0.8,
        init="sobol",
        x0=start,
        seed=seed,
        polish=False,
        callback=lambda *_args, **_kwargs: time.monotonic() > end,
    )
    progress(f"loss {found.fun:.4f} after {found.nfev} evaluations")
    return calibration(found.x)
