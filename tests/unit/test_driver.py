"""The driver layer without a driver: its calls, their arguments, tensor maps, and every error it can give."""

import ctypes
import os
import struct
import sys
from typing import Any

import pytest
from cuda.bindings import driver as bindings
from driver_fakes import HANDLE, FakeDriver

from deep_gemm.errors import DriverError, InvalidInputError, NotWarmError
from deep_gemm.jit.driver import api, tensor_map, version
from deep_gemm.jit.driver.launch import Launch, LaunchShape
from deep_gemm.jit.driver.module import Function, bind_primary_context, load_function
from deep_gemm.jit.driver.tensor_map import TensorMapSpec


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    api.cuda.cache_clear()
    monkeypatch.setattr(api, "driver_version", lambda: None)
    monkeypatch.setattr(api, "_initialised_in", None)  # on a machine with a GPU another test may have used it


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    with pytest.raises(DriverError, match=r"no NVIDIA driver was found \(libcuda\.so\.1"):
        load_function(b"cubin", "k", 0, 0)
    with pytest.raises(DriverError, match="no NVIDIA driver was found"):
        TensorMapSpec("u8", (128,), (), (128,)).encode(16)


def test_an_old_driver_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*arguments: object) -> None:
        raise RuntimeError('Function "cuDeviceGet" not found')

    driver.answers["cuDeviceGet"] = lacks  # type: ignore[assignment]
    with pytest.raises(DriverError, match=r"driver has no cuDeviceGet: it is too old"):
        bind_primary_context(0)
    monkeypatch.undo()
    monkeypatch.setattr(version, "driver_library", lambda: ctypes.CDLL(None))
    with pytest.raises(DriverError, match=r"driver has no cuTensorMapEncodeTiled: it is too old"):
        api.library_function("cuTensorMapEncodeTiled")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    monkeypatch.setattr(api, "driver_version", lambda: 13000)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverError, match=r"cuda-python cannot be imported .* `pip install 'cuda-python>=12.9,<14'`"):
        load_function(b"cubin", "k", 0, 0)


def test_no_library_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "driver_library", lambda: None)
    version.driver_version.cache_clear()
    assert version.driver_version() is None
    assert version.driver_release() is None
    version.driver_version.cache_clear()
    monkeypatch.setattr(version, "driver_version", lambda: 12080)
    assert version.driver_release() == (12, 8)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", "deep-gemm doctor"),
        ("CUDA_ERROR_NOT_INITIALIZED", "spawn"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "compute-sanitizer"),
        ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "outside CUDA-graph capture"),
    ],
)
def test_a_failed_call_has_name_text_and_hint(driver: FakeDriver, name: str, hint: str) -> None:
    driver.fail("cuCtxSetCurrent", name)
    with pytest.raises(DriverError) as caught:
        api.call("cuCtxSetCurrent", 1, about="k")
    assert str(caught.value).startswith(f"cuCtxSetCurrent for k failed with {name} (the driver's text). ")
    assert hint in str(caught.value)
    assert (caught.value.name, caught.value.status) == (name, int(getattr(bindings.CUresult, name)))


def test_every_hint_is_for_an_error_that_exists() -> None:
    for name in api._HINTS:
        assert hasattr(bindings.CUresult, name), name


@pytest.mark.parametrize("error", [KeyError(54321), ValueError("54321 is not a valid CUresult")])
def test_a_status_that_the_bindings_do_not_know_is_reported(
    driver: FakeDriver, function: Function, error: Exception
) -> None:
    """They raise KeyError before 13.4, and then ValueError."""

    def answer(*_: object) -> tuple[object, ...]:
        raise error

    driver.answers |= {"cuInit": answer, "cuLaunchKernelEx": answer}
    says = r" failed with a status that the installed cuda-python does not know: .*54321"
    for name, call in {
        "cuX": lambda: api.check(54321, "cuX"),
        "cuInit": api.initialise,
        "cuLaunchKernelEx for k": Launch(function, LaunchShape((1, 1, 1), 128, 0), 0, []),
    }.items():
        with pytest.raises(DriverError, match=name + says):
            call()


def test_a_forked_child_is_told_to_use_spawn(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    api.initialise()
    api.initialise()
    assert driver.names() == ["cuInit"]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(DriverError, match=r'initialised before this process was forked.*"spawn"'):
        load_function(b"cubin", "k", 0, 0)


def test_loading_a_function(driver: FakeDriver) -> None:
    loaded = load_function(b"cubin", "kernel_name", 3, 200_000)
    enum = bindings.CUfunction_attribute
    assert (loaded.symbol, loaded.device, int(loaded.handle), int(loaded.module)) == ("kernel_name", 3, HANDLE, 77)
    assert loaded.registers == 100 + int(enum.CU_FUNC_ATTRIBUTE_NUM_REGS)
    assert loaded.local_bytes == 100 + int(enum.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
    assert loaded.shared_static == 100 + int(enum.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    arguments = dict(driver.calls)
    assert arguments["cuModuleLoadData"] == (b"cubin",)
    assert arguments["cuModuleGetFunction"] == (77, b"kernel_name")
    assert arguments["cuFuncSetAttribute"] == (HANDLE, enum.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200_000)
    assert driver.current == 1003
    assert loaded.max_active_blocks(384, 200_000) == 2
    assert driver.calls[-1][1] == (HANDLE, 384, 200_000)


def test_loading_gives_the_thread_its_context_back(driver: FakeDriver) -> None:
    driver.current = 5
    load_function(b"cubin", "k", 0, 0)
    assert driver.current == 5
    assert "cuFuncSetAttribute" not in driver.names()
    driver.fail("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(DriverError, match="cuModuleLoadData for k failed with CUDA_ERROR_INVALID_IMAGE"):
        load_function(b"cubin", "k", 0, 0)
    assert driver.current == 5
    bind_primary_context(1)
    assert driver.current == 1001
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 2


def test_loading_inside_capture_says_warm_up_first(driver: FakeDriver) -> None:
    driver.fail("cuModuleLoadData", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    with pytest.raises(NotWarmError, match="k would have to be loaded inside CUDA-graph capture"):
        load_function(b"cubin", "k", 0, 0)


def test_too_much_shared_memory_is_said_in_numbers(driver: FakeDriver) -> None:
    driver.fail("cuFuncSetAttribute", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match=r"k asks for 300000 bytes .* device 0 allows 232448 in all"):
        load_function(b"cubin", "k", 0, 300_000)


def test_an_empty_cubin_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(InvalidInputError, match="cubin of k is empty"):
        load_function(b"", "k", 0, 0)


def test_loading_stands_beside_a_capture_of_another_thread(driver: FakeDriver) -> None:
    modes = bindings.CUstreamCaptureMode
    seen = []
    answer = driver.answers["cuModuleLoadData"]
    driver.answers["cuModuleLoadData"] = lambda image: (seen.append(driver.capture_mode), answer(image))[1]
    load_function(b"cubin", "k", 0, 0)
    assert seen == [modes.CU_STREAM_CAPTURE_MODE_RELAXED]
    assert driver.capture_mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver.fail("cuModuleLoadData", "CUDA_ERROR_INVALID_IMAGE")
    with pytest.raises(DriverError):
        load_function(b"cubin", "k", 0, 0)
    assert driver.capture_mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL


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
