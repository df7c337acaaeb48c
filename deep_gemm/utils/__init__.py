"""Casts, layouts and small arithmetic, under the names that callers import them by."""

from deep_gemm.utils.layout import *  # noqa: F403
from deep_gemm.utils.math import *  # noqa: F403
