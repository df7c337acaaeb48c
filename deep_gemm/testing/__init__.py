"""For tests and benchmarks of GEMMs: comparing results, timing, making operands, guarding memory."""

from deep_gemm.testing.accuracy import accumulation_bound, assert_close_to_exact, assert_half_close_to_exact
from deep_gemm.testing.bench import bench, bench_flushed, bench_kineto, get_arch_major
from deep_gemm.testing.buffers import Guarded, guarded, guarded_copy
from deep_gemm.testing.decorators import ignore_env, test_filter
from deep_gemm.testing.numeric import assert_bitwise_equal, calc_diff, count_bytes
from deep_gemm.testing.operands import Operand, integer_operands, one_hot_operand, random_operands

__all__ = [
    "Guarded",
    "Operand",
    "accumulation_bound",
    "assert_bitwise_equal",
    "assert_close_to_exact",
    "assert_half_close_to_exact",
    "bench",
    "bench_flushed",
    "bench_kineto",
    "calc_diff",
    "count_bytes",
    "get_arch_major",
    "guarded",
    "guarded_copy",
    "ignore_env",
    "integer_operands",
    "one_hot_operand",
    "random_operands",
    "test_filter",
]
