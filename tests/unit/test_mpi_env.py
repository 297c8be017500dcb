"""What the environment is given before MPI starts."""

from __future__ import annotations

import sys

import pytest

from hvdlite.comm.mpi_env import library_of, local_size, misfit, mpi_environment, tolerates_losses


def test_without_a_fabric_open_mpi_does_not_look_for_one():
    assert mpi_environment({}, fabric=False, n_cores=4)["OMPI_MCA_btl"] == "^ofi,uct"
    assert "OMPI_MCA_btl" not in mpi_environment({}, fabric=True, n_cores=4)


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_mpi_yield_when_idle"])
def test_what_the_user_set_stays(name):
    environ = {name: "mine", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert name not in mpi_environment(environ, fabric=False, n_cores=2)


def test_where_ranks_may_be_lost_hosts_are_connected_early_and_by_what_stays_right():
    under_ulfm = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert tolerates_losses(under_ulfm)
    found = mpi_environment(under_ulfm, fabric=False, n_cores=2)
    assert (found["OMPI_MCA_coll"], found["OMPI_MCA_mpi_preconnect_mpi"]) == ("^han", "1")
    assert not tolerates_losses({})
    assert not {"OMPI_MCA_coll", "OMPI_MCA_mpi_preconnect_mpi"} & set(mpi_environment({}, fabric=False, n_cores=2))


@pytest.mark.parametrize(("n_local", "n_cores", "yields"), [(2, 2, False), (3, 2, True), (1, 1, False)])
def test_ranks_yield_only_where_they_outnumber_the_cores(n_local, n_cores, yields):
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(n_local)}
    assert ("OMPI_MCA_mpi_yield_when_idle" in mpi_environment(environ, False, n_cores)) is yields


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"MPI_LOCALNRANKS": "5"}, 5),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "2(x3)"}, None),
    ],
)
def test_launchers_tell_the_local_size(environ, expected):
    assert local_size(environ) == expected


def test_the_defaults_ask_the_machine_and_nothing_else():
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": "100000"}
    assert mpi_environment(environ)["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert environ == {"OMPI_COMM_WORLD_LOCAL_SIZE": "100000"}
    assert set(sys.modules["hvdlite.comm.mpi_env"].__dict__) & {"MPI", "mpi4py"} == set()


HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}
PRRTE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
SRUN_PMI2 = {"SLURM_PROCID": "0", "PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}  # an Open MPI may know it


@pytest.mark.parametrize(
    ("environ", "library", "launcher"),
    [
        (PRRTE, "MPICH", "Open MPI"),
        (HYDRA, "Open MPI", "MPICH"),
        (PRRTE, "Open MPI", None),
        (HYDRA, "MPICH", None),
        (PRRTE, "", None),
        (HYDRA, "", None),
        ({**HYDRA, **PRRTE}, "MPICH", None),  # a job within a job, whichever is the inner one
        ({**HYDRA, **PRRTE}, "Open MPI", None),
        ({**PRRTE, "OMPI_COMM_WORLD_SIZE": "1"}, "MPICH", None),  # alone is right
        (SRUN_PMI2, "Open MPI", None),
        ({"SLURM_PROCID": "0", "PMIX_RANK": "0"}, "MPICH", None),  # an MPICH may know PMIx
        ({}, "MPICH", None),
    ],
)
def test_a_library_that_cannot_join_the_launchers_job_is_noticed(environ, library, launcher):
    assert misfit(environ, library) == launcher


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/x/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so", "MPICH"),
        ("/x/mpi4py/MPI.openmpi.cpython-311-x86_64-linux-gnu.so", "Open MPI"),
        ("/x/mpi4py/MPI.cpython-311-x86_64-linux-gnu.so", ""),
        ("/mpich/mpi4py/MPI.mpiabi.cpython-311-x86_64-linux-gnu.so", ""),
        (None, ""),
    ],
)
def test_the_library_is_known_by_the_module_that_fits_it(file, library):
    assert library_of(file) == library
