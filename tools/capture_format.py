# Capture files: safetensors holding the query, key and value of one or more attention layers.
# One layer is stored as query/key/value, several as layers.<i>.query and so on; every value is
# bfloat16, query is [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim].
# Metadata of a layer carries the same prefix as its tensors. Standard library only; the bytes
# written depend on the arguments alone, so that a capture can be compared by its checksum.

import json
import math
import os
import re
import struct

TENSORS = ("query", "key", "value")
FILE_KEYS = (
    "model",
    "model_package",
    "model_license",
    "model_sha256",
    "text_source",
    "text_sha256",
    "dtype",
    "tokens",
)
LAYER_KEYS = ("layer", "softmax_scale", "window", "softcap", "rope_theta")
DTYPE = "BF16"
ITEM_BYTES = 2


class CaptureError(Exception):
    """What is wrong with a capture, in one line."""


def prefix(layer, num_layers):
    """Prefix of a layer's tensor and metadata names in a file of num_layers layers."""
    return "" if num_layers == 1 else f"layers.{layer}."


def write(path, tensors, metadata):
    """Writes {name: (shape, bytes)} and {name: str} to path, whole or not at all."""
    header = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name, (shape, data) in tensors.items():
        if len(data) != math.prod(shape) * ITEM_BYTES:
            raise CaptureError(f"{name}: got {len(data)} bytes for shape {list(shape)}")
        header[name] = {
            "dtype": DTYPE,
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for _, data in tensors.values():
                file.write(data)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def read(path):
    """Reads and validates a capture: ({name: (shape, bytes)}, {name: str})."""
    with open(path, "rb") as file:
        content = file.read()
    header, data = _split(content)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CaptureError("__metadata__: wanted an object of strings")
    tensors = {}
    end = 0
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            first, last = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if entry["dtype"] != DTYPE:
                raise CaptureError(f"{name}: got dtype {entry['dtype']}, wanted {DTYPE}")
            if len(shape) != 3 or any(not isinstance(n, int) or n < 1 for n in shape):
                raise CaptureError(f"{name}: got shape {list(shape)}, wanted three sizes above 0")
            if first != end or last - first != math.prod(shape) * ITEM_BYTES or last > len(data):
                raise CaptureError(f"{name}: got bytes {first}..{last}, not its shape's, in order")
            tensors[name] = (shape, data[first:last])
            end = last
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"header: malformed tensor entry ({error!r})") from error
    if end != len(data):
        raise CaptureError(f"data: got {len(data)} bytes, the header describes {end}")
    _check_layers(tensors, metadata)
    return tensors, metadata


def layer_prefixes(tensors):
    """Prefixes of the layers in a file, in layer order."""
    found = {name[: len(name) - len(name.rpartition(".")[2])] for name in tensors}
    return sorted(found, key=lambda text: int(text.split(".")[1]) if text else -1)


def _split(content):
    if len(content) < 8:
        raise CaptureError(f"file: got {len(content)} bytes, wanted at least 8")
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise CaptureError(f"header: got length {length}, the file has {len(content) - 8} bytes")
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError as error:
        raise CaptureError(f"header: not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CaptureError("header: wanted a JSON object")
    return header, content[8 + length :]


def _check_layers(tensors, metadata):
    names = "|".join(TENSORS)
    for name in tensors:
        if not re.fullmatch(rf"(layers\.\d+\.)?({names})", name):
            raise CaptureError(f"{name}: wanted query, key, value or layers.<i>. before them")
    groups = layer_prefixes(tensors)
    if not groups:
        raise CaptureError("file: no tensors")
    if "" in groups and len(groups) > 1:
        raise CaptureError("file: plain and layers.<i>. names together")
    for name in FILE_KEYS:
        if not metadata.get(name):
            raise CaptureError(f"metadata {name}: missing")
    for name in ("model_sha256", "text_sha256"):
        if not re.fullmatch("[0-9a-f]{64}", metadata[name]):
            raise CaptureError(f"metadata {name}: got {metadata[name]}, wanted 64 hex digits")
    if metadata["dtype"] != "bfloat16":
        raise CaptureError(f"metadata dtype: got {metadata['dtype']}, wanted bfloat16")
    tokens = _number(metadata, "tokens", int, 1)
    for group in groups:
        _check_layer(group, tensors, metadata, tokens)


def _check_layer(group, tensors, metadata, tokens):
    for name in TENSORS:
        if group + name not in tensors:
            raise CaptureError(f"{group}{name}: missing")
    query, key, value = (tensors[group + name][0] for name in TENSORS)
    if query[0] != tokens or key[0] != tokens:
        raise CaptureError(f"{group}query: got {query[0]} and key {key[0]} tokens, wanted {tokens}")
    if value != key:
        raise CaptureError(f"{group}value: got shape {list(value)}, wanted the key's {list(key)}")
    if query[2] != key[2]:
        raise CaptureError(f"{group}query: got head_dim {query[2]}, wanted the key's {key[2]}")
    if query[1] % key[1]:
        raise CaptureError(f"{group}query: got {query[1]} heads, wanted a multiple of {key[1]}")
    layer = _number(metadata, f"{group}layer", int, 0)
    if group not in ("", prefix(layer, 2)):
        raise CaptureError(f"metadata {group}layer: got {layer}, wanted the name's")
    _number(metadata, f"{group}window", int, 0)
    _number(metadata, f"{group}softcap", float, 0)
    for name in ("softmax_scale", "rope_theta"):
        if _number(metadata, group + name, float, 0) == 0:
            raise CaptureError(f"metadata {group}{name}: got 0, wanted above 0")
    for name in TENSORS:
        bad = _count_non_finite(tensors[group + name][1])
        if bad:
            raise CaptureError(f"{group}{name}: got {bad} NaN or Inf values, wanted none")


def _number(metadata, name, kind, minimum):
    text = metadata.get(name)
    try:
        number = kind(text)
    except (TypeError, ValueError):
        raise CaptureError(f"metadata {name}: got {text}, wanted a number") from None
    if not minimum <= number < math.inf:
        raise CaptureError(f"metadata {name}: got {text}, wanted a finite number >= {minimum}")
    return number


def _count_non_finite(data):
    high = data[1::2]
    # Sound values do not reach 2^127, so that the byte search settles almost every file.
    if 0x7F not in high and 0xFF not in high:
        return 0
    return sum(h & 0x7F == 0x7F and low & 0x80 != 0 for h, low in zip(high, data[0::2]))
