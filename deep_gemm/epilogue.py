"""Epilogues by the names that DeepGEMM has for them. `deep_gemm.Epilogue` has more, and combines them."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from .errors import UnsupportedError
from .ops.epilogue import Epilogue

__all__ = ["Alpha", "BF16StochasticRounding", "FP8CastWithClamp", "Identity"]


def Identity() -> Epilogue:
    """An epilogue that does nothing, as None.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.bf16_gemm_nt(a, b, d, epilogue=deep_gemm.epilogue.Identity())
    """
    return Epilogue()


def Alpha(alpha: float | Tensor) -> Epilogue:
    """``d = alpha * a @ b^T``.

    >>> a, b, d = (torch.ones(*shape).bfloat16() for shape in ((8, 64), (32, 64), (8, 32)))
    >>> deep_gemm.bf16_gemm_nt(a, b, d, epilogue=deep_gemm.epilogue.Alpha(0.5))
    >>> d[0, 0].item()
    32.0
    """
    return Epilogue(alpha=alpha)


def FP8CastWithClamp(sfd: Any, clamp_value: Any = None, clamped_count: Any = None) -> NoReturn:
    """Not supported: this version has no cast to FP8 with a clamp.

    >>> try:
    ...     deep_gemm.epilogue.FP8CastWithClamp(torch.ones(8, 1))
    ... except deep_gemm.UnsupportedError as error:
    ...     print(str(error).split(":")[0])
    FP8CastWithClamp is not implemented
    """
    raise UnsupportedError(
        "FP8CastWithClamp is not implemented: this version writes no FP8 in that way. Call per_token_cast_to_fp8 on d."
    )


def BF16StochasticRounding() -> NoReturn:
    """Not supported: this version has no stochastic rounding.

    >>> try:
    ...     deep_gemm.epilogue.BF16StochasticRounding()
    ... except deep_gemm.UnsupportedError as error:
    ...     print(str(error).split(":")[0])
    BF16StochasticRounding is not implemented
    """
    raise UnsupportedError(
        "BF16StochasticRounding is not implemented: this version rounds to nearest. Write a float32 d, and round that."
    )
