"""Commits in a folder: written so that a crash at any moment leaves the one before, and read back by the next start.

A file is a line that says what it is, a pickle, and the SHA-256 of both. It is written beside its place, forced to
the disk, and only then gets its name. The folder belongs to the user who trains: whoever can write there can run code
in the job, as with any pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle

from hvdlite.errors import InvalidRequestError
from hvdlite.observe.log import get_logger

_HEAD = b"hvdlite commit 1\n"
_NAME = re.compile(r"commit-(\d+)")
_KEPT = 2  # commits: the newest, and one to go back to if that cannot be read
_DIGEST = hashlib.sha256().digest_size
_CHUNK = 2**20  # bytes read at once


@dataclass(frozen=True)
class Commit:
    """What was read: its number, and what had been written."""

    number: int
    content: Any


class Commits:
    """The commits in a folder, of which one rank writes and reads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, content: Any) -> bool:
        """Write the next commit, and forget all but the one before. Returns whether it is safe on disk.

        If it is not (a full disk), a warning says so, and the commit before stays the newest.

        Raises:
            InvalidRequestError: something in it cannot be pickled.
        """
        part = ""
        try:
            os.makedirs(self._folder, exist_ok=True)
            place = f"{self._folder}/commit-{max(self._numbers(), default=0) + 1}"
            part = f"{place}.part"
            with open(part, "wb") as file:
                _write(file, content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, place)
            self._force_names()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part)
            get_logger().warning(
                "a commit cannot be written to %s: %s. Training goes on; if the job is started again, it goes on from "
                "the commit before.", self._folder, error.strerror or error,
            )  # fmt: skip
            return False
        except Exception as error:  # pickling runs the objects' own code, which may raise anything
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise InvalidRequestError(
                f"elastic commit: what the state has saved cannot be pickled: {type(error).__name__}: {error}. Keep "
                "only plain values, arrays, and what the state knows (models, optimizers, samplers) in it."
            ) from error
        for old in sorted(self._numbers())[:-_KEPT]:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._folder}/commit-{old}")
        return True

    def read(self) -> Commit | None:
        """Return the newest commit that is whole, None if there is none. One that is torn is told, and left."""
        for number in sorted(self._numbers(), reverse=True):
            place = f"{self._folder}/commit-{number}"
            try:
                with open(place, "rb") as file:
                    return Commit(number, _read(file))
            except (OSError, ValueError) as error:
                get_logger().warning("%s cannot be used, and an older one is looked for: %s", place, error)
        return None

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(found[1]) for name in names if (found := _NAME.fullmatch(name))]

    def _force_names(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _Sum:
    """Passes on what is written, and sums it up."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self._file.write(data)


def _write(file: IO[bytes], content: Any) -> None:
    summed = _Sum(file)
    summed.write(_HEAD)
    cloudpickle.Pickler(summed, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    file.write(summed.hash.digest())


def _read(file: IO[bytes]) -> Any:
    """Return what is in it. Raises ValueError if it is not whole."""
    if file.read(len(_HEAD)) != _HEAD:
        raise ValueError("it does not begin as a commit of this version of hvdlite does")
    rest = os.fstat(file.fileno()).st_size - len(_HEAD) - _DIGEST
    found = hashlib.sha256(_HEAD)
    while rest > 0 and (data := file.read(min(rest, _CHUNK))):
        found.update(data)
        rest -= len(data)
    if rest or file.read() != found.digest():
        raise ValueError("it is torn: its checksum does not fit")
    file.seek(len(_HEAD))
    return pickle.load(file)
