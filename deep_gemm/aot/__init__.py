"""Ahead-of-time compilation: a model's layers or given shapes become a list of kernels, which are built into the cache.

The public function is `deep_gemm.precompile`. The package has another name, since a package `deep_gemm.precompile` and
that function would hide one another.

workload: which shapes will run. build: the kernels of shapes, and building them by threads or an executor. shard: one
part of a list of kernels. distributed, exchange: the same on all ranks of a torch.distributed job.
"""
