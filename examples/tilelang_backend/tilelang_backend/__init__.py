"""TileLang as a backend of `deep_gemm.backends`. The entry point of this package imports this file; TileLang itself is
imported when one of its kernels is used."""

from deep_gemm.backends import Backend, backend


@backend
class TileLang(Backend):
    """Kernels in TileLang."""

    name = "tilelang"
    requires = "tilelang"
    install = "pip install tilelang"
    modules = ("tilelang_backend.gemm",)
