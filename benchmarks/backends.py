"""What is compared: our call, the vendor's library through torch, and DeepGEMM, on the same quantised operands."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from deep_gemm.aot.workload import GemmShape

Call = Callable[[], Any]


@dataclass
class Operands:
    """`a` (m, k), `b` (n, k): E4M3; `sfa` (m, k/128) MN-major, `sfb` (n/128, k/128): float32; `d` (m, n): bf16."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor


def make_operands(shape: GemmShape, sets: int, device: str = "cuda") -> list[Operands]:
    """Random normal data through the real 1x128 and 128x128 quantisation; zeros would run faster than any user's data.

    The sets share the activations and have weights and outputs of their own, as the layers of a model do.
    """
    import torch

    import deep_gemm
    from deep_gemm.testing import random_operands

    (a, sfa), _, _, _ = random_operands(shape.m, 1, shape.k, device)
    sfa = deep_gemm.get_mn_major_tma_aligned_tensor(sfa)
    out = []
    for index in range(sets):
        _, (b, sfb), _, _ = random_operands(1, shape.n, shape.k, device, seed=index)
        out.append(Operands(a, sfa, b, sfb, torch.empty(shape.m, shape.n, dtype=torch.bfloat16, device=device)))
    return out


def ours(x: Operands) -> Call:
    """`deep_gemm.fp8_gemm_nt` with the scales ready."""
    import deep_gemm

    a, b = (x.a, x.sfa), (x.b, x.sfb)
    return lambda: deep_gemm.fp8_gemm_nt(a, b, x.d)


def ours_promised(x: Operands) -> Call:
    """`ours` after the promise that nobody writes the weights and their scales again, given before the first call.

    Give it back with `retract` once all has been timed: a later tensor at the same address has promised nothing.
    """
    import torch

    import deep_gemm

    if x.b.is_cuda:
        torch.cuda.synchronize(x.b.device)  # the promise is that nothing that still runs writes them
    deep_gemm.declare_constant(x.b, x.sfb)
    return ours(x)


def retract(x: Operands) -> None:
    """Take back the promise of `ours_promised`, if it was given."""
    import deep_gemm

    deep_gemm.retract_constant(x.b, x.sfb)


def own_weights(x: Operands) -> Operands:
    """The same problem with weights and output at other addresses, of which nothing is promised."""
    import torch

    return replace(x, b=x.b.clone(), sfb=x.sfb.clone(), d=torch.empty_like(x.d))


def tensorwise(x: Operands) -> Call:
    """cuBLASLt with one scale a tensor and fast accumulation: the easier problem, since it promotes nothing."""
    import torch

    one = torch.ones((), dtype=torch.float32, device=x.a.device)
    weights = x.b.t()
    return lambda: torch._scaled_mm(
        x.a, weights, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True, out=x.d
    )


def blockwise(x: Operands) -> Call:
    """cuBLASLt with the same 1x128 and 128x128 scales: our problem. It wants other layouts of them."""
    import torch
    from torch.nn.functional import ScalingType, pad, scaled_mm

    weights = x.b.t()
    sfa = x.sfa.t().contiguous().t()
    sfb = pad(x.sfb, (0, -x.sfb.shape[1] % 4)).t()
    recipe_a, recipe_b = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(x.a, weights, sfa, recipe_a, sfb, recipe_b, output_dtype=torch.bfloat16)


BACKENDS: dict[str, Callable[[Operands], Call]] = {"ours": ours, "tensorwise": tensorwise, "blockwise": blockwise}

DEEPGEMM = "deepgemm"


def add_deepgemm(gemm: Callable[..., None]) -> None:
    """Make DeepGEMM's ``fp8_gemm_nt`` one of `BACKENDS`: our problem, called as ours is. It compiles a kernel for a
    shape in seconds, at the first call."""

    def make(x: Operands) -> Call:
        a, b = (x.a, x.sfa), (x.b, x.sfb)
        return lambda: gemm(a, b, x.d)

    BACKENDS[DEEPGEMM] = make


def usable(name: str, x: Operands) -> str | None:
    """Why a backend cannot run this problem, in its own words, or None. Runs it once.

    Results of who solves our problem are compared with ours, so that a misread scale layout does not pass for a fast
    kernel.
    """
    import torch

    from deep_gemm.errors import DeepGemmError
    from deep_gemm.testing import calc_diff

    if name == "ours":
        BACKENDS[name](x)()  # an error of ours is not swallowed
        return None
    x.d.fill_(float("nan"))  # what is not written is seen
    try:
        result = BACKENDS[name](x)()
        torch.cuda.synchronize()
    except DeepGemmError:
        raise
    except (RuntimeError, ValueError, ImportError, AttributeError, NotImplementedError) as error:
        return textwrap.shorten(str(error), 100) or type(error).__name__
    if name in ("blockwise", DEEPGEMM):
        theirs = (x.d if result is None else result).clone()  # ours comes to where it may be
        ours(x)()
        difference = float(calc_diff(theirs, x.d))
        if not difference < 1e-3:
            return f"its result differs from ours by {difference:.1e}"
    return None
