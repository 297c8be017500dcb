"""Batch scripts that hvdrun writes, and those of examples/launch, in real jobs."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "examples" / "launch"
RESUMES = Path(__file__).parent / "programs" / "resumes.py"
# srun's answer to --cpu-bind=none where Slurm binds nothing anyway.
NO_BINDING = "srun: cluster configuration lacks support for cpu binding\n"


@pytest.fixture
def write_script(slurm, tmp_path):
    """`write_script(*arguments)` lets hvdrun write a script."""

    def write_script(*arguments):
        path = tmp_path / "job.sbatch"
        done = slurm.run(BIN / "hvdrun", "--slurm-script", path, "--output", "job-%j.txt", *arguments)
        assert done.returncode == 0, done.stderr
        return path

    return write_script


@pytest.fixture(autouse=True)
def environment_on_path(monkeypatch):
    """As in an environment that is activated."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")


def end_of(slurm, job, folder, name="job", timeout=100):
    """Return the state in which a job ended, and what it said."""
    state = slurm.wait_for(job, ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"], timeout=timeout)["JobState"]
    return state, (folder / f"{name}-{job}.txt").read_text().replace(NO_BINDING, "")


def test_a_script_without_new_start_runs(slurm, submit, write_script, report, tmp_path):
    script = write_script("-np", "4", "-N", "2", "--cpus-per-task", "2", "--time", "5", "python", report)
    state, said = end_of(slurm, submit(script), tmp_path)
    assert state == "COMPLETED", said
    assert sorted(line.split()[1] for line in said.splitlines() if line.startswith("rank")) == [
        "0/4",
        "1/4",
        "2/4",
        "3/4",
    ]
    assert len(re.findall("on n2", said)) == 2


def test_srun_gets_the_cpus_of_each_task(slurm, submit, write_script, tmp_path):
    show = "import os; print('cpus', os.environ['SLURM_CPUS_PER_TASK'], flush=True)"
    script = write_script("-np", "2", "-N", "2", "--cpus-per-task", "3", "python", "-c", show)
    state, said = end_of(slurm, submit(script), tmp_path)
    assert (state, said) == ("COMPLETED", "cpus 3\ncpus 3\n")


def test_a_job_told_before_its_limit_is_queued_again_and_goes_on(slurm, submit, write_script, tmp_path):
    checkpoint = tmp_path / "step"
    options = ["-np", "2", "-N", "2", "--time", "5", "--requeue", "60"]
    job = submit(write_script(*options, "python", RESUMES, checkpoint, "1000000"))
    output = tmp_path / f"job-{job}.txt"
    while not (output.exists() and "from step 0" in output.read_text()):
        assert slurm.state(job)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), output.read_text()
        time.sleep(0.1)
    # What --signal=B:USR1@60 does when the time has come.
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    state = slurm.wait_for(job, ["PENDING", "FAILED", "COMPLETED"], timeout=60)
    assert (state["JobState"], state["Restarts"]) == ("PENDING", "1"), output.read_text()
    slurm.run("scancel", job)  # Slurm would wait two minutes before it starts the job again
    reached = int(checkpoint.read_text())
    assert f"until step {reached}\nqueueing job {job} again\n" in output.read_text()

    # The same script once more, as the queue would start it, with less to do; so it also ends by itself.
    job = submit(write_script(*options, "python", RESUMES, checkpoint, str(reached + 2)))
    state, said = end_of(slurm, job, tmp_path)
    assert (state, said) == ("COMPLETED", f"from step {reached}\nuntil step {reached + 2}\n")


def test_a_failure_is_not_queued_again(slurm, submit, write_script, report, tmp_path):
    script = write_script("-np", "2", "-N", "2", "--time", "5", "--requeue", "60", "python", report, "exit", "3")
    job = submit(script)
    state, said = end_of(slurm, job, tmp_path)
    assert state == "FAILED", said
    assert slurm.state(job)["ExitCode"] == "3:0"
    assert "again" not in said


