"""What a rank of `hvdlite.run()` runs: `python -m hvdlite.launch.on_rank DIRECTORY`. See launch/function.py."""

from __future__ import annotations

import pickle
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle

from hvdlite import config
from hvdlite.errors import LaunchError

from . import process
from .function import CALL, Answer, describe_call


def main(argv: Sequence[str]) -> int:
    """Do what the call in the directory says, and leave the answer there."""
    directory, environ = argv[0], process.environment()
    rank, size = config.launcher_rank(environ) or 0, (config.launcher_size(environ) or (1, ""))[0]
    payload = process.read_bytes(f"{directory}/{CALL}")
    if payload is None:
        raise LaunchError(
            f"{socket.gethostname()} does not see {directory}. "
            "Give hvdlite.run() a directory on a file system that all hosts share: run(..., directory=...)."
        )
    answer = _answer(payload, size)
    process.write_bytes(f"{directory}/rank-{rank}", pickle.dumps(answer))
    if answer.what:
        process.write_bytes(f"{directory}/failed", b"")  # after the answer: who sees this finds that
    return 1 if answer.what else 0


def _answer(payload: bytes, size: int) -> Answer:
    try:
        sys.path[:], pickled = pickle.loads(payload)
        call = pickle.loads(pickled)
        result = call.func(*call.args, **call.kwargs)
    except BaseException as error:  # sys.exit() and Ctrl-C give no result either
        return _failure(error, size)
    try:
        return Answer(size, time.time(), cloudpickle.dumps(result))
    except Exception as error:  # whatever the reduction of an object raises
        what = (
            f"the result of {describe_call(call)}, of type {type(result).__name__}, cannot be pickled: "
            f"{type(error).__name__}: {error}. Return plain values, arrays or a state_dict"
        )
        return Answer(size, time.time(), what=what)


def _failure(error: BaseException, size: int) -> Answer:
    own = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of _answer()
    trace = "".join(traceback.format_exception(type(error), error, own))
    what = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    return Answer(size, time.time(), what=what, trace=trace, error=_pickled(error))


def _pickled(error: Any) -> bytes | None:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:  # whatever the reduction of an object raises
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
