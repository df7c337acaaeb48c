"""Epilogues by the names that DeepGEMM has for them. `deep_gemm.Epilogue` has more, and combines them."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from .errors import UnsupportedError
from .ops.epilogue import Epilogue

__all__ = ["Alpha", "BF16StochasticRounding", "FP8CastWithClamp", "Identity"]


def Identity() -> Epilogue:
    """An epilogue that does nothing, as None."""
    return Epilogue()


def Alpha(alpha: float | Tensor) -> Epilogue:
    """``d = alpha * a @ b^T``."""
    return Epilogue(alpha=alpha)


def FP8CastWithClamp(sfd: Any, clamp_value: Any = None, clamped_count: Any = None) -> NoReturn:
    """Not supported: this version has no cast to FP8 with a clamp."""
    raise UnsupportedError(
        "FP8CastWithClamp is not implemented: this version writes no FP8 in that way. Call per_token_cast_to_fp8 on d."
    )


def BF16StochasticRounding() -> NoReturn:
    """Not supported: this version has no stochastic rounding."""
    raise UnsupportedError(
        "BF16StochasticRounding is not implemented: this version rounds to nearest. Write a float32 d, and round that."
    )
