"""SlotFormat, how one token of one head is stored, and PagedCache, a pool of such slots."""

import copy
import ctypes
import dataclasses

import numpy as np

from kvtile import _lib
from kvtile._arrays import UINT8, Array, is_torch, view
from kvtile.errors import InvalidArgument

_FP8 = {"e4m3": 0, "e4b15": 1}
_LAYOUTS = {"token_major": 0, "head_major": 1}


def presets() -> tuple[str, ...]:
    """Names of the presets, such as "4bit_nc"; the prefix "turboquant_" is accepted everywhere."""
    return tuple(_lib.lib.kvtile_preset_name(i).decode()
                 for i in range(_lib.lib.kvtile_num_presets()))


@dataclasses.dataclass(frozen=True)
class SlotFormat:
    """A preset at a head_dim.

    preset: "k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc", with or without "turboquant_" in front.
    head_dim: elements of a key and of a value. fp8: flavour of 8-bit keys, "e4m3" or "e4b15"
    (k8v4 only; GPUs before 8.9 write e4b15).
    Raises InvalidArgument or Unsupported naming what is outside.
    """

    preset: str
    head_dim: int
    fp8: str = "e4m3"

    def __post_init__(self):
        if self.fp8 not in _FP8:
            raise InvalidArgument(f"fp8: got {self.fp8}, wanted e4m3 or e4b15")
        if not isinstance(self.preset, str):
            raise InvalidArgument(f"preset: got {self.preset!r}, wanted a name")
        if not isinstance(self.head_dim, int):
            raise InvalidArgument(f"head_dim: got {self.head_dim!r}, wanted an int")
        raw = _lib.Format()
        _lib.check(_lib.lib.kvtile_parse_preset(self.preset.encode(), self.head_dim,
                                                _FP8[self.fp8], ctypes.byref(raw)))
        slot = _lib.SlotMap()
        _lib.check(_lib.lib.kvtile_slot_layout(bytes(raw), ctypes.byref(slot)))
        object.__setattr__(self, "packed", bytes(raw))
        object.__setattr__(self, "slot_bytes", slot.slot_bytes)
        for name in ("norm_offset", "value_offset", "scale_offset", "zero_offset"):
            object.__setattr__(self, name, getattr(slot, name))


class PagedCache:
    """A pool of pages that the caller owns; the cache keeps a reference, never a copy.

    pages: uint8, [num_blocks, block_size, num_kv_heads, slot] when layout is "token_major",
    [num_blocks, num_kv_heads, block_size, slot] when it is "head_major". slot >= format.slot_bytes
    (a padded slot's tail is never touched); the outer strides may be anything that keeps slots
    apart, the last dimension is contiguous. Token i of a sequence is row i % block_size of the page
    block_table[i // block_size]; its slot number is page * block_size + i % block_size.
    """

    def __init__(self, pages, format: SlotFormat, layout: str = "token_major"):
        if not isinstance(format, SlotFormat):
            raise InvalidArgument(f"format: got {type(format).__name__}, wanted a SlotFormat")
        if layout not in _LAYOUTS:
            raise InvalidArgument(f"layout: got {layout}, wanted {' or '.join(_LAYOUTS)}")
        self.pages = pages
        self.format = format
        self.layout = layout
        array = self._view(pages)
        num_blocks, first, second, slot = array.shape
        if slot < format.slot_bytes:
            raise InvalidArgument(f"pages: got slots of {slot} bytes, wanted at least "
                                  f"{format.slot_bytes}")
        # A dimension of one element may come with any stride; the descriptor states the dense one.
        strides = [array.strides[2] or slot]
        for inner, stride in ((second, array.strides[1]), (first, array.strides[0])):
            strides.insert(0, stride or max(inner, 1) * strides[0])
        extent = sum((n - 1) * s for n, s in zip(array.shape, strides)) + format.slot_bytes
        token_major = layout == "token_major"
        self.num_blocks = num_blocks
        self.block_size, self.num_kv_heads = (first, second) if token_major else (second, first)
        self.head_dim = format.head_dim
        self.device = array.device
        self._ptr = array.ptr
        self.plans = {}  # attend()'s validated layouts
        self._storage_bytes = None
        if is_torch(pages):
            self._storage_bytes = pages.storage_offset() + (extent if num_blocks else 0)
        self.packed = _lib.pack_cache(
            _LAYOUTS[layout], array.ptr, extent if num_blocks else 0, num_blocks,
            self.block_size, self.num_kv_heads, strides[0],
            *(strides[1:] if token_major else strides[:0:-1]), format.packed)
        # Decoding no slot checks what the library knows of a cache: strides, overlap, extent.
        _lib.check(_lib.lib.kvtile_decode(
            _lib.pack_decode(_lib.FLOAT32, self.packed, *[0] * 10)))

    @classmethod
    def zeros(cls, num_blocks: int, block_size: int, num_kv_heads: int, format: SlotFormat,
              layout: str = "token_major", device=None) -> "PagedCache":
        """A zeroed pool of its own: numpy memory, or a torch tensor when `device` is given."""
        inner = (block_size, num_kv_heads)
        shape = (num_blocks, *(inner if layout == "token_major" else inner[::-1]),
                 format.slot_bytes)
        if device is None:
            return cls(np.zeros(shape, np.uint8), format, layout)
        import torch

        return cls(torch.zeros(shape, dtype=torch.uint8, device=device), format, layout)

    def __deepcopy__(self, memo):
        return PagedCache(copy.deepcopy(self.pages, memo), self.format, self.layout)

    def _view(self, pages, writable=False) -> Array:
        return view("pages", pages, (UINT8,),
                    ("num_blocks", "block_size", "num_kv_heads", "slot")
                    if self.layout == "token_major" else
                    ("num_blocks", "num_kv_heads", "block_size", "slot"), writable)

    def check_alive(self, writable=False):
        """InvalidArgument when the pages' memory is not what it was at construction."""
        pages = self.pages
        if self._storage_bytes is None:  # numpy does not let go of memory that is referred to
            if writable and not pages.flags.writeable:
                raise InvalidArgument("pages: got a read-only array, wanted a writable one")
        elif (pages.data_ptr() != self._ptr or
              pages.untyped_storage().nbytes() < self._storage_bytes):
            raise InvalidArgument("pages: got memory that was freed or moved since the cache was "
                                  "made, wanted the same memory")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's slots, without padding between pages."""
        return self.block_size * self.num_kv_heads * self.pages.shape[-1]

    @property
    def descriptor(self) -> str:
        """One line that says how the bytes are read; keep it beside a stored cache."""
        text = ctypes.create_string_buffer(512)
        _lib.check(_lib.lib.kvtile_cache_descriptor(self.packed, text, len(text), None))
        return text.value.decode()

    def match_descriptor(self, descriptor: str) -> None:
        """InvalidArgument naming the first field that differs."""
        _lib.check(_lib.lib.kvtile_match_descriptor(self.packed, descriptor.encode()))
