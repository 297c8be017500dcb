"""`hvdlite.run()`: a function on ranks, from a program that is no rank itself. How it is done: launch/function.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite.errors import InvalidRequestError

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    directory: str | None = None,
    mpi_args: str = "",
    executable: str | None = None,
    verbose: bool = False,
) -> list[T]:
    """Run `func(*args, **kwargs)` on ranks and return what it returned on each, in rank order.

        def train(rate):
            hvd.init()
            ...
            return loss

        losses = hvd.run(train, args=(0.1,), np=4)

    For notebooks and scripts that are no rank themselves. Function, arguments and results travel by cloudpickle, so
    closures, lambdas and what was defined in `__main__` work, and a script needs no `__main__` guard: ranks do not
    run it. The ranks import modules from where this process does. What they print comes out here. Ctrl-C ends them.

    Args:
        func: calls `hvd.init()` itself, if it wants to communicate.
        num_proc: number of ranks; `np` is the same. Default: what the hosts take, else 1.
        hosts: as `hvdrun -H`: `"node1:4,node2:4"`. Default: this host, or those of the scheduler's allocation.
        hostfile: a file with lines `node1 slots=4`, instead of `hosts`.
        env: variables that the ranks get in addition.
        timeout: seconds for the whole job.
        directory: where function and results lie meanwhile, as files; all hosts must see it. Default: memory or disk
            of this host, or the current directory if there are `hosts` or a `hostfile`.
        mpi_args: further arguments for mpirun, as one text.
        executable: Python of the ranks. Default: the one that runs this.
        verbose: print the mpirun command.

    Raises:
        RankFailedError: `func` raised on a rank, or a rank ended without a result. It has the number of the first one
            that failed and its traceback; its exception is the cause. All other ranks have been ended.
        LaunchError: the job could not be started, took longer than `timeout`, or something cannot be pickled.
    """
    if num_proc is not None and np is not None and num_proc != np:
        raise InvalidRequestError(f"run(num_proc={num_proc!r}, np={np!r}): they mean the same. Give one of them.")
    from hvdlite.launch import function  # late: nobody else needs it

    results: list[T] = function.run(
        function.Call(func, tuple(args), dict(kwargs or {})),
        function.Start(
            ranks=np if num_proc is None else num_proc, hosts=hosts, hostfile=hostfile, env=dict(env or {}),
            timeout=timeout, directory=directory, mpi_args=mpi_args, executable=executable, verbose=verbose,
        ),
    )  # fmt: skip
    return results
