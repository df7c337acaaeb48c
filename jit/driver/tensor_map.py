"""TMA descriptors: 128 opaque bytes that describe a tensor to the copy engine."""

from __future__ import annotations

import ctypes
import functools

from deep_gemm.errors import InvalidInputError
from deep_gemm.jit.driver import api
from deep_gemm.records import record

# The driver's names, without what all names of their enumeration begin with; of a type also the bytes of an element.
_DTYPES = {"u8": ("UINT8", 1), "f16": ("FLOAT16", 2), "f32": ("FLOAT32", 4), "bf16": ("BFLOAT16", 2)}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_L2_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}

SIZE = 128
ALIGNMENT = 64
ADDRESS_ALIGNMENT = 16
"""Of the tensor."""


@record(frozen=True)
class TensorMapSpec:
    """A tiled tensor map without its address.

    `dims` (elements), innermost first; `strides` (bytes) of all dimensions but the innermost; `box` (elements), the
    tile that one copy moves; `swizzle` and `l2_promotion` in bytes. Elements outside of the tensor read as zero and are
    not written. Raises InvalidInputError for what the hardware cannot address, naming the field.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = 128

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise InvalidInputError(f"Tensor map: {problem}.")

    def encode(self, address: int) -> bytes:
        """The descriptor for a tensor at `address` (bytes, a multiple of 16): 128 bytes, remembered by both."""
        return _encode(self, address)

    def _problem(self) -> str:
        rank = len(self.dims)
        if self.dtype not in _DTYPES:
            return f"dtype must be one of {', '.join(_DTYPES)}, but it is {self.dtype!r}"
        if not 1 <= rank <= 5:
            return f"dims must have 1 to 5 entries, but it is {self.dims}"
        if len(self.strides) != rank - 1 or len(self.box) != rank:
            return f"{rank} dims need {rank - 1} strides and {rank} box sizes, not {self.strides} and {self.box}"
        if [size for size in self.dims if not 1 <= size <= 1 << 32]:
            return f"dims must be in 1 .. 2**32, but they are {self.dims}"
        if [stride for stride in self.strides if stride % 16 or not 0 < stride < 1 << 40]:
            return f"strides must be multiples of 16 bytes below 2**40, but they are {self.strides}"
        if [size for size in self.box if not 1 <= size <= 256]:
            return f"box sizes must be in 1 .. 256, but they are {self.box}"
        if self.swizzle not in _SWIZZLES or self.l2_promotion not in _L2_PROMOTIONS:
            return (
                f"swizzle must be in {tuple(_SWIZZLES)} and l2_promotion in {tuple(_L2_PROMOTIONS)}, "
                f"but they are {self.swizzle} and {self.l2_promotion}"
            )
        inner = self.box[0] * _DTYPES[self.dtype][1]
        if inner % 16:
            return f"the innermost box must be a multiple of 16 bytes, but it is {inner}"
        if self.swizzle and inner > self.swizzle:
            return f"the innermost box must be at most the swizzle's {self.swizzle} bytes, but it is {inner}"
        return ""


@functools.lru_cache(maxsize=4096)
def _encode(spec: TensorMapSpec, address: int) -> bytes:
    if address <= 0 or address % ADDRESS_ALIGNMENT:
        raise InvalidInputError(f"Tensor map: the address must be a multiple of 16 bytes, but it is {address:#x}.")
    api.initialise()
    driver, rank = api.cuda(), len(spec.dims)

    def value(enumeration: str, name: str) -> ctypes.c_int:
        return ctypes.c_int(getattr(getattr(driver, f"CUtensorMap{enumeration}"), f"CU_TENSOR_MAP_{name}"))

    # Through ctypes: cuda.bindings encodes into a CUtensorMap whose address is no multiple of 64, which the driver
    # requires (13.4.4 too).
    buffer = ctypes.create_string_buffer(SIZE + ALIGNMENT)
    target = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    u32s, u64s, strides = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank, ctypes.c_uint64 * max(rank - 1, 1)
    status = api.library_function("cuTensorMapEncodeTiled")(
        ctypes.c_void_p(target),
        value("DataType", f"DATA_TYPE_{_DTYPES[spec.dtype][0]}"),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        u64s(*spec.dims),
        strides(*spec.strides),
        u32s(*spec.box),
        u32s(*[1] * rank),
        value("Interleave", "INTERLEAVE_NONE"),
        value("Swizzle", f"SWIZZLE_{_SWIZZLES[spec.swizzle]}"),
        value("L2promotion", f"L2_PROMOTION_{_L2_PROMOTIONS[spec.l2_promotion]}"),
        value("FloatOOBfill", "FLOAT_OOB_FILL_NONE"),
    )
    api.check(status, "cuTensorMapEncodeTiled", f"{spec} at {address:#x}")
    return ctypes.string_at(target, SIZE)
