"""What compare_gpu.py measures kvtile against, in plain PyTorch and Triton.

Dense: PyTorch's attention over uncompressed K/V. Tiled: the tiled reference, that is dequantise a
tile to fp16, un-rotate keys by a matrix product, copy to bf16, dense attention, merge by lse.
SplitDecode: one query token, keys split over programs, each query head reads the cache for itself.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

import capi

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
NAMES = {"flash": "flash", "cudnn": "cuDNN"}


def heads_as_rows(query, num_kv_heads):
    """[q_len, num_heads, head_dim] to [1, num_kv_heads, group * q_len, head_dim]."""
    q_len, num_heads, head_dim = query.shape
    return query.view(q_len, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(
        1, num_kv_heads, -1, head_dim)


def rows_as_heads(out, q_len):
    """The inverse, of any trailing shape."""
    num_kv_heads = out.shape[1]
    rows = out.reshape(num_kv_heads, -1, q_len, *out.shape[3:])
    return rows.flatten(0, 1).transpose(0, 1)


class Dense:
    def __init__(self, key, value):
        self._key, self._value = (x.transpose(0, 1)[None].contiguous() for x in (key, value))

    def attend(self, query, backend, fold=True):
        """Every row sees every key. `fold`: the query heads of a KV head as rows, K/V as they are."""
        with sdpa_kernel(BACKENDS[backend]):
            if fold:
                out = torch.nn.functional.scaled_dot_product_attention(
                    heads_as_rows(query, self._key.shape[1]), self._key, self._value)
                return rows_as_heads(out, query.shape[0])
            return torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None], self._key, self._value,
                enable_gqa=True)[0].transpose(0, 1)


def attend_with_lse(query, key, value, backend):
    """query [1, heads, rows, head_dim] to out and lse [heads, rows]."""
    if backend == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, False)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, False, False)[:2]
    return out, lse.reshape(query.shape[1], query.shape[2])


def hadamard(size, dtype, device):
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(dtype)


@triton.jit
def load_half(pages, address, live):
    low = tl.load(pages + address, mask=live, other=0).to(tl.uint16)
    high = tl.load(pages + address + 1, mask=live, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_codes(pages, address, d, live, BITS: tl.constexpr):
    at = address[:, None] + (d * BITS // 8)[None, :]
    word = tl.load(pages + at, mask=live[:, None], other=0).to(tl.int32)
    if 8 % BITS != 0:
        word |= tl.load(pages + at + 1, mask=live[:, None], other=0).to(tl.int32) << 8
    return (word >> (d * BITS % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def load_slots(pages, levels, base, live, D: tl.constexpr, KEY_BITS: tl.constexpr,
               VALUE_BITS: tl.constexpr, NORM: tl.constexpr, VALUE: tl.constexpr,
               SCALE: tl.constexpr):
    """Keys as stored (rotated presets: in the Hadamard space) and values, fp32."""
    d = tl.arange(0, D)
    if KEY_BITS == 8:
        byte = tl.load(pages + base[:, None] + d[None, :], mask=live[:, None], other=0)
        key = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        key = tl.load(levels + load_codes(pages, base, d, live, KEY_BITS))
        norm = load_half(pages, base + NORM, live)
        key *= (norm / tl.sqrt(tl.sum(key * key, 1)))[:, None]
    code = load_codes(pages, base + VALUE, d, live, VALUE_BITS).to(tl.float32)
    scale = load_half(pages, base + SCALE, live)
    zero = load_half(pages, base + SCALE + 2, live)
    return key, code * scale[:, None] + zero[:, None]


@triton.jit
def dequantise_kernel(pages, slots, levels, key_out, value_out, first, count, num_kv_heads,
                      SLOT: tl.constexpr, D: tl.constexpr, KEY_BITS: tl.constexpr,
                      VALUE_BITS: tl.constexpr, NORM: tl.constexpr, VALUE: tl.constexpr,
                      SCALE: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    live = token < count
    slot = tl.load(slots + first + token, mask=live, other=0)
    key, value = load_slots(pages, levels, (slot * num_kv_heads + head) * SLOT, live, D, KEY_BITS,
                            VALUE_BITS, NORM, VALUE, SCALE)
    out = ((token * num_kv_heads + head) * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(key_out + out, key.to(tl.float16), mask=live[:, None])
    tl.store(value_out + out, value.to(tl.float16), mask=live[:, None])


@triton.jit
def split_decode_kernel(pages, slots, levels, query, partial, lse, num_tokens, per_split,
                        num_kv_heads, group, softmax_scale, SLOT: tl.constexpr, D: tl.constexpr,
                        KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, NORM: tl.constexpr,
                        VALUE: tl.constexpr, SCALE: tl.constexpr, TOKENS: tl.constexpr):
    head = tl.program_id(0)
    split = tl.program_id(1)
    d = tl.arange(0, D)
    q = tl.load(query + head * D + d)
    top = float("-inf")
    total = 0.0
    out = tl.zeros([D], tl.float32)
    end = tl.minimum((split + 1) * per_split, num_tokens)
    for begin in range(split * per_split, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        live = token < end
        slot = tl.load(slots + token, mask=live, other=0)
        base = (slot * num_kv_heads + head // group) * SLOT
        key, value = load_slots(pages, levels, base, live, D, KEY_BITS, VALUE_BITS, NORM, VALUE,
                                SCALE)
        score = tl.where(live, tl.sum(key * q[None, :], 1) * softmax_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        weight = tl.exp(score - new_top)
        keep = tl.exp(top - new_top)
        total = total * keep + tl.sum(weight, 0)
        out = out * keep + tl.sum(weight[:, None] * value, 0)
        top = new_top
    at = split * tl.num_programs(0) + head
    tl.store(partial + at * D + d, out / total)
    tl.store(lse + at, top + tl.log(total))


class Slots:
    """Where a preset's fields lie, and its levels as the library decodes them."""

    def __init__(self, cache):
        library, fmt = cache.library, cache.format
        layout = library.slot_layout(fmt)
        self.head_dim = fmt.head_dim
        self.key_bits = layout.key_bytes * 8 // fmt.head_dim
        self.value_bits = (layout.scale_offset - layout.value_offset) * 8 // fmt.head_dim
        self.fields = (layout.slot_bytes, fmt.head_dim, self.key_bits, self.value_bits,
                       max(layout.norm_offset, 0), layout.value_offset, layout.scale_offset)
        self.rotated = self.key_bits < 8
        self.levels = torch.zeros(16, device=cache.pages.device)
        if self.rotated:
            self.levels = self._levels(cache, layout)

    def _levels(self, cache, layout):
        """The codes 0, 1, ... with norm 1, decoded: levels up to a factor that cancels."""
        codes = np.arange(self.head_dim) % (1 << self.key_bits)
        bits = (codes[:, None] >> np.arange(self.key_bits)) & 1
        slot = np.zeros(layout.slot_bytes, np.uint8)
        slot[:layout.key_bytes] = np.packbits(bits.reshape(-1).astype(np.uint8), bitorder="little")
        slot[layout.norm_offset:layout.norm_offset + 2] = np.float16(1).reshape(1).view(np.uint8)
        slots = np.zeros(1, np.int64)
        key, value = np.empty((2, 1, 1, self.head_dim), np.float32)
        cache.library.decode(capi.DecodeCall(
            dtype=capi.FLOAT32, cache=capi.Cache(
                layout=capi.TOKEN_MAJOR, pages=capi.pointer(slot), pages_bytes=slot.nbytes,
                num_blocks=1, block_size=1, num_kv_heads=1, format=cache.format),
            slot_mapping=capi.pointer(slots), num_tokens=1,
            key=capi.pointer(key), value=capi.pointer(value), unrotate_keys=0))
        return torch.from_numpy(key[0, 0, :16].copy()).cuda()


