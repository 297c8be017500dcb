"""Tells hvdrun that this rank has come to `init()`, and that it is through; in elastic jobs also how training goes.

It has to be told beforehand: MPI's start waits for all ranks and holds Python's lock meanwhile. hvdrun's runner,
which started this program, gave it a pipe for it; launch/arrivals.py is the other end. Elsewhere nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping

VARIABLE = "HVDRUN_ARRIVAL"  # the pipe's descriptor and its number in the kernel, `FD:INODE`


@contextlib.contextmanager
def told(environ: Mapping[str, str], is_elastic: bool = False) -> Iterator[None]:
    """Tell that this rank comes to `init()`, and at the end of the block that it is through.

    Once per process, unless the job is elastic, which has more to tell: else the pipe is closed then.
    """
    fd = _pipe(environ)
    if fd is None:
        yield
        return
    _write(fd, b"+")
    try:
        yield
    finally:
        _write(fd, b"-")
        if not is_elastic:
            os.close(fd)


def tell(mark: bytes, environ: Mapping[str, str]) -> None:
    """Tell a mark of an elastic job (hvdlite/elastic/link.py), where hvdrun has started this rank."""
    fd = _pipe(environ)
    if fd is not None:
        _write(fd, mark)


def has_runner(environ: Mapping[str, str]) -> bool:
    """Return whether hvdrun listens to this rank."""
    return _pipe(environ) is not None


def _pipe(environ: Mapping[str, str]) -> int | None:
    """Return the descriptor if it is that pipe: a wrapper may have closed it, and another file have its number now."""
    fd, _, inode = environ.get(VARIABLE, "").partition(":")
    if not (fd.isdecimal() and inode.isdecimal()):
        return None
    try:
        found = os.fstat(int(fd))
    except OSError:
        return None
    return int(fd) if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode) else None


def _write(fd: int, mark: bytes) -> None:
    with contextlib.suppress(OSError):  # the runner is gone, and ends this program anyway
        os.write(fd, mark)
