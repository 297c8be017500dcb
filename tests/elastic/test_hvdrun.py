"""hvdrun starts jobs again: ranks that are killed at the worst moments, sizes that change, and ends for good."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "programs" / "job.py"
STEPS, BATCH, MOST = 12, 12, 4000
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDRA_", "HVDLITE_", "HOROVOD_")


def environ(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**clean, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **more}


def hvdrun(python, folder, *args, **more: str) -> subprocess.CompletedProcess[str]:
    """Run hvdrun to its end in `folder`, with its process number in the file `pid` there."""
    command = shlex.join([str(python), "-m", "hvdlite.launch", "--no-label", *map(str, args)])
    return subprocess.run(
        ["sh", "-c", f"echo $$ > pid; exec {command}"], cwd=folder, env=environ(**more), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def outcome(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("end ")]
    return json.loads(line.removeprefix("end "))


def undisturbed(steps: int) -> list[int]:
    weights = [0, 0, 0]
    for step in range(steps):
        samples = range(step * BATCH, (step + 1) * BATCH)
        weights = [
            old * 3 + sum(new)
            for old, new in zip(weights, zip(*((n, n * n, 1) for n in samples), strict=True), strict=True)
        ]
    return weights


def check(found: dict, ranks: int, steps: int = STEPS) -> None:
    """Check that it came out as if nothing had happened: each sample was counted once, and ranks are equal."""
    assert (found["ranks"], found["states"], found["steps"]) == (ranks, 1, steps)
    assert found["weights"] == undisturbed(steps)
    assert found["counts"] == [MOST - steps * BATCH, steps * BATCH]


def begun(folder: Path) -> Counter[int]:
    """Return how often rank 0 has begun each step."""
    return Counter(map(int, (folder / "steps").read_text().split()))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "killed", "starts"),
    [("collective", [3], 2), ("collective", [1, 2], 2), ("commit", [0, 3], 2), ("recovery", [0, 2], 3)],
)
def test_a_job_goes_on_from_its_last_commit(mpi, tmp_path, what, killed, starts):
    done = hvdrun(mpi.python, tmp_path, "-np", 4, "--min-np", 2, "python", JOB, tmp_path, what, *killed)
    check(outcome(done), 4)
    repeated = {step: times for step, times in begun(tmp_path).items() if times > 1}
    assert repeated == {5: 2}  # one step: the one that was not committed
    assert [line for line in done.stdout.splitlines() if line.startswith("begin")] == ["begin 4 1"] * 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdrun: start ")]
    assert len(lines) == starts
    for number, line in enumerate(lines[1:], 2):
        assert line.startswith(f"hvdrun: start {number} on 4 ranks on this machine: rank ")
        assert re.search(r"rank \d of 4 .*; goes on from commit 5$", line)
    assert not list(tmp_path.glob("hvdlite-elastic-*"))


@pytest.mark.mpi
def test_a_job_grows_and_shrinks_with_its_hosts(mpi, tmp_path):
    (tmp_path / "hosts").write_text("localhost:2\n")
    args = ["-np", 2, "--min-np", 1, "--host-discovery-script", "cat hosts"]
    found = outcome(done := hvdrun(mpi.python, tmp_path, *args, "python", JOB, tmp_path, "sizes", 2, 4, 3))
    check(found, 3, found["steps"])
    assert found["sizes"] == [2, 4, 3]
    assert set(begun(tmp_path).values()) == {1}  # nothing was repeated
    lines = [line for line in done.stdout.splitlines() if line.startswith("begin")]
    assert lines == ["begin 2 1", "begin 4 1", "begin 3 1"]  # all ranks had one state each time
    assert "start 3 on 3 ranks on localhost:3: there are other hosts, or slots; goes on from commit" in done.stderr


@pytest.mark.mpi
def test_a_job_that_is_asked_to_leave_commits_and_the_next_goes_on(mpi, tmp_path):
    args = ["-np", 2, "--min-np", 2, "--elastic-dir", "kept", "python", JOB, tmp_path, "preempt"]
    first = hvdrun(mpi.python, tmp_path, *args)
    assert first.returncode == 75, first.stderr
    assert "had been asked to leave by a signal" in first.stderr
    assert re.search(r"commit \d+ is kept in .*/kept: the same command goes on from it", first.stderr)
    check(outcome(hvdrun(mpi.python, tmp_path, *args)), 2)
    assert set(begun(tmp_path).values()) == {1}
    assert not list((tmp_path / "kept").iterdir())


def test_a_crash_loop_is_cut_off_and_the_first_cause_told_again(tmp_path):
    # Each start fails otherwise, and only the first of the three shows why.
    code = "n=$(ls | grep -c ran-); [ $OMPI_COMM_WORLD_RANK = 1 ] || exec sleep 100; touch ran-$n; exit $((n + 4))"
    done = hvdrun(sys.executable, tmp_path, "-np", 2, "--min-np", 1, "sh", "-c", code)
    assert done.returncode == 6
    *_, last = [line for line in done.stderr.splitlines() if line.startswith("hvdrun: ")]
    assert "ended with exit code 6. hvdrun gives up after 3 failures in a row without a new commit" in last
    assert last.endswith("ended with exit code 4")
    assert "hvdrun: start 2 on 2 ranks on this machine: rank 1 of 2" in done.stderr
    assert "begins anew" in done.stderr
    assert not list(tmp_path.glob("hvdlite-elastic-*"))  # there was no commit to be kept


def test_a_limit_of_resets_is_kept(tmp_path):
    done = hvdrun(sys.executable, tmp_path, "-np", 1, "--min-np", 1, "--reset-limit", 1, "sh", "-c", "echo x; exit 4")
    assert (done.returncode, done.stdout) == (4, "x\nx\n")
    assert "The job may not start again: --reset-limit 1" in done.stderr


def test_output_files_hold_all_starts(tmp_path):
    args = ["-np", 1, "--min-np", 1, "--reset-limit", 1, "--output-filename", "out"]
    done = hvdrun(sys.executable, tmp_path, *args, "sh", "-c", "echo x; exit 4")
    assert done.returncode == 4
    assert (tmp_path / "out/rank.0/stdout").read_text() == "x\nx\n"
    assert f"what the ranks wrote is in {tmp_path}/out" in done.stderr


def test_too_few_slots_end_a_job_in_time(tmp_path):
    args = ["-np", 2, "--host-discovery-script", "echo localhost:1", "--elastic-timeout", 1]
    done = hvdrun(sys.executable, tmp_path, *args, "true")
    assert done.returncode == 1
    assert "there were fewer than 2 slots for 1 s (--elastic-timeout): localhost:1" in done.stderr


def test_the_timeout_may_come_from_the_environment_and_all_from_a_file(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "config.yaml").write_text("elastic: {min_np: 1, host_discovery_script: 'true', reset_limit: 3}\n")
    args = ["-np", 2, "--config-file", "config.yaml", "true"]
    done = hvdrun(sys.executable, tmp_path, *args, HOROVOD_ELASTIC_TIMEOUT="0.5")
    assert done.returncode == 1
    assert "there were fewer than 1 slot for 0.5 s (--elastic-timeout): no hosts" in done.stderr


def test_with_fewer_slots_than_wanted_it_starts_when_its_time_is_over(tmp_path):
    args = ["-np", 3, "--min-np", 2, "--host-discovery-script", "echo localhost", "--slots", 2, "--elastic-timeout", 1]
    done = hvdrun(sys.executable, tmp_path, *args, "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\nran\n"), done.stderr


def test_a_script_that_fails_at_first_is_told(tmp_path):
    done = hvdrun(sys.executable, tmp_path, "-np", 2, "--host-discovery-script", "hosts.sh", "true")
    assert done.returncode == 2
    assert "--host-discovery-script 'hosts.sh' ended with exit code 127" in done.stderr
    assert "for one in this folder say ./hosts.sh" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_ends_a_job_that_waits_for_hosts(tmp_path, number, code):
    script = "until [ -s pid ]; do sleep 0.05; done; kill -s " + f"{number.name[3:]} $(cat pid)"
    done = hvdrun(sys.executable, tmp_path, "-np", 2, "--host-discovery-script", script, "true")
    assert done.returncode == code, done.stderr
    assert f"the job is not done: hvdrun got {number.name} between two starts" in done.stderr


def test_what_would_be_run_is_shown_for_the_hosts_that_there_are(tmp_path):
    args = ["-np", 2, "--host-discovery-script", "printf 'a:2\\nb:1\\n'", "--print-command"]
    done = hvdrun(sys.executable, tmp_path, *args, "true")
    assert done.returncode == 0, done.stderr
    assert f"HVDLITE_ELASTIC_DIR={tmp_path}/hvdlite-elastic-XXXX" in done.stdout
    assert "-np 3" in done.stdout and "--host a:2,b:1" in done.stdout
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["pid"]
