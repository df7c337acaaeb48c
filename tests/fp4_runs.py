"""One call of each kind of kernel of MXFP4 weights with given device code, whose result must be exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import deep_gemm
from deep_gemm import kernels
from deep_gemm.arch import SM90
from deep_gemm.jit.driver.launch import Launch
from deep_gemm.jit.driver.module import Function
from deep_gemm.kernels.sm90_fp4_gemm import FP4
from deep_gemm.ops import fp4_weights
from deep_gemm.params import KernelParams
from deep_gemm.runtime import engine
from deep_gemm.spec import Fp4Spec, align, ceil_div

DEVICE = "cuda"
SMS = 4
"""So few that a CTA computes several tiles, and shares some."""


@dataclass(frozen=True)
class Fp4Run:
    """A product of integers and weights that are small multiples of a half, so that no sum is rounded before D."""

    dtype: str
    grouping: str = "none"
    m: int = 150
    absolute: bool = False
    expected: int = 0
    n: int = 456
    k: int = 672

    @property
    def groups(self) -> int:
        return 1 if self.grouping == "none" else 3

    @property
    def spec(self) -> Fp4Spec:
        """K is five blocks and a part of one; N and M end inside of a tile."""
        return Fp4Spec(
            *(self.m, self.n, self.k, self.dtype, self.absolute, self.groups, self.grouping),
            alignment=128 if self.grouping in ("contiguous", "psum") else 1,
            expected_m=self.expected,
            num_sms=SMS,
        )

    @property
    def params(self) -> KernelParams:
        return FP4.params(self.spec, FP4.config_of(self.spec, SM90), SM90)

    def tensors(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Operands, and the exact result in float64, NaN in rows of no group."""
        gen = torch.Generator().manual_seed(self.m + self.k)

        def whole(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high + 1, shape, generator=gen)

        m, n, k, groups = self.m, self.n, self.k, self.groups
        masked = groups if self.grouping == "masked" else 1
        a, factors = whole(-4, 4, masked, m, k).double(), 2.0 ** whole(-1, 1, masked, m, ceil_div(k, 128)).double()
        packed, exponents = whole(0, 255, groups, n, k // 2).byte(), whole(126, 128, groups, n, k // 32)
        rows = torch.arange(n)[:, None]
        exponents = (exponents + (rows + rows // 8) % 2).byte()  # factors of rows that a thread has differ
        kind = "fp8" if self.dtype == "e4m3" else "bf16"
        weights = fp4_weights.transform(packed, exponents, kind, absolute=self.absolute)
        found = {"a": a.flatten(0, 1).to(torch.float8_e4m3fn if self.dtype == "e4m3" else torch.bfloat16)}
        if self.dtype == "e4m3":
            padded = torch.zeros(masked, factors.shape[-1], align(m, 4))
            padded[..., :m] = factors.transpose(1, 2).float()
            found["sfa"] = padded
            a = a * factors.repeat_interleave(128, -1)[..., :k]
        found |= {"b": weights.packed, "sfb": weights.factors}
        exact = torch.full((masked * m, n), torch.nan, dtype=torch.float64)
        for group, (first, last) in enumerate(self.rows()):
            w = deep_gemm.dequantise(packed[group], exponents[group], dtype=torch.float64)
            exact[first:last] = a.flatten(0, 1)[first:last] @ w.T
        if self.grouping == "contiguous":
            labels = torch.full((m,), -1, dtype=torch.int32)
            for group, (first, last) in enumerate(self.rows()):
                labels[first:last] = group
            found["layout"] = labels
        elif self.grouping != "none":
            ends = [last - (0 if self.grouping == "psum" else first) for first, last in self.rows()]
            found["layout"] = torch.tensor(ends, dtype=torch.int32)
        return {name: tensor.to(DEVICE) for name, tensor in found.items()}, exact.to(DEVICE)

    def rows(self) -> list[tuple[int, int]]:
        """The first row of each group and the one after its last."""
        if self.grouping == "masked":
            return [(0, self.m), (self.m, self.m), (2 * self.m, 2 * self.m + self.m // 3)]
        return [(0, self.m)] if self.groups == 1 else [(0, 128), (128, 128), (128, self.m - 20)]

    def is_right(self, function: Function, launches: int = 1) -> bool:
        """Whether the result is right, and that of each launch the same. Later ones are dependent launches."""
        given, exact = self.tensors()
        spec, params, found = self.spec, self.params, []
        size = FP4.workspace_bytes(spec)
        more = {"workspace": torch.empty(size, dtype=torch.uint8, device=DEVICE)} if size else {}
        for early in (False, True)[:launches]:
            tensors = {**given, **more, "d": torch.full(exact.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)}
            strides = {name: tensor.stride() for name, tensor in tensors.items()}
            if "sfa" in strides:
                strides["sfa"] = (1, given["sfa"].shape[-1])
            made = kernels.get(FP4.name).launch_plan(params, spec, strides, early)
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            stream = engine.raw_stream(torch.cuda.current_device())
            Launch(function, made.shape, stream, made.parameters, addresses)()
            torch.cuda.synchronize()
            found.append(tensors["d"])
        wanted = exact.to(torch.bfloat16)
        same = torch.equal(found[0].nan_to_num(nan=-1e30), wanted.nan_to_num(nan=-1e30))
        if self.grouping in ("contiguous", "psum"):  # what rows of padding hold beside a group's rows is not defined
            used = torch.cat([torch.arange(*rows) for rows in self.rows()]).to(DEVICE)
            same = torch.equal(found[0][used], wanted[used])
        return same and all(torch.equal(found[0].nan_to_num(nan=0), each.nan_to_num(nan=0)) for each in found)


RUNS: dict[str, Fp4Run] = {
    "fp8": Fp4Run("e4m3", n=584), "bf16": Fp4Run("bf16", n=584),
    "fp8 masked": Fp4Run("e4m3", "masked", 30, expected=24),
    "bf16 masked": Fp4Run("bf16", "masked", 30, expected=24), "fp8 absolute": Fp4Run("e4m3", absolute=True),
    "bf16 absolute": Fp4Run("bf16", "masked", 30, absolute=True, expected=8),
    "index": Fp4Run("bf16", "contiguous", 256), "psum": Fp4Run("e4m3", "psum", 256),
    "fp8 high": Fp4Run("e4m3", m=380, n=328), "bf16 high": Fp4Run("bf16", "contiguous", 384),
    "fp8 large": Fp4Run("e4m3", m=600), "bf16 large": Fp4Run("bf16", "contiguous", 768),
    "fp8 large psum": Fp4Run("e4m3", "psum", 1152), "bf16 large masked": Fp4Run("bf16", "masked", 500, expected=500),
    "fp8 wide": Fp4Run("e4m3", m=100, n=2000), "fp8 wide index": Fp4Run("e4m3", "contiguous", 384, n=1000),
    "bf16 wide psum": Fp4Run("bf16", "psum", 768, n=1000),
    "bf16 wide masked": Fp4Run("bf16", "masked", 110, expected=110, n=1000),
    "fp8 split": Fp4Run("e4m3", m=13, n=72), "bf16 split": Fp4Run("bf16", m=50),
    "bf16 split by three": Fp4Run("bf16", m=13, n=72),
}  # fmt: skip
"""Each kind of activations, exponents and groups, in stream-K order, also with tiles of 128 tokens, with large and
wide tiles, and with K split by two and three consumers. `sanitize.py` runs all."""
BY_PARAMS = {run.params: run for run in RUNS.values()}
