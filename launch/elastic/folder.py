"""The folder of a job of changing size: commits, which rank 0 writes there, and news of hosts, which hvdrun does.

hvdlite/elastic/commits.py and link.py are the other side.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile

from hvdlite.errors import LaunchError

from .. import process

VARIABLE = "HVDLITE_ELASTIC_DIR"
PREFIX = "hvdlite-elastic-"
_COMMIT = re.compile(r"commit-(\d+)")
_NEWS = "hosts-updated"


class Folder:
    """A folder that all hosts see.

    Args:
        given: what the user has named; "": one is made in the current directory, and removed after success.
    """

    def __init__(self, given: str) -> None:
        self._is_ours = not given
        try:
            if given:
                os.makedirs(given, exist_ok=True)
            self.path = given or tempfile.mkdtemp(prefix=PREFIX, dir=process.absolute("."))
        except OSError as error:
            raise LaunchError(
                f"cannot make a folder for commits: {error}. Name one that all hosts see: --elastic-dir DIR"
            ) from error

    def newest(self) -> int | None:
        """Return the number of the newest commit, or None if there is none."""
        return max((int(found[1]) for name in self._names() if (found := _COMMIT.fullmatch(name))), default=None)

    def announce(self, now: float, kind: int) -> None:
        """Let the ranks know that hosts have changed. `kind`: REMOVED and ADDED of roster.py, added up."""
        process.write_bytes(f"{self.path}/{_NEWS}", f"{now:.6f} {kind}\n".encode("ascii"))

    def withdraw(self) -> None:
        """Take back what was announced."""
        self._remove(_NEWS)

    def close(self, is_done: bool) -> str:
        """Remove what is not needed any more, and return where the commits are if they are kept, in words."""
        self.withdraw()
        number = self.newest()
        if not is_done and number is not None:
            if self._is_ours:
                return f"commit {number} is kept: go on from it with --elastic-dir {self.path}"
            return f"commit {number} is kept in {self.path}: the same command goes on from it"
        if self._is_ours:
            shutil.rmtree(self.path, ignore_errors=True)
        for name in self._names() if is_done else []:
            if _COMMIT.fullmatch(name.removesuffix(".part")):
                self._remove(name)
        return ""

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}/{name}")
