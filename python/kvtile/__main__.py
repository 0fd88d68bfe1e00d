"""`python -m kvtile` and the `kvtile` command: the program that the package carries."""

import os
import pathlib
import sys


def main():
    if sys.argv[1:2] == ["vllm-check"]:
        from kvtile.vllm import check

        return check.main(sys.argv[2:])
    program = pathlib.Path(__file__).parent / "bin" / "kvtile"
    if not program.exists():
        print(f"kvtile: no program at {program}: this is a source tree, not an installed package",
              file=sys.stderr)
        return 2
    os.execv(program, ["kvtile", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
