"""The command line of `hvdrun`: arguments to a Job, a Job to a launcher, the launcher's exit code back."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hvdlite import as_horovod
from hvdlite._version import __version__
from hvdlite.errors import LaunchError

from . import config_file, forwarding, horovodrun, mpirun, process, silence, slurm_script
from .allocation import Allocation, allocation_of, already_one_of, list_file, spread
from .elastic import options as elastic_options
from .hosts import Faults, Host, parse_hostfile, parse_hosts
from .job import Job
from .kubernetes_options import add_kubernetes_options, kubernetes_text
from .start import Start, start_of
from .starter import LAUNCHERS, Machine, Starter, check_fit, find_starter, fitting_pmi

CANNOT_START = 2  # exit code when no rank was started; argparse's own

_EXAMPLES = """\
examples:
  hvdrun -np 2 python train.py
  hvdrun -np 8 -H node1:4,node2:4 python train.py --epochs 3
  hvdrun python train.py                       # in a job of Slurm, LSF or PBS, with all its tasks
  hvdrun -np 2 --print-command python train.py
  hvdrun -np 2 --as-horovod python horovod_train.py
  hvdrun -np 8 -N 2 --time 60 --slurm-script job.sbatch python train.py
  hvdrun -np 8 -H node1:4,node2:4 --min-np 4 python train.py    # goes on when ranks fail: docs/elastic.md
  hvdrun doctor                       what is installed, what is missing, and a test of two ranks
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdrun` and return its exit code: that of the job, or 2 when it could not be started."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["doctor"]:
        return _doctor(arguments[1:])
    options = _parser().parse_args(arguments)
    if options.check_build:
        return _doctor(["--check-build"])
    try:
        return _launch(options)
    except LaunchError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return CANNOT_START


def _doctor(arguments: Sequence[str]) -> int:
    from . import doctor  # late: what it needs would make every start slower

    return doctor.main(arguments)


def _launch(options: argparse.Namespace) -> int:
    from . import supervise  # late: no other way needs it

    environ = process.environment()
    notes = _merge_file(options) + horovodrun.notes(options)
    more_faults = elastic_options.faults(options)
    if more_faults and (options.slurm_script or options.kubernetes_manifest):
        raise Faults(more_faults)
    if (written := _write(options, environ, notes)) is not None:
        return written
    allocation = _allocation(environ)
    job = job_from(options, None if options.discovery else allocation, more_faults)
    bin_dir = process.bin_dir()
    environ["PATH"] = mpirun.search_path(environ.get("PATH", process.DEFAULT_PATH), bin_dir)
    environ.setdefault("HOME", process.home())  # Open MPI does not start without
    if options.as_horovod:
        environ["PYTHONPATH"] = as_horovod.search_path(environ.get("PYTHONPATH", ""))
    machine = Machine(process.which, process.ask, bin_dir, environ["PATH"])
    starter = find_starter(options.launcher, job, machine)
    if elastic_options.is_elastic(options):
        return _launch_elastic(options, replace(job, allocation=allocation), starter, machine, environ, notes)
    watched = not (options.raw or options.print_command)
    runner = supervise.runner_command(job.output, job.ranks) if watched else []
    start = start_of(job, starter, environ, runner, ["PYTHONPATH"] if options.as_horovod else [])
    if options.print_command:
        return _print_command(start)
    if not start.others:  # else each host is asked whether it has it
        _check_program(job.command[0], environ["PATH"])
    check_fit(options.launcher, starter, job, machine, start.environ)
    _tell(notes + _about(start, starter, options.verbose))
    if start.others and not options.unchecked:
        _check_hosts(job, starter, start.environ, options.start_timeout)
    if not watched:
        return process.run(start.command, start.environ)
    manner = supervise.Manner(
        options.label, options.stamped, options.verbose, options.start_timeout, options.host_timeout
    )
    code = supervise.supervise(start.command, start.environ, job.ranks, manner)
    if code and job.output:
        print(f"hvdrun: exit code {code}; what the ranks wrote is in {job.output}", file=sys.stderr)
    return code


def _launch_elastic(
    options: argparse.Namespace,
    job: Job,
    starter: Starter,
    machine: Machine,
    environ: Mapping[str, str],
    notes: list[str],
) -> int:
    from . import supervise  # late: no other way needs them
    from .elastic import driver, room

    terms = elastic_options.terms_from(options, job.ranks, environ)
    if terms.folder:
        terms = replace(terms, folder=process.absolute(terms.folder))
    shown = ("PYTHONPATH",) if options.as_horovod else ()
    frame = room.Frame(job, terms, starter, environ, shown, options.unchecked, options.start_timeout)
    room.check(frame)
    if options.print_command:
        return _print_command(driver.preview(frame))
    if not job.elsewhere and not terms.script:
        _check_program(job.command[0], machine.path)
    check_fit(options.launcher, starter, job, machine, environ)
    _tell(notes)
    patience = options.start_timeout or terms.timeout
    manner = supervise.Manner(options.label, options.stamped, options.verbose, patience, options.host_timeout)
    code = driver.run(frame, manner)
    if code and job.output:
        _tell([f"exit code {code}; what the ranks wrote is in {job.output}"])
    return code


def _print_command(start: Start) -> int:
    added = [f"{name}={shlex.quote(value)}" for name, value in start.added.items()]
    print(" ".join([*added, shlex.join(start.command)]))
    return 0


def _about(start: Start, starter: Starter, verbose: bool) -> list[str]:
    """Return what is told about a job before it starts."""
    notes = []
    if mpirun.ROOT[0] in start.added:
        notes.append(f"running as root; setting {' and '.join(mpirun.ROOT)} for Open MPI")
    if verbose and start.kept_back:
        notes.append(f"not handed to other hosts, unless named with -x: {', '.join(start.kept_back)}")
    if verbose:
        notes.append(f"{starter.flavour.value}: {shlex.join(start.command)}")
    return notes


def _write(options: argparse.Namespace, environ: Mapping[str, str], notes: list[str]) -> int | None:
    """Write the description of a job, if that is what is asked for, and return the exit code: nothing starts then."""
    manifest = kubernetes_text(options)
    if manifest is not None:
        _tell(notes)
        return process.write_file(options.kubernetes_manifest, manifest)
    if batch := slurm_script.batch_from(options):
        _tell(notes)
        return _write_script(options, batch, environ)
    return None


def _check_hosts(job: Job, starter: Starter, environ: Mapping[str, str], seconds: int | None) -> None:
    from . import visit  # late: jobs on one machine need nothing of it

    if job.allocation:  # the scheduler knows its hosts
        return
    visit.check_hosts(job, starter, environ, seconds)


def _write_script(options: argparse.Namespace, batch: slurm_script.Batch, environ: Mapping[str, str]) -> int:
    """Write a script whose job has an allocation of its own; one in which hvdrun runs now does not count."""
    job = job_from(options, more_faults=slurm_script.faults(options, batch))
    bin_dir = process.bin_dir()
    machine = Machine(process.which, process.ask, bin_dir, mpirun.search_path(environ.get("PATH", ""), bin_dir))
    more = {"PYTHONPATH": as_horovod.search_path(environ.get("PYTHONPATH", ""))} if options.as_horovod else {}
    return process.write_file(
        options.slurm_script, slurm_script.render(job, batch, fitting_pmi(machine), bin_dir, more)
    )


def _tell(notes: list[str]) -> None:
    for note in notes:
        print(f"hvdrun: {note}", file=sys.stderr)


def job_from(options: argparse.Namespace, allocation: Allocation | None = None, more_faults: Sequence[str] = ()) -> Job:
    """Return the Job that arguments describe. All that is wrong with them is told at once, with `more_faults`."""
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    exports, faults = horovodrun.exports(options)
    faults += more_faults
    if options.raw and (options.output_filename or options.stamped or options.label):
        faults.append("--raw: leaves output to the launcher, so that hvdrun can put neither rank nor time in front, "
                      "nor write files. Leave one of them out")  # fmt: skip
    hosts: tuple[Host, ...] = ()
    try:
        hosts = _hosts(options)
    except LaunchError as error:
        faults += error.faults if isinstance(error, Faults) else [str(error)]
    known = options.min_ranks if options.discovery else sum(host.slots for host in hosts)
    ranks = options.ranks or known or (allocation.size if allocation else None)
    if ranks is None and command and not faults:
        faults.append("-np: how many ranks? Say -np N, or name hosts with -H host:slots")
    given = list(map(_standing_in, options.export) if options.as_horovod else options.export)
    named = forwarding.named(given)  # what -x says beats other options
    try:
        job = Job(
            command=command,
            ranks=ranks or 1,
            hosts=hosts,
            allocation=spread(allocation, ranks) if allocation and ranks else allocation,
            exports=(*given, *(export for export in exports if export.partition("=")[0] not in named)),
            bind_to=options.bind_to,
            binding=tuple(shlex.split(options.binding_args)),
            mpi_args=tuple(shlex.split(options.mpi_args)),
            output=process.absolute(options.output_filename) if options.output_filename else "",
            interfaces=tuple(dict.fromkeys(name for text in options.interfaces for name in text.split(","))),
            ssh=_ssh(options),
            tcp=options.tcp,
        )
    except Faults as error:
        raise Faults([*faults, *error.faults]) from None
    if faults:
        raise Faults(faults)
    return job


def _merge_file(options: argparse.Namespace) -> list[str]:
    if not options.config_file:
        return []
    text = process.read_file(options.config_file)
    return config_file.merge(options, config_file.read(text, options.config_file), options.config_file)


def _allocation(environ: Mapping[str, str]) -> Allocation | None:
    if found := already_one_of(environ):
        raise LaunchError(
            f"hvdrun itself was started {found[0]} times ({found[1]}={found[0]}), and each would start all ranks. "
            "Start it once, without srun or mpirun in front"
        )
    path = list_file(environ)
    return allocation_of(environ, process.read_file(path) if path else "")


def _standing_in(export: str) -> str:
    """Return `NAME=value` to export with the stand-in for Horovod on it, if it is PYTHONPATH."""
    name, found, value = export.partition("=")
    return f"{name}={as_horovod.search_path(value)}" if found and name == "PYTHONPATH" else export


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hosts:
        return parse_hosts(options.hosts, "-H")
    if options.hostfile:
        try:
            text = process.read_file(options.hostfile)
        except LaunchError as error:
            raise LaunchError(f"--hostfile: {error}. Name a file with lines such as: node1 slots=4") from error
        return parse_hostfile(text, options.hostfile)
    return ()


def _ssh(options: argparse.Namespace) -> tuple[str, ...]:
    args: tuple[str, ...] = ()
    if options.ssh_port:
        args += ("-p", str(options.ssh_port))
    if options.ssh_identity_file:
        args += ("-i", process.absolute(options.ssh_identity_file))
    if options.start_timeout:
        args += ("-o", f"ConnectTimeout={options.start_timeout}")
    return args


def _check_program(name: str, path: str) -> None:
    """Refuse a command that no rank could start: mpirun would say it once per rank, at length."""
    if process.which(name, path):
        return
    wrong, remedy = "is not a program, neither as a path nor on PATH", "Correct its name, or give its whole path"
    if "/" in name and process.is_file(name):
        wrong, remedy = "is a file that may not be run", f"If it is a program: chmod +x {shlex.quote(name)}"
    if name.endswith(".py"):
        remedy = f"Did you mean: python {name}?"
    raise LaunchError(f"command {name!r} {wrong}. {remedy}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvdrun",
        usage="hvdrun [-np N] [options] command [argument ...]",
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
    add("--bind-to", default="none", metavar="WHAT", help="what each rank is bound to (default: none)")
    add("--mpi-args", default="", metavar="TEXT", help="further arguments for the launcher, as one quoted text")
    add("--as-horovod", action="store_true", help="a program for Horovod, unchanged: import horovod gives hvdlite")
    add("--print-command", action="store_true", help="print the command and start nothing")
    add("--verbose", action="store_true", help="print the command before starting it, and what is not handed on")
    add("-cb", "--check-build", action="store_true", help="print what is installed, and end")
    add("--launcher", choices=LAUNCHERS, default="auto", help="what starts the ranks (default: what is there)")
    add("--config-file", metavar="FILE", help="horovodrun's YAML file; options beat it")
    elastic_options.add_options(parser, where)
    _add_output_options(parser)
    _add_network_options(parser)
    add("-v", "--version", action="version", version=__version__)
    add_kubernetes_options(parser)
    slurm_script.add_options(parser)
    horovodrun.add_options(parser)
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output-filename", metavar="DIR", help="write each rank's output into DIR/rank.N/stdout and stderr")
    add("--label", action="store_true", default=None, help="put the rank in front of each line, also of one rank")
    add("--no-label", dest="label", action="store_false", help="put no rank in front of lines")
    add("--raw", action="store_true", help="leave output and exit code to the launcher; no last lines of a failed rank")
    add("--prefix-output-with-timestamp", "-prefix-timestamp", dest="stamped", action="store_true",
        help="put the time in front of each line")  # fmt: skip


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--network-interfaces", "--network-interface", dest="interfaces", action="append", default=[],
        metavar="A,B", help="network devices to use between hosts")  # fmt: skip
    add("-p", "--ssh-port", type=_whole("port"), metavar="N", help="port of ssh on the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    add(
        "--start-timeout",
        type=_whole("number of seconds"),
        metavar="S",
        help="how long ssh waits for a host, and ranks in hvd.init() for the others",
    )
    add("--host-timeout", type=_seconds, default=silence.LIMIT, metavar="S",
        help=f"how long another host may be out of reach before the job ends (without it {silence.LIMIT}; 0: for ever)",
    )  # fmt: skip
    add("--no-host-check", dest="unchecked", action="store_true", help="do not ask the other hosts first")
    hidden = argparse.SUPPRESS
    add("--binding-args", default="", metavar="TEXT", help=hidden)
    add("--mpi", dest="launcher", action="store_const", const="mpirun", help=hidden)
    add("--jsrun", dest="launcher", action="store_const", const="jsrun", help=hidden)
    add("--tcp", action="store_true", help=hidden)  # Spectrum MPI's


def _seconds(text: str) -> int:
    return 0 if text == "0" else _whole("number of seconds")(text)


def _whole(what: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what} (a whole number, 1 or more)")
        return int(text)

    return read


def _ranks(text: str) -> int:
    text = text.removeprefix("p")  # -np2 is -n with p2 to argparse
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (a whole number, 1 or more)")
    return int(text)
