"""Names that clients look up and that are not implemented."""

from __future__ import annotations

import pytest

import deep_gemm
from deep_gemm import UnsupportedError
from deep_gemm.unsupported import REASONS


@pytest.mark.parametrize("name", REASONS)
def test_it_exists_and_says_that_it_is_not_there(name: str) -> None:
    function = getattr(deep_gemm, name)
    assert function is getattr(deep_gemm, name)
    assert function.__name__ == name
    with pytest.raises(UnsupportedError, match=f"{name} is not implemented: this version has no "):
        function(1, 2, some="thing")
    assert name not in deep_gemm.__all__


@pytest.mark.parametrize("name", ["fp8_mega_moe", "mega_moe_pre_dispatch_sm90", "get_compile_mode", "no_such_name"])
def test_what_clients_ask_for_by_hasattr_is_absent(name: str) -> None:
    assert not hasattr(deep_gemm, name)
