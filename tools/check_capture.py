#!/usr/bin/env python3
# Validates a capture file and prints its shapes and metadata. Standard library only.
# Exit status: 0 a sound capture, 1 anything wrong with the file, 2 bad arguments.

import argparse
import hashlib
import sys

import capture_format


def main():
    parser = argparse.ArgumentParser(description="Check a capture of query, key and value.")
    parser.add_argument("file", metavar="FILE", help="safetensors written by capture_kv.py")
    path = parser.parse_args().file
    try:
        tensors, metadata = capture_format.read(path)
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except (OSError, capture_format.CaptureError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    for name, (shape, data) in tensors.items():
        print(f"{name}: bfloat16 {list(shape)}, {len(data)} bytes, all finite")
    for name, value in sorted(metadata.items()):
        print(f"{name}: {value}")
    print(f"sha256: {digest}")
    print(f"{path}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
