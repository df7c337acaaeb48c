"""Operations: their table and specs, and one module for each shape of a problem."""

from .table import DEFAULT, M_GROUPED, NAMES, PRODUCTS, ROWWISE, ROWWISE_E5M2, WGRAD, Product, helpers, spec

__all__ = [
    "DEFAULT",
    "M_GROUPED",
    "NAMES",
    "PRODUCTS",
    "ROWWISE",
    "ROWWISE_E5M2",
    "WGRAD",
    "Product",
    "helpers",
    "spec",
]
