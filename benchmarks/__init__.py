"""Measuring the kernels: shapes, timing, side-by-side runs, charts. `python -m deep_gemm bench` is the front door."""
