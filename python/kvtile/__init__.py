"""kvtile: exact attention straight out of a packed TurboQuant key-value cache.

Arrays are numpy arrays or torch tensors, on the host or on a CUDA device; nothing is copied. numpy
has no bfloat16: where a bfloat16 array is accepted, a uint16 array holds its bits.
"""

from kvtile._lib import Device, RunReport, backends, devices, version
from kvtile.cache import PagedCache, SlotFormat, presets
from kvtile.errors import (InvalidArgument, KvtileError, NonFinite, OutOfRange, Unavailable,
                           Unsupported, ValueOverflow, WorkspaceTooSmall)
from kvtile.ops import (EncodeReport, attend, decode, encode, merge_states, workspace_bytes)

__version__ = version()
__all__ = [
    "Device", "EncodeReport", "InvalidArgument", "KvtileError", "NonFinite", "OutOfRange",
    "PagedCache", "RunReport", "SlotFormat", "Unavailable", "Unsupported", "ValueOverflow",
    "WorkspaceTooSmall", "attend", "backends", "decode", "devices", "encode", "merge_states",
    "presets", "version", "workspace_bytes",
]
