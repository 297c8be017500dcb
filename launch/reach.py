"""Whether the hosts of a job can be reached and have what it needs: the question to each, and what its answer means.

An mpirun that cannot start its daemons says so late, at length or never. So each host is asked first, through the
very ssh that mpirun will use; launch/visit.py does it. This machine answers the same question, and what a
host has otherwise than this machine is a fault. Text in, text out: nothing is asked here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .flavours import HYDRAS, OPEN_MPIS, Flavour
from .job import Job, is_python

WAIT = 10  # seconds for ssh to connect, unless told otherwise; also what the rest may take
_CONNECT = 3  # seconds for a connection between hosts; neighbours answer within milliseconds
_NEIGHBOURS = 4  # hosts that each host tries to connect to: all pairs of many hosts would be a flood
_HANDED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")

# What each host runs. Its input is this text, so that no shell has to see through quotes. Only lines that begin
# with "@" count: login scripts may print anything.
_SCRIPT = """\
echo "@ host $(uname -n)"
cd {directory} 2>/dev/null || echo "@ lacks directory"
{exports}
command -v {program} >/dev/null 2>&1 || echo "@ lacks program"
v=$({launcher} --version </dev/null 2>/dev/null | head -n 2 | tr '\\n' ' '); echo "@ ${{v:+mpi }}${{v:-lacks mpi}}"
p=$(command -v {python} || command -v python3) && "$p" -c {code} {targets} </dev/null
exit 0
"""

# A port that nobody listens on refuses at once where the way is open. So no port has to be opened for this.
_CODE = f"""
import importlib.util, platform, re, socket, sys
from concurrent.futures import ThreadPoolExecutor
print("@ python", ".".join(platform.python_version_tuple()[:2]))
found = importlib.util.find_spec("hvdlite")
if found and found.origin:
    text = open(found.origin.replace("__init__", "_version"), encoding="utf-8").read()
    print("@ hvdlite", re.search('__version__ = "(.*)"', text)[1])
print("@ devices", *(name for _, name in socket.if_nameindex()))
free = socket.socket()
free.bind(("", 0))
def knock(name):
    try:
        info = socket.getaddrinfo(name, free.getsockname()[1], type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return f"@ unknown {{name}}"
    if info[4][0].startswith("127."):
        print("@ loopback", name, info[4][0])
    with socket.socket(info[0]) as ours:
        ours.settimeout({_CONNECT})
        try:
            ours.connect(info[4])
        except ConnectionRefusedError:
            pass
        except OSError as error:
            return f"@ blocked {{name}} {{error}}"
with ThreadPoolExecutor(32) as threads:
    print(*filter(None, threads.map(knock, sys.argv[1:])), sep="\\n")
"""


@dataclass(frozen=True)
class Answer:
    """What a host said: facts by name; `lacks`; and targets that it could not connect to, with the reason."""

    facts: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    loopback: Mapping[str, str] = field(default_factory=dict)
    blocked: Mapping[str, str] = field(default_factory=dict)


def remote_shell(job: Job, flavour: Flavour, environ: Mapping[str, str]) -> list[str] | None:
    """Return the command that mpirun reaches other hosts by, up to the host; None if that is not known here."""
    words = [*job.mpi_args]
    if flavour in OPEN_MPIS:
        new, old = "PRTE_MCA_plm_ssh_", "OMPI_MCA_plm_rsh_"
        agent = _after(words, "plm_ssh_agent", "plm_rsh_agent") or _first(environ, f"{new}agent", f"{old}agent")
        given = _after(words, "plm_ssh_args", "plm_rsh_args") or _first(environ, f"{new}args", f"{old}args")
    elif flavour in HYDRAS:
        how = _after(words, "-launcher", "-bootstrap") or environ.get("HYDRA_LAUNCHER") or "ssh"
        if how not in ("ssh", "rsh"):
            return None
        agent = _after(words, "-launcher-exec", "-bootstrap-exec") or environ.get("HYDRA_LAUNCHER_EXEC") or how
        given = _first(environ, "HYDRA_LAUNCHER_EXTRA_ARGS")
    else:
        return None
    command = shlex.split((agent or "ssh").partition(":")[0])
    command += job.ssh or shlex.split(given)
    if command[0].rpartition("/")[2] == "ssh":  # no question to a terminal, and no endless wait
        command += ["-o", "BatchMode=yes"]
        if not any("ConnectTimeout=" in word for word in command):
            command += ["-o", f"ConnectTimeout={WAIT}"]
    return command


def question(job: Job, launcher: str, directory: str, environ: Mapping[str, str], targets: Iterable[str]) -> str:
    """Return the text that a host's `sh` is to run; it tries to connect to `targets`."""
    given = dict(export.split("=", 1) for export in job.exports if "=" in export)
    values = {name: given.get(name, environ.get(name)) for name in _HANDED_ON}
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in values.items() if value)
    program = job.command[0]
    return _SCRIPT.format(
        directory=shlex.quote(directory),
        exports=exports,
        program=shlex.quote(program),
        launcher=shlex.quote(launcher),
        python=shlex.quote(program if is_python(program) else "python3"),
        code=shlex.quote(_CODE),
        targets=shlex.join(targets),
    )


