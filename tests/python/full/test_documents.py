"""What docs/python.md shows runs as it stands, and the package carries its command."""

import pathlib
import subprocess
import sys

import pytest

import kvtile
from test_examples import blocks, run


@pytest.mark.parametrize("index", range(2))
def test_documents(index):
    torch_operators, transformers = blocks("docs/python.md")
    run((torch_operators, transformers)[index])


def test_installed_package_carries_library_and_command():
    folder = pathlib.Path(kvtile.__file__).parent
    if "site-packages" not in folder.parts:
        pytest.fail("kvtile: got a source tree, wanted the installed package of make test-python")
    assert (folder / "libkvtile.so").exists()
    for command in ([sys.executable, "-m", "kvtile"],
                    [pathlib.Path(sys.executable).parent / "kvtile"]):
        done = subprocess.run([*command, "inspect", "--preset", "3bit_nc", "--head-dim", "128"],
                              capture_output=True, text=True)
        assert done.returncode == 0 and "102" in done.stdout
