"""Tests below tests/python share reference.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
