#!/usr/bin/env python3
# Tests of the capture file format: what write() writes, read() accepts, byte for byte the same
# every time; each kind of damage is refused by name. Standard library only.

import pathlib
import struct
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import capture_format  # noqa: E402

TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 5, 6, 2, 8
QUERY_SHAPE = (TOKENS, NUM_HEADS, HEAD_DIM)
KEY_SHAPE = (TOKENS, NUM_KV_HEADS, HEAD_DIM)
ONE, INF, NAN = 0x3F80, 0xFF80, 0x7FC0


def words(shape, word=ONE):
    count = shape[0] * shape[1] * shape[2]
    return struct.pack(f"<{count}H", *[word] * count)


def capture(layers=(3,)):
    tensors = {}
    metadata = {
        "model": "m",
        "model_package": "p 1",
        "model_license": "l",
        "model_sha256": "0" * 64,
        "text_source": "t",
        "text_sha256": "f" * 64,
        "dtype": "bfloat16",
        "tokens": str(TOKENS),
    }
    for layer in layers:
        prefix = capture_format.prefix(layer, len(layers))
        shapes = (QUERY_SHAPE, KEY_SHAPE, KEY_SHAPE)
        for name, shape in zip(capture_format.TENSORS, shapes):
            tensors[prefix + name] = (shape, words(shape))
        values = (layer, 0.125, 0, 0, 10000)
        for name, value in zip(capture_format.LAYER_KEYS, values):
            metadata[prefix + name] = str(value)
    return tensors, metadata


class CaptureFormat(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "capture.safetensors"

    def assert_refused(self, tensors, metadata, name):
        capture_format.write(self.path, tensors, metadata)
        with self.assertRaisesRegex(capture_format.CaptureError, name):
            capture_format.read(self.path)

    def test_round_trip(self):
        for layers in ((3,), (0, 2, 11)):
            tensors, metadata = capture(layers)
            capture_format.write(self.path, tensors, metadata)
            self.assertEqual(capture_format.read(self.path), (tensors, metadata))

    def test_names_and_order(self):
        self.assertEqual(list(capture((3,))[0]), ["query", "key", "value"])
        tensors, _ = capture((0, 2, 11))
        self.assertEqual(
            capture_format.layer_prefixes(tensors), ["layers.0.", "layers.2.", "layers.11."]
        )

    def test_same_bytes_whatever_the_metadata_order(self):
        tensors, metadata = capture()
        capture_format.write(self.path, tensors, metadata)
        first = self.path.read_bytes()
        capture_format.write(self.path, tensors, dict(reversed(metadata.items())))
        self.assertEqual(self.path.read_bytes(), first)
        (length,) = struct.unpack("<Q", first[:8])
        self.assertEqual(length % 8, 0)

    def test_refused_write_leaves_nothing(self):
        tensors, metadata = capture()
        tensors["key"] = (KEY_SHAPE, b"\0")
        with self.assertRaisesRegex(capture_format.CaptureError, "key: got 1 bytes"):
            capture_format.write(self.path, tensors, metadata)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_every_truncation_is_refused(self):
        capture_format.write(self.path, *capture())
        whole = self.path.read_bytes()
        for length in (*range(0, len(whole), 61), len(whole) - 1):
            self.path.write_bytes(whole[:length])
            with self.assertRaises(capture_format.CaptureError, msg=f"{length} bytes"):
                capture_format.read(self.path)

    def test_non_finite_values(self):
        for name in capture_format.TENSORS:
            for word in (INF, NAN):
                tensors, metadata = capture()
                shape, data = tensors[name]
                tensors[name] = (shape, data[:-2] + struct.pack("<H", word))
                self.assert_refused(tensors, metadata, f"^{name}: got 1 NaN or Inf")

    def test_largest_finite_value(self):
        tensors, metadata = capture()
        tensors["key"] = (KEY_SHAPE, words(KEY_SHAPE, 0x7F7F))
        capture_format.write(self.path, tensors, metadata)
        capture_format.read(self.path)

    def test_missing_tensor(self):
        for name in capture_format.TENSORS:
            tensors, metadata = capture()
            del tensors[name]
            self.assert_refused(tensors, metadata, f"^{name}: missing")

    def test_shapes(self):
        for name, shape in (
            ("query", (TOKENS + 1, NUM_HEADS, HEAD_DIM)),
            ("query", (TOKENS, NUM_HEADS + 1, HEAD_DIM)),
            ("query", (TOKENS, NUM_HEADS, HEAD_DIM + 8)),
            ("value", (TOKENS, NUM_KV_HEADS + 1, HEAD_DIM)),
            ("query", (TOKENS, 0, HEAD_DIM)),
        ):
            tensors, metadata = capture()
            tensors[name] = (shape, words(shape))
            self.assert_refused(tensors, metadata, f"^{name}: got")

    def test_metadata(self):
        for name in capture_format.FILE_KEYS + capture_format.LAYER_KEYS:
            tensors, metadata = capture()
            del metadata[name]
            self.assert_refused(tensors, metadata, f"^metadata {name}: ")
        for name, value in (
            ("tokens", "0"),
            ("window", "-1"),
            ("window", "512.5"),
            ("softmax_scale", "0"),
            ("softmax_scale", "nan"),
            ("rope_theta", "inf"),
            ("text_sha256", "F" * 64),
            ("dtype", "float16"),
        ):
            tensors, metadata = capture()
            metadata[name] = value
            self.assert_refused(tensors, metadata, f"^metadata {name}: got {value}")

    def test_unknown_and_mixed_names(self):
        tensors, metadata = capture()
        self.assert_refused(tensors | {"bias": tensors["key"]}, metadata, "^bias: ")
        self.assert_refused(tensors | {"layers.1.key": tensors["key"]}, metadata, "plain and")

    def test_committed_sample(self):
        sample = ROOT / "examples" / "data" / "smollm2-135m.safetensors"
        tensors, metadata = capture_format.read(sample)
        self.assertEqual(tensors["query"][0], (3000, 9, 64))
        self.assertEqual(tensors["key"][0], (3000, 3, 64))
        self.assertEqual(metadata["model_license"], "Apache-2.0")


if __name__ == "__main__":
    unittest.main()
