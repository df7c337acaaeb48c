"""Tensor maps, through the C signature of the driver's encoder."""

import ctypes
import struct
from typing import Any

import pytest
from cuda.bindings import driver as bindings
from driver_fakes import FakeDriver

from deep_gemm.errors import DriverError, InvalidInputError
from deep_gemm.jit.driver import api, tensor_map
from deep_gemm.jit.driver.tensor_map import TensorMapSpec

ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    *[ctypes.c_void_p] * 4,
    *[ctypes.c_int] * 4,
)


class FakeEncoder:
    """cuTensorMapEncodeTiled with its C signature: fills the map with a count and notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.status = 0
        self.function = ENCODE(self.encode)

    def encode(
        self,
        target: int,
        dtype: int,
        rank: int,
        address: int,
        dims: int,
        strides: int,
        box: int,
        steps: int,
        *rest: int,
    ) -> int:
        self.seen.append(
            {
                "aligned": target % 64 == 0,
                "dtype": dtype,
                "address": address,
                "dims": struct.unpack(f"={rank}Q", ctypes.string_at(dims, 8 * rank)),
                "strides": struct.unpack(f"={rank - 1}Q", ctypes.string_at(strides, 8 * (rank - 1))),
                "box": struct.unpack(f"={rank}I", ctypes.string_at(box, 4 * rank)),
                "steps": struct.unpack(f"={rank}I", ctypes.string_at(steps, 4 * rank)),
                "interleave, swizzle, promotion, fill": rest,
            }
        )
        ctypes.memset(target, len(self.seen), 128)
        return self.status


@pytest.fixture
def encoder(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeEncoder:
    fake = FakeEncoder()
    monkeypatch.setattr(api, "library_function", {"cuTensorMapEncodeTiled": fake.function}.__getitem__)
    return fake


def test_a_tensor_map_as_the_driver_reads_it(encoder: FakeEncoder) -> None:
    spec = TensorMapSpec("bf16", (7168, 1 << 32), (14336,), (64, 128), swizzle=128, l2_promotion=256)
    assert spec.encode(0x7000_0000_0010) == b"\x01" * 128
    assert encoder.seen == [
        {
            "aligned": True,
            "dtype": int(bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
            "address": 0x7000_0000_0010,
            "dims": (7168, 1 << 32),
            "strides": (14336,),
            "box": (64, 128),
            "steps": (1, 1),
            "interleave, swizzle, promotion, fill": (
                int(bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
                int(bindings.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
                int(bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
                int(bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            ),
        }
    ]


TYPES, SWIZZLES = bindings.CUtensorMapDataType, bindings.CUtensorMapSwizzle
PROMOTIONS = bindings.CUtensorMapL2promotion
VALUES: list[tuple[dict[str, Any], Any]] = [
    *(({"dtype": dtype}, getattr(TYPES, f"CU_TENSOR_MAP_DATA_TYPE_{name}")) for dtype,
        name in (("u8", "UINT8"), ("f16", "FLOAT16"), ("f32", "FLOAT32"), ("bf16", "BFLOAT16"))),
    *(({"swizzle": size}, getattr(SWIZZLES, f"CU_TENSOR_MAP_SWIZZLE_{f'{size}B' if size else 'NONE'}")) for size in (0,
        32, 64, 128)),
    *(({"l2_promotion": size},
        getattr(PROMOTIONS, f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{size}B' if size else 'NONE'}")) for size in (0, 64, 128,
        256)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "value"), VALUES, ids=str)
def test_each_value_is_the_drivers(encoder: FakeEncoder, given: dict[str, Any], value: Any) -> None:
    spec: dict[str, Any] = {"dtype": "u8", "dims": (512,), "strides": (), "box": (16,), "swizzle": 128} | given
    if spec["dtype"] != "u8":
        spec["box"] = (8,)
    TensorMapSpec(**spec).encode(16)
    (seen,) = encoder.seen
    _, swizzle, promotion, _ = seen["interleave, swizzle, promotion, fill"]
    assert {"dtype": seen["dtype"], "swizzle": swizzle, "l2_promotion": promotion}[next(iter(given))] == int(value)


def test_a_map_of_one_dimension_and_of_five(encoder: FakeEncoder) -> None:
    TensorMapSpec("f32", (1000,), (), (256,)).encode(16)
    TensorMapSpec("u8", (64, 2, 3, 4, 5), (64, 128, 384, 1536), (64, 1, 1, 1, 2), 64).encode(16)
    assert [seen["dims"] for seen in encoder.seen] == [(1000,), (64, 2, 3, 4, 5)]


def test_maps_are_remembered_by_spec_and_address(encoder: FakeEncoder) -> None:
    spec = TensorMapSpec("u8", (256, 256), (256,), (128, 64), 128)
    first = spec.encode(0x1000)
    assert TensorMapSpec("u8", (256, 256), (256,), (128, 64), 128).encode(0x1000) == first
    assert len(encoder.seen) == 1
    assert spec.encode(0x2000) != first
    assert TensorMapSpec("u8", (256, 255), (256,), (128, 64), 128).encode(0x1000) != first
    assert tensor_map._encode.cache_info().maxsize is not None


def test_a_map_that_the_driver_refuses_is_named(encoder: FakeEncoder) -> None:
    encoder.status = 1
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled for TensorMapSpec\(dtype='u8'.* at 0x1000 failed"):
        TensorMapSpec("u8", (256,), (), (128,)).encode(0x1000)


GOOD: dict[str, Any] = {"dtype": "u8", "dims": (256, 256), "strides": (256,), "box": (128, 64), "swizzle": 128}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "f64"}, "dtype must be one of u8, f16, f32, bf16"),
        ({"dims": ()}, "1 to 5 entries"), ({"strides": ()}, "need 1 strides"), ({"box": (128,)}, "2 box sizes"),
        ({"dims": (0, 256)}, "dims must be in"), ({"strides": (250,)}, "multiples of 16 bytes"),
        ({"strides": (1 << 40,)}, "multiples of 16 bytes below"), ({"box": (128, 257)}, "box sizes must be in"),
        ({"box": (120, 64)}, "innermost box must be a multiple of 16"),
        ({"box": (256, 64)}, "at most the swizzle's 128 bytes"), ({"swizzle": 96}, "swizzle must be in"),
        ({"l2_promotion": 32}, "l2_promotion in"),
    ],
)  # fmt: skip
def test_what_the_copy_engine_cannot_address_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        TensorMapSpec(**{**GOOD, **change})


@pytest.mark.parametrize("address", [0, 8, -16])
def test_a_misaligned_address_is_refused(encoder: FakeEncoder, address: int) -> None:
    with pytest.raises(InvalidInputError, match="address must be a multiple of 16 bytes"):
        TensorMapSpec(**GOOD).encode(address)
