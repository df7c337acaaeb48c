"""Measuring the kernels: shapes, timing, side-by-side runs and charts. `python -m deep_gemm bench` is the front door."""
