"""What a call needs to know of a numpy array or torch tensor, without copying it.

`Array(ptr, dtype, shape, strides, device, source)`: strides count elements and are 0 where the
size is at most 1 (the library ignores them there); device is None for host memory, else a torch
CUDA device index. numpy has no bfloat16: uint16 arrays stand for its bits where an argument may be
bfloat16.
"""

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np

from kvtile._lib import BFLOAT16, FLOAT16, FLOAT32
from kvtile.errors import InvalidArgument

_ndarray = np.ndarray
_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer

INT32, INT64, UINT8 = "int32", "int64", "uint8"
FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
DTYPE_NAMES = {FLOAT32: "float32", FLOAT16: "float16", BFLOAT16: "bfloat16"}
_NUMPY = {np.dtype(np.float32): FLOAT32, np.dtype(np.float16): FLOAT16,
          np.dtype(np.uint16): BFLOAT16, np.dtype(np.int32): INT32, np.dtype(np.int64): INT64,
          np.dtype(np.uint8): UINT8}
_NUMPY_OF = {code: dtype for dtype, code in _NUMPY.items()}
_ITEM_BYTES = {code: dtype.itemsize for dtype, code in _NUMPY.items()}
_tensor = None  # torch.Tensor once torch was seen: an exact type test is the fast one
_TORCH: dict[Any, Any] = {}
_TORCH_OF: dict[Any, Any] = {}


class Array(NamedTuple):
    ptr: int
    dtype: Any
    shape: tuple
    strides: tuple
    device: int | None
    source: Any


def layout(a):
    """What validation depends on but the address: a key for its result. None for None."""
    if a is None:
        return None
    kind = type(a)
    if kind is _ndarray or not (kind is _tensor or is_torch(a)):
        return a.dtype, a.shape, a.strides
    return a.dtype, a.shape, a.stride(), a.device


def family(arrays):
    """"numpy" or "torch" if all arrays (None aside) are of it, else None."""
    torch = {is_torch(a) for a in arrays if a is not None}
    return None if len(torch) > 1 else "torch" if True in torch else "numpy"


def addresses(arrays, family, written):
    """Address of each array whose layout was validated; 0 for None, for freed tensors and for
    read-only arrays at the places `written`."""
    if family == "torch":
        return [0 if a is None else a.data_ptr() for a in arrays]
    if family == "numpy":
        try:
            # Three times as fast as a.ctypes, for writable contiguous arrays.
            return [0 if a is None else _addressof(_from_buffer(a)) for a in arrays]
        except (TypeError, ValueError, BufferError):
            pass
    return [0 if a is None else a.data_ptr() if is_torch(a) else
            a.ctypes.data if i not in written or a.flags.writeable else 0
            for i, a in enumerate(arrays)]


def _fill_torch():
    global _tensor
    torch = sys.modules["torch"]
    _tensor = torch.Tensor
    _TORCH.update({torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16,
                   torch.int32: INT32, torch.int64: INT64, torch.uint8: UINT8})
    _TORCH_OF.update({code: dtype for dtype, code in _TORCH.items()})


def is_torch(a):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(a, getattr(torch, "Tensor", ()))


def _wanted(dtypes):
    names = [DTYPE_NAMES.get(code, code) for code in dtypes]
    if BFLOAT16 in dtypes:
        names[names.index("bfloat16")] += " (uint16 bits in numpy)"
    return " or ".join(names)


