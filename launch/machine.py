"""What `hvdrun doctor` reads of this machine: cores, memory file system, programs. Nothing is started or changed."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import time

# What Open MPI 5, 4 and MPICH call their shared memory. hvdlite's own has no name any more once all ranks have it.
_SEGMENTS = ("sm_segment.", "vader_segment.", "mpich_shm_")
_SETTLED = 10.0  # seconds; a younger one may belong to a job that is just starting


def cores() -> tuple[int, list[int]]:
    """Return how many cores there are, and the numbers of those that this process may use."""
    return os.cpu_count() or 1, sorted(os.sched_getaffinity(0))


def core_quota() -> float | None:
    """Return how many cores' time this container gets, or None if nothing limits it."""
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return int(words[0]) / int(words[1])


def file_system(path: str) -> tuple[int, int] | None:
    """Return the size of the file system at `path` and what is free of it, in bytes, or None if there is no such."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def leftovers(directory: str) -> list[tuple[str, int]]:
    """Return the segments of killed MPI jobs in `directory` with their bytes: of this user, and mapped by nobody.

    That nobody maps them is known of the processes that can be seen from here.
    """
    mapped = "".join(_read(path) for path in glob.glob("/proc/[0-9]*/maps"))
    found = []
    for name in sorted(_names(directory)):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            settled = time.time() - status.st_mtime > _SETTLED
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and settled and path not in mapped:
                found.append((path, status.st_blocks * 512))
    return found


def folders_with(names: tuple[str, ...], path: str) -> list[str]:
    """Return the first of the programs `names` in every folder of `path` that has one; each folder once."""
    found: dict[str, str] = {}
    for folder in filter(None, path.split(":")):
        for name in names:
            program = os.path.join(folder, name)
            if os.access(program, os.X_OK) and os.path.isfile(program):
                found.setdefault(os.path.realpath(folder), program)
                break
    return list(found.values())


def tracing_scope() -> str:
    """Return Yama's setting of who may look into whose memory, "" without Yama."""
    return _read("/proc/sys/kernel/yama/ptrace_scope").strip()


def _names(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.startswith(_SEGMENTS)]
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
