"""From a job to what is run: the launcher's command line and its environment. One job may be started several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import forwarding, mpirun, process
from .flavours import HYDRAS
from .job import Job
from .starter import Starter


@dataclass(frozen=True)
class Start:
    """A command and what it runs in.

    Attributes:
        environ: all of it.
        added: what hvdrun has added to the environment that it was started in, and tells with --print-command.
        others: hosts other than this machine.
        kept_back: variables that do not go to them.
    """

    command: list[str]
    environ: dict[str, str]
    added: dict[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    kept_back: tuple[str, ...] = ()


def start_of(
    job: Job, starter: Starter, environ: Mapping[str, str], runner: Sequence[str] = (), shown: Sequence[str] = ()
) -> Start:
    """Return how `job` is started.

    Args:
        environ: of hvdrun, with what its options say.
        runner: what stands in front of the program on each rank.
        shown: names in `environ` that are to be shown as added, too.
    """
    added = mpirun.added_environment(job, starter.flavour, process.is_root(), environ)
    others = tuple(host.name for host in job.hosts if not process.is_this_machine(host.name))
    kept_back = tuple(forwarding.left_out(environ, job.exports)) if others else ()
    if starter.flavour in HYDRAS:  # which hand on all that they have
        environ = {name: value for name, value in environ.items() if name not in kept_back}
    whole = {**environ, **added}
    command = mpirun.render_command(job, starter.flavour, starter.program, whole, starter.pmi, runner)
    added.update({name: environ[name] for name in shown})
    return Start(command, whole, added, others, kept_back)
