"""Calls of the C ABI with structs filled field by field, for compare_gpu.py: what it times must be
the library alone, with the stream and the workspace in its own hands.

Inputs: a path to libkvtile.so; the structs are the package's. Every failed call raises with the
library's own text.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t

from kvtile._lib import (BFLOAT16, FLOAT16, FLOAT32, AttentionCall, Cache,  # noqa: F401
                         DecodeCall, EncodeCall, Format, SlotMap)

KEY_FP8_E4M3 = 0
TOKEN_MAJOR = 0


class KvtileError(RuntimeError):
    pass


def pointer(array):
    """Address of a numpy array."""
    return array.ctypes.data


class Library:
    def __init__(self, path):
        self._lib = ctypes.CDLL(path)
        self._lib.kvtile_last_error.restype = c_char_p
        self._lib.kvtile_version.restype = c_char_p
        self._lib.kvtile_parse_preset.argtypes = [c_char_p, c_int, c_int, POINTER(Format)]

    def _call(self, name, *args):
        if getattr(self._lib, name)(*args) != 0:
            raise KvtileError(f"{name}: {self._lib.kvtile_last_error().decode()}")

    def version(self):
        return self._lib.kvtile_version().decode()

    def parse_preset(self, name, head_dim):
        fmt = Format()
        self._call("kvtile_parse_preset", name.encode(), head_dim, KEY_FP8_E4M3, ctypes.byref(fmt))
        return fmt

    def slot_layout(self, fmt):
        slot = SlotMap()
        self._call("kvtile_slot_layout", ctypes.byref(fmt), ctypes.byref(slot))
        return slot

    def slot_bytes(self, fmt):
        return self.slot_layout(fmt).slot_bytes

    def encode(self, call):
        self._call("kvtile_encode", ctypes.byref(call), None)

    def decode(self, call):
        self._call("kvtile_decode", ctypes.byref(call))

    def workspace_bytes(self, call):
        need = c_size_t()
        self._call("kvtile_workspace_bytes", ctypes.byref(call), ctypes.byref(need))
        return need.value

    def attend(self, call, report=None):
        self._call("kvtile_attend", ctypes.byref(call),
                   None if report is None else ctypes.byref(report))
