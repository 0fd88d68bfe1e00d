"""The Python of README.md runs as it stands; so does what docs/python.md shows where torch is."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(document):
    found = re.findall(r"\n```python\n(.*?)```\n", (ROOT / document).read_text(), re.DOTALL)
    assert found, f"{document}: no block fenced python"
    return found


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme():
    (code,) = blocks("README.md")
    out = run(code)
    assert "bytes of workspace" in out and "relative error" in out


def test_the_command_says_when_it_is_not_there():
    package = pathlib.Path(__import__("kvtile").__file__).parent
    done = subprocess.run([sys.executable, "-m", "kvtile", "inspect", "--preset", "3bit_nc",
                           "--head-dim", "128"], capture_output=True, text=True)
    if (package / "bin" / "kvtile").exists():
        assert done.returncode == 0 and "102" in done.stdout
    else:
        assert done.returncode == 2 and "not an installed package" in done.stderr