def ports_are_chosen(job: Job, environ: Mapping[str, str]) -> bool:
    """Return whether somebody told MPI which ports to use, as for a firewall: then others say nothing."""
    named = [*job.mpi_args, *environ, *job.exports]
    return any(re.search(r"(?i)(^|_)(MCA|MPIR|MPICH|MPIEXEC|tcp|oob|prte).*port(s|_|$)", name) for name in named)


def neighbours(hosts: Sequence[str], place: int) -> list[str]:
    """Return the hosts that the one at `place` is to connect to: the next ones, around."""
    following = [*hosts[place + 1 :], *hosts[:place]]
    return following[:_NEIGHBOURS]


def read(said: str) -> Answer | None:
    """Return the answer in what a host printed, or None if there is none."""
    lines = [line[2:].strip().split(" ", 1) for line in said.splitlines() if line.startswith("@ ")]
    pairs = [(words[0], words[1] if len(words) > 1 else "") for words in lines]
    if "host" not in dict(pairs):
        return None

    def all_of(kind: str) -> list[str]:
        return [value for name, value in pairs if name == kind]

    return Answer(
        facts={name: value for name, value in pairs if name in ("host", "mpi", "python", "hvdlite", "devices")},
        lacks=tuple(all_of("lacks")),
        unknown=tuple(all_of("unknown")),
        loopback=dict(_two(value) for value in all_of("loopback")),
        blocked=dict(_two(value) for value in all_of("blocked")),
    )


def no_answer(
    host: str, address: str, code: int | None, said: str, command: Sequence[str], seconds: float = 2 * WAIT
) -> str:
    """Return why a host gave no answer: from what ssh said, and its exit code (None: it had to be ended)."""
    where = f" ({address})" if address and address != host else ""
    port = _after(command, "-p") or "22"
    last = ([line for line in said.splitlines() if line.strip()] or ["nothing"])[-1].strip()
    again = f"Try: {shlex.join([*command, host, 'true'])}"
    if code is None and "cannot be run" in said:
        return f"{last}. It is needed to reach other hosts (on Debian: apt install openssh-client)"
    if re.search(r"resolve hostname|Name or service not known|nodename nor servname", said):
        return "this name is not known here. Correct it in -H or the host file, or add it to DNS or /etc/hosts"
    if "Connection refused" in said:
        return f"its port {port}{where} is closed: no sshd listens there. Start sshd, or name its port with -p"
    if re.search(r"No route to host|Network is unreachable|timed out", said):
        return f"no answer{where}: it is down, or a firewall keeps port {port} shut. {again}"
    if "Host key verification failed" in said:
        return f"ssh does not know its key, or knows another one. Run `ssh {host}` once and look at the key it shows"
    if "Permission denied" in said:
        return (
            f"ssh would need a password, or the key is refused: {last}. "
            f"Let the key in (`ssh-copy-id {host}`), or name another with -i"
        )
    if code is None:
        return f"it was reached, but did not answer within {seconds:g} s. {again}"
    return f"{command[0]} ended with {code} and said: {last}. {again}"


