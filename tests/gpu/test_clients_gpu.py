"""Calls in clients' spellings, on a GPU: cold, then warm."""

import pytest
import torch
from client_calls import ROWS
from gpu_cases import DEVICE

from deep_gemm.testing import calc_diff


@pytest.mark.parametrize("name", ROWS)
def test_a_call_in_a_clients_spelling(name: str) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        for found, exact in ROWS[name](DEVICE):
            assert calc_diff(found, exact) < 1e-3