def _view_numpy(name, a, dtypes, writable):
    dtype = _NUMPY.get(a.dtype)
    if dtype not in dtypes:
        raise InvalidArgument(f"{name}: got dtype {a.dtype}, wanted {_wanted(dtypes)}")
    if writable and not a.flags.writeable:
        raise InvalidArgument(f"{name}: got a read-only array, wanted a writable one")
    item = _ITEM_BYTES[dtype]
    ptr = a.ctypes.data
    byte_strides = a.strides
    if ptr % item or any(s % item for s in byte_strides):
        raise InvalidArgument(
            f"{name}: got an unaligned array, wanted elements aligned to {item} bytes")
    return ptr, dtype, a.shape, tuple([s // item for s in byte_strides]), None


def _view_torch(name, a, dtypes, writable):
    if not _TORCH:
        _fill_torch()
    dtype = _TORCH.get(a.dtype)
    if dtype not in dtypes:
        raise InvalidArgument(f"{name}: got dtype {a.dtype}, wanted {_wanted(dtypes)}")
    device = a.device
    if device.type == "cpu":
        index = None
    elif device.type == "cuda":
        index = device.index
    else:
        raise InvalidArgument(f"{name}: got a tensor on {device}, wanted cpu or cuda")
    try:
        strides = a.stride()
        ptr = a.data_ptr()
        held = a.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError) as error:
        raise InvalidArgument(f"{name}: got a tensor without plain memory ({error}), wanted a "
                              "strided one") from None
    if ptr % _ITEM_BYTES[dtype]:
        raise InvalidArgument(f"{name}: got an unaligned tensor, wanted elements aligned to "
                              f"{_ITEM_BYTES[dtype]} bytes")
    shape = tuple(a.shape)
    if 0 not in shape:
        last = a.storage_offset() + sum([(n - 1) * s for n, s in zip(shape, strides)])
        if held < (last + 1) * _ITEM_BYTES[dtype]:
            raise InvalidArgument(f"{name}: got a tensor whose storage holds {held} bytes, wanted "
                                  f"{(last + 1) * _ITEM_BYTES[dtype]}")
    return ptr, dtype, shape, strides, index


def view(name, a, dtypes, shape, writable=False, any_order=False):
    """The Array of `a`, or InvalidArgument naming it.

    shape: one entry a dimension; an int is required, a str is a free size's name for the message.
    The last dimension must be contiguous, unless any_order; none may be expanded (stride 0).
    """
    if type(a) is np.ndarray:
        ptr, dtype, got, strides, device = _view_numpy(name, a, dtypes, writable)
    elif is_torch(a):
        ptr, dtype, got, strides, device = _view_torch(name, a, dtypes, writable)
    elif isinstance(a, np.ndarray):
        ptr, dtype, got, strides, device = _view_numpy(name, a, dtypes, writable)
    else:
        raise InvalidArgument(
            f"{name}: got {type(a).__name__}, wanted a numpy array or a torch tensor")
    if len(got) != len(shape):
        raise InvalidArgument(f"{name}: got shape {list(got)}, wanted [{_text(shape)}]")
    kept = []
    for size, want, stride in zip(got, shape, strides):
        if size != want and type(want) is int:
            raise InvalidArgument(f"{name}: got shape {list(got)}, wanted [{_text(shape)}]")
        if size <= 1:
            kept.append(0)
        elif stride <= 0:
            raise InvalidArgument(f"{name}: got strides {list(strides)} (in elements), wanted "
                                  "positive ones")
        else:
            kept.append(stride)
    if kept[-1] > 1 and not any_order:
        raise InvalidArgument(f"{name}: got strides {list(strides)} (in elements), wanted a "
                              "contiguous last dimension")
    return Array(ptr, dtype, got, tuple(kept), device, a)


def _text(shape):
    return ", ".join(str(size) for size in shape)


def device_text(device):
    return "cpu" if device is None else f"cuda:{device}"


def same_device(name, array, device):
    if array.device != device:
        raise InvalidArgument(f"{name}: got an array on {device_text(array.device)}, wanted "
                              f"{device_text(device)} like the others")


def empty_like(source, shape, dtype=None):
    """Uninitialised array of the family and device of `source`; dtype None = its own."""
    if is_torch(source):
        import torch

        if not _TORCH:
            _fill_torch()
        return torch.empty(shape, dtype=source.dtype if dtype is None else _TORCH_OF[dtype],
                           device=source.device)
    return np.empty(shape, source.dtype if dtype is None else _NUMPY_OF[dtype])


def dtype_code(name, dtype):
    """kvtile's code of a numpy or torch dtype, or of a name such as "bfloat16"."""
    if isinstance(dtype, str):
        code = {text: code for code, text in DTYPE_NAMES.items()}.get(dtype)
    else:
        if "torch" in sys.modules and not _TORCH:
            _fill_torch()
        code = _TORCH.get(dtype)
        if code is None:
            try:
                code = _NUMPY.get(np.dtype(dtype))
            except TypeError:
                pass
    if code not in FLOATS:
        raise InvalidArgument(f"{name}: got {dtype}, wanted {_wanted(FLOATS)}")
    return code
