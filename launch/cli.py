"""The command line of `hvdrun`: arguments to a Job, a Job to mpirun, mpirun's exit code back."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from hvdlite import as_horovod
from hvdlite._version import __version__
from hvdlite.errors import LaunchError

from . import mpirun, process
from .horovodrun import add_autotune_options, autotune_exports, refuse_foreign_options
from .job import Host, Job, parse_hostfile, parse_hosts

CANNOT_START = 2  # exit code when no rank was started; argparse's own

_EXAMPLES = """\
examples:
  hvdrun -np 2 python train.py
  hvdrun -np 8 -H node1:4,node2:4 python train.py --epochs 3
  hvdrun -np 2 --print-command python train.py
  hvdrun -np 2 --as-horovod python horovod_train.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdrun` and return its exit code: that of the job, or 2 when it could not be started."""
    options = _parser().parse_args(argv)
    try:
        return _launch(options)
    except LaunchError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return CANNOT_START


def _launch(options: argparse.Namespace) -> int:
    job = job_from(options)
    environ = process.environment()
    bin_dir = process.bin_dir()
    environ["PATH"] = mpirun.search_path(environ.get("PATH", ""), bin_dir)
    if options.as_horovod:
        environ["PYTHONPATH"] = as_horovod.search_path(environ.get("PYTHONPATH", ""))
    program = mpirun.find_mpirun(process.which, bin_dir, environ["PATH"], job)
    flavour = mpirun.flavour_of(process.ask([program, "--version"]))
    command = mpirun.render_command(job, flavour, program, environ)
    added = mpirun.added_environment(job, flavour, process.is_root(), environ)
    if options.as_horovod:
        added["PYTHONPATH"] = environ["PYTHONPATH"]
    if options.print_command:
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in added.items()), shlex.join(command)]))
        return 0
    if not job.hosts:
        _check_program(job.command[0], environ["PATH"])
    if mpirun.ROOT[0] in added:
        print(f"hvdrun: running as root; setting {' and '.join(mpirun.ROOT)} for Open MPI", file=sys.stderr)
    if options.verbose:
        print(f"hvdrun: {flavour.value}: {shlex.join(command)}", file=sys.stderr)
    return process.run(command, {**environ, **added})


def job_from(options: argparse.Namespace) -> Job:
    """Return the Job that parsed arguments describe."""
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    hosts = _hosts(options)
    if options.ranks is None and not hosts and command:
        raise LaunchError("how many ranks? Say -np N, or name hosts with -H host:slots")
    return Job(
        command=command,
        ranks=options.ranks or sum(host.slots for host in hosts) or 1,
        hosts=hosts,
        exports=(
            *(map(_standing_in, options.export) if options.as_horovod else options.export),
            *autotune_exports(options),
        ),
        bind_to=options.bind_to,
        mpi_args=tuple(shlex.split(options.mpi_args)),
    )


def _standing_in(export: str) -> str:
    """Return `NAME=value` to export with the stand-in for Horovod on it, if it is PYTHONPATH."""
    name, found, value = export.partition("=")
    return f"{name}={as_horovod.search_path(value)}" if found and name == "PYTHONPATH" else export


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hosts:
        return parse_hosts(options.hosts)
    if options.hostfile:
        return parse_hostfile(process.read_file(options.hostfile), options.hostfile)
    return ()


def _check_program(name: str, path: str) -> None:
    """Refuse a command that no rank could start: mpirun would say it once per rank, at length."""
    if process.which(name, path):
        return
    hint = f" Did you mean: python {name}?" if name.endswith(".py") else ""
    raise LaunchError(f"command {name!r} is not a program, neither as a path nor on PATH.{hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvdrun",
        usage="hvdrun -np N [options] command [argument ...]",
        description="Run a command on N ranks through the installed MPI.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="ranks", type=_ranks, metavar="N", help="number of ranks")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many ranks each takes")
    where.add_argument("--hostfile", "-hostfile", metavar="FILE", help="the same, one a line: host slots=4")
    add("-x", dest="export", action="append", default=[], metavar="NAME[=VALUE]", help="hand a variable to the ranks")
    add("--bind-to", default="none", metavar="WHAT", help="what mpirun binds each rank to (default: none)")
    add("--mpi-args", default="", metavar="TEXT", help="further arguments for mpirun, as one quoted text")
    add("--as-horovod", action="store_true", help="a program for Horovod, unchanged: import horovod gives hvdlite")
    add("--print-command", action="store_true", help="print the mpirun command and start nothing")
    add("--verbose", action="store_true", help="print the mpirun command before starting it")
    add("-v", "--version", action="version", version=__version__)
    add_autotune_options(parser)
    refuse_foreign_options(parser)
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _ranks(text: str) -> int:
    text = text.removeprefix("p")  # -np2 is -n with p2 to argparse
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (a whole number, 1 or more)")
    return int(text)