@pytest.mark.slow
@pytest.mark.timeout(400)  # eight processes import PyTorch, and CI may have two slow cores
def test_the_digits_train_over_srun_and_over_mpirun(slurm, tmp_path):
    digits = ["examples/pytorch_digits.py", "--epochs", "1", "--batch-size", "64"]
    over_mpirun = f"exec mpirun --bind-to none python {' '.join(digits)}"
    jobs = [
        slurm.run("sbatch", "--parsable", f"--output={tmp_path}/job-%j.txt", *script, cwd=ROOT)
        for script in ([EXAMPLES / "cpu.sbatch", *digits[1:]], ["-N2", "--ntasks-per-node=2", "--wrap", over_mpirun])
    ]  # side by side
    for job in jobs:
        state, said = end_of(slurm, job.stdout.strip(), tmp_path, timeout=300)
        assert state == "COMPLETED", said
        (accuracy,) = re.findall(r"accuracy (\d+\.\d) %, \d+ samples/s over 4 ranks", said)
        assert float(accuracy) > 30  # of ten digits, after six steps


@pytest.mark.slow
@pytest.mark.timeout(400)  # eight processes import PyTorch, twice
def test_the_elastic_example_is_queued_again_and_goes_on(slurm, tmp_path):
    output, commits = tmp_path / "job.txt", tmp_path / "commits"

    def submitted(epochs):
        options = ["--parsable", f"--output={output}", f"--export=ALL,COMMITS={commits}"]
        return slurm.run("sbatch", *options, EXAMPLES / "elastic.sbatch", "--epochs", epochs, cwd=ROOT).stdout.strip()

    def until(words, job):
        while not (output.exists() and words in output.read_text()):
            assert slurm.state(job)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), output.read_text()
            time.sleep(0.1)

    job = submitted("1000")
    until("epoch 1 of 1000 on 4 ranks", job)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    state = slurm.wait_for(job, ["PENDING", "FAILED", "COMPLETED"], timeout=60)
    assert (state["JobState"], state["Restarts"]) == ("PENDING", "1"), output.read_text()
    slurm.run("scancel", job)  # Slurm would wait two minutes before it starts the job again
    assert f"queueing job {job} again" in output.read_text()
    output.unlink()

    job = submitted("3")  # as the queue would start it, with less to do: fewer epochs than are done need no step
    state = slurm.wait_for(job, ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"], timeout=200)["JobState"]
    assert state == "COMPLETED", output.read_text()
    assert "hvdrun: start 1 on 4 ranks" in output.read_text()
    assert "goes on from commit" in output.read_text()
    assert "epoch 1 of" not in output.read_text()
    assert not list(commits.iterdir())


def test_the_example_for_uneven_nodes_puts_one_and_three(slurm, submit, report, tmp_path):
    job = submit("--exclusive", EXAMPLES / "uneven.sbatch", report)
    state, said = end_of(slurm, job, tmp_path, "uneven")
    assert state == "COMPLETED", said
    where = sorted(line.split()[1] + " " + line.split()[-1] for line in said.splitlines() if line.startswith("rank"))
    assert where == ["0/4 n1", "1/4 n2", "2/4 n2", "3/4 n2"]
    assert not list(tmp_path.glob("*.hosts"))


def test_all_ranks_of_a_node_see_its_gpus_in_the_example_for_gpus(slurm, submit, tmp_path):
    show = tmp_path / "show.py"
    show.write_text("import os; os.write(1, (os.environ['CUDA_VISIBLE_DEVICES'] + chr(10)).encode())")
    fewer = ["--ntasks-per-node=2", "--cpus-per-task=1", f"--output={tmp_path}/job-%j.txt"]
    state, said = end_of(slurm, submit(*fewer, EXAMPLES / "gpu.sbatch", show), tmp_path)
    assert (state, said) == ("COMPLETED", "0,1,2,3\n" * 4)


@pytest.mark.parametrize("name", ["cpu", "gpu", "uneven"])
def test_slurm_takes_the_options_of_the_examples(slurm, name):
    options = ["--cpus-per-task=1"] if name == "gpu" else []  # nodes have four CPUs here
    done = slurm.run("sbatch", "--test-only", *options, EXAMPLES / f"{name}.sbatch", "train.py", cwd=ROOT)
    assert done.returncode == 0, done.stderr