class Tiled:
    def __init__(self, cache, tile=32768):
        self._cache, self._tile, self._slots = cache, tile, Slots(cache)
        shape = (tile, cache.shape.num_kv_heads, cache.shape.head_dim)
        self._key, self._value = (torch.empty(shape, dtype=torch.float16, device="cuda")
                                  for _ in range(2))
        self._rotation = hadamard(shape[2], torch.float16, "cuda")

    def _dequantise(self, first, count):
        cache, slots = self._cache, self._slots
        dequantise_kernel[(triton.cdiv(count, 16), cache.shape.num_kv_heads)](
            cache.pages, cache.slots[0], slots.levels, self._key, self._value, first, count,
            cache.shape.num_kv_heads, *slots.fields, TOKENS=16)
        key, value = self._key[:count], self._value[:count]
        if slots.rotated:
            key = (key.view(-1, slots.head_dim) @ self._rotation).view_as(key)
        return (x.transpose(0, 1)[None].to(torch.bfloat16, memory_format=torch.contiguous_format)
                for x in (key, value))

    def attend(self, query, backend):
        """Every row sees the whole cache; out fp32 [q_len, num_heads, head_dim] and lse."""
        rows = heads_as_rows(query, self._cache.shape.num_kv_heads)
        out = lse = None
        for first in range(0, self._cache.num_tokens, self._tile):
            key, value = self._dequantise(first, min(self._tile, self._cache.num_tokens - first))
            part, part_lse = attend_with_lse(rows, key, value, backend)
            part = part[0].float()
            if out is None:
                out, lse = part, part_lse
                continue
            both = torch.logaddexp(lse, part_lse)
            out = out * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
            lse = both
        q_len = query.shape[0]
        return rows_as_heads(out[None], q_len), rows_as_heads(lse[None], q_len)


class SplitDecode:
    SPLITS = 64

    def __init__(self, cache):
        self._cache, self._slots = cache, Slots(cache)
        self._rotation = hadamard(cache.shape.head_dim, torch.float32, "cuda")
        shape = (self.SPLITS, cache.shape.num_heads, cache.shape.head_dim)
        self._partial = torch.empty(shape, device="cuda")
        self._lse = torch.empty(shape[:2], device="cuda")

    def attend(self, query):
        """query [1, num_heads, head_dim]; out fp32."""
        cache, slots = self._cache, self._slots
        rotated = query[0].float()
        if slots.rotated:
            rotated = rotated @ self._rotation
        split_decode_kernel[(cache.shape.num_heads, self.SPLITS)](
            cache.pages, cache.slots[0], slots.levels, rotated.contiguous(), self._partial,
            self._lse, cache.num_tokens, triton.cdiv(cache.num_tokens, self.SPLITS),
            cache.shape.num_kv_heads, cache.shape.group, cache.shape.head_dim**-0.5, *slots.fields,
            TOKENS=32)
        weight = self._lse.softmax(0)
        return (weight[..., None] * self._partial).sum(0)[None]
