"""What the environment is given before MPI starts."""

from __future__ import annotations

import sys

import pytest

from hvdlite.comm.mpi_env import local_size, mpi_environment


def test_without_a_fabric_open_mpi_does_not_look_for_one():
    assert mpi_environment({}, fabric=False, n_cores=4)["OMPI_MCA_btl"] == "^ofi,uct"
    assert "OMPI_MCA_btl" not in mpi_environment({}, fabric=True, n_cores=4)


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "OMPI_MCA_osc", "OMPI_MCA_mpi_yield_when_idle"])
def test_what_the_user_set_stays(name):
    environ = {name: "mine", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert name not in mpi_environment(environ, fabric=False, n_cores=2)


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
