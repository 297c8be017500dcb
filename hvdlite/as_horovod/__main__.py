"""`python -m hvdlite.as_horovod train.py …`: the interpreter starts anew, with `horovod` on its path."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from hvdlite import config as settings

from . import search_path

_USAGE = """\
usage: python -m hvdlite.as_horovod program.py [argument ...]
       python -m hvdlite.as_horovod -m module [argument ...]

Run a program written for Horovod: `import horovod.torch` gives hvdlite.torch.
"""
_NAME = "hvdlite.as_horovod"


def command_without(argv: Sequence[str]) -> list[str] | None:
    """Return the interpreter's command line `argv` without `-m hvdlite.as_horovod`, or None if it has no such part.

    What stands before stays: `python -u -m pdb -m hvdlite.as_horovod train.py` becomes `python -u -m pdb train.py`.
    """
    for i, argument in enumerate(argv):
        flags = re.fullmatch(r"(-[A-Za-z]*)m(.*)", argument)
        if flags is None or (flags[2] or "".join(argv[i + 1 : i + 2])) != _NAME:
            continue
        kept = [] if flags[1] == "-" else [flags[1]]
        return [*argv[:i], *kept, *argv[i + (1 if flags[2] else 2) :]]
    return None


def main() -> None:
    """Become the program. Returns only when there is none."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if len(sys.argv) > 1 else sys.stderr)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    command = command_without(sys.orig_argv)
    if command is None:
        sys.exit(f"{_NAME}: cannot find '-m {_NAME}' in {sys.orig_argv}; start it in this way.")
    if sys.flags.ignore_environment:
        sys.exit(f"{_NAME}: python -E and -I ignore PYTHONPATH, which it works by; leave them out.")
    # Not runpy: its frames would be in every traceback, and would hide from the watch of exits how the program ends.
    environ = settings.environment()
    environ["PYTHONPATH"] = search_path(environ.get("PYTHONPATH", ""))
    os.execve(sys.executable, [sys.executable, *command[1:]], environ)


if __name__ == "__main__":
    main()