def faults(
    job: Job, flavour: Flavour, here: Answer, answers: Mapping[str, Answer], directory: str, launcher: str
) -> list[str]:
    """Return what is wrong with the hosts that answered, one text per fault."""
    found: dict[str, list[str]] = {}
    for host, answer in answers.items():
        for text in _of_one(job, flavour, here, answer, directory, launcher):
            found.setdefault(text, []).append(host)
    return [*_same_machine(here, answers), *grouped(found)]


def shut(answers: Mapping[str, Answer], names: Mapping[str, str]) -> list[str]:
    """Return the fault that connections between hosts do not get through, if so; `names` are those of addresses."""
    ways = [
        f"from {host} to {names.get(target, target)} ({why})"
        for host, answer in answers.items()
        for target, why in answer.blocked.items()
    ]
    if not ways:
        return []
    more = f" and {len(ways) - _NEIGHBOURS} more" if len(ways) > _NEIGHBOURS else ""
    return [
        f"ssh works, but connections that MPI needs do not get through: {', '.join(ways[:_NEIGHBOURS])}{more}. "
        "Open the firewall between the hosts for all ports, or name another network with --network-interfaces"
    ]


def grouped(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one text per fault with the hosts that have it in front."""
    return [f"host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}: {text}" for text, hosts in found.items()]


def _of_one(job: Job, flavour: Flavour, here: Answer, there: Answer, directory: str, launcher: str) -> Iterable[str]:
    if "directory" in there.lacks:
        yield f"there is no directory {directory}. Start hvdrun in one that all hosts have, such as a common home"
    if "program" in there.lacks:
        yield f"there is no program {job.command[0]!r}. Install the same environment in the same place on all hosts"
    if "mpi" in there.lacks and "mpi" in here.facts:
        yield f"there is no MPI at {launcher}. Install the same environment in the same place on all hosts"
    yield from _versions(job, here, there)
    if devices := there.facts.get("devices", "").split():
        for name in job.interfaces:
            if name not in devices:
                yield f"there is no network device {name!r} (--network-interfaces); it has {', '.join(devices)}"
    if flavour in HYDRAS and not job.interfaces:  # whose daemons call back by name
        for name in there.unknown:
            yield f"the name {name!r} is not known there. Add it to DNS or /etc/hosts there"
        for name, address in there.loopback.items():
            yield (
                f"there the name {name!r} leads to {address}, which is that host itself. "
                "Correct /etc/hosts there, or name the device between the hosts with --network-interfaces"
            )


def _versions(job: Job, here: Answer, there: Answer) -> Iterable[str]:
    """Yield what differs from here; of Python and hvdlite only if the program is Python."""
    program = job.command[0]
    what = {"mpi": "the MPI there"}
    if is_python(program) and "program" not in there.lacks:
        what |= {"python": f"{program!r} there", "hvdlite": "hvdlite there"}
    for name, subject in what.items():
        ours, theirs = here.facts.get(name), there.facts.get(name)
        if ours and theirs and ours != theirs:
            yield f"{subject} is {_version(theirs)}, here it is {_version(ours)}. Install the same on all hosts"
        elif ours and not theirs and name == "hvdlite":
            yield f"hvdlite is not installed for {program!r} there. Install version {ours}, as here"


def _same_machine(here: Answer, answers: Mapping[str, Answer]) -> Iterable[str]:
    """Yield the names that lead to one machine: its ranks would be counted twice, or wrongly be put together."""
    by_machine: dict[str, list[str]] = {here.facts["host"]: ["this machine"]}
    for host, answer in answers.items():
        by_machine.setdefault(answer.facts["host"], []).append(host)
    for machine, hosts in by_machine.items():
        if len(hosts) > 1:
            yield (
                f"hosts {' and '.join(hosts)}: the one that answers calls itself {machine!r} each time. "
                "Name each machine once, correct what the names lead to, or give each host a name of its own"
            )


def _version(text: str) -> str:
    """Return what matters of a version, such as "5.0.11" of what mpirun says."""
    found = re.search(r"\d+\.\d+(\.\w+)*", text)
    return found[0] if found else text[:40]


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _two(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return first, rest


def _after(words: Sequence[str], *names: str) -> str:
    """Return the word that follows one of `names`, or ""."""
    known = {name.lstrip("-") for name in names}
    return next((value for name, value in pairwise(words) if name.lstrip("-") in known), "")
