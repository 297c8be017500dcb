"""A pytest plugin that keeps the ranks of an MPI job in step, one test at a time.

    mpirun -n 3 python -m pytest -p hvdlite.testing.lockstep tests/conformance

Every rank runs every test. After each set-up and each call the ranks tell each other how it went: a test that fails
on one rank fails on all, with that rank's traceback, and the next test starts together. A rank that does
not arrive is shown with the stacks of its threads, and the job is ended. Only messages of hvdlite's
own Communicator are used, on a group of their own, so that tests cannot confuse them.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from hvdlite import config as settings
from hvdlite.comm.base import Communicator
from hvdlite.comm.mpi_env import mpi_environment
from hvdlite.errors import describe_ranks

NAME = "hvdlite-lockstep"
_DEADLINE = 20.0  # seconds
_FOLDER = "hvdlite-lockstep-"
_LIMIT = 5  # deadlines that a test gets when no rank at all comes to its end
_SHUTDOWN = (KeyboardInterrupt, pytest.exit.Exception)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "how long a rank waits at the end of a test for the others, seconds"
    parser.addoption("--lockstep-deadline", type=float, default=None, help=text)
    parser.addini("lockstep_deadline", text, default=str(_DEADLINE))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.basetemp is None:  # ranks that share one would also remove old folders at the same time, and fail
        config.option.basetemp = tempfile.mkdtemp(prefix=_FOLDER)
    settings.apply_environment(mpi_environment(settings.environment()))
    from hvdlite.comm import mpi  # starts MPI

    given = config.getoption("--lockstep-deadline")
    deadline = float(config.getini("lockstep_deadline")) if given is None else float(given)
    config.pluginmanager.register(Lockstep(mpi.world(), deadline), NAME)


class Lockstep:
    """The plugin of one rank. Tests find it as `config.pluginmanager.get_plugin(lockstep.NAME)`.

    Attributes:
        comm: the group over which the ranks agree. Not for tests: they make their own.
    """

    def __init__(self, comm: Communicator, deadline: float) -> None:
        self.comm, self.deadline = comm, deadline
        self._early: dict[int, list[bytes]] = {}  # from ranks that are ahead

    def pytest_report_header(self) -> str:
        return f"lockstep: rank {self.comm.rank} of {self.comm.size}, process {os.getpid()}"

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if Path(config.option.basetemp).name.startswith(_FOLDER):
            shutil.rmtree(config.option.basetemp, ignore_errors=True)
        # A rank that ends with a failure makes mpirun kill the others, who may still have to report theirs.
        self.comm.exit_barrier(self.deadline)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._in_step(item, "set-up"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._in_step(item, "call"))

    def _in_step(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        where = f"{phase} of {item.nodeid}"
        result, failure = None, None
        late = [
            threading.Timer(self.deadline, _show_stacks, [f"rank {self.comm.rank}: {where}"]),
            threading.Timer(self.deadline * _LIMIT, self._give_up, [f"{where}: no rank came to its end"]),
        ]
        for timer in late:
            timer.daemon = True
            timer.start()
        began = time.monotonic()
        try:
            result = yield
        except _SHUTDOWN:
            raise
        except BaseException as error:
            failure = error
        finally:
            for timer in late:
                timer.cancel()
        mine = "" if failure is None else _describe(item, failure)
        # A rank that is stuck shows its stacks first, at `began + deadline`.
        outcomes = self._agree(where, mine, max(began + 1.0, time.monotonic()) + self.deadline)
        if failure is not None:
            raise failure
        broken = {rank: text for rank, text in enumerate(outcomes) if text}
        if broken:
            texts = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in broken.items())
            pytest.fail(f"passed on rank {self.comm.rank}, failed on {describe_ranks(broken)}\n{texts}", pytrace=False)
        return result

    def _agree(self, where: str, outcome: str, give_up: float) -> list[str]:
        """Return what each rank says of the test, in rank order."""
        comm = self.comm
        for rank in range(comm.size):
            if rank != comm.rank:
                comm.post(rank, f"{where}\n{outcome}".encode())
        said = {comm.rank: outcome}
        for rank in [rank for rank, messages in self._early.items() if messages]:
            said[rank] = self._read(rank, self._early[rank].pop(0), where)
        while len(said) < comm.size:
            message = comm.poll()
            if message is None:
                if time.monotonic() > give_up:
                    missing = [rank for rank in range(comm.size) if rank not in said]
                    self._give_up(f"{where}: {outcome or 'passed'}; {describe_ranks(missing)} did not come to its end")
                comm.wait(0.1)
            elif message[0] in said:
                self._early.setdefault(message[0], []).append(message[1])
            else:
                said[message[0]] = self._read(message[0], message[1], where)
        return [said[rank] for rank in range(comm.size)]

    def _read(self, rank: int, message: bytes, where: str) -> str:
        theirs, outcome = message.decode(errors="replace").split("\n", 1)
        if theirs != where:
            self._give_up(f"rank {self.comm.rank} is at the {where}, but rank {rank} at the {theirs}")
        return outcome

    def _give_up(self, why: str) -> None:
        _print(f"rank {self.comm.rank}: {why} within {self.deadline} s. The job is ended.")
        self.comm.abort(1)


def _describe(item: pytest.Item, failure: BaseException) -> str:
    return str(item.repr_failure(pytest.ExceptionInfo.from_exception(failure)))


def _show_stacks(where: str) -> None:
    _print(f"{where} still runs:")
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def _print(text: str) -> None:
    print(f"\n{text}", file=sys.__stderr__, flush=True)
