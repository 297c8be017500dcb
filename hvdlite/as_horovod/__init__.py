"""Programs written for Horovod run unchanged: in them, `import horovod` gives hvdlite.

    python -m hvdlite.as_horovod train.py …
    hvdrun --as-horovod -np 2 python train.py …

Both put this folder on PYTHONPATH, where all that it offers is the package `horovod`. So whatever the program
starts finds it as well (workers of a DataLoader, shell scripts, further interpreters), and the program runs as
under plain `python`: its `__main__`, arguments, tracebacks and exit status are Python's own doing.
"""

from __future__ import annotations

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))


def search_path(path: str) -> str:
    """Return the PYTHONPATH `path` with the stand-in for Horovod in front."""
    if FOLDER in path.split(os.pathsep):
        return path
    return os.pathsep.join([FOLDER, path] if path else [FOLDER])
