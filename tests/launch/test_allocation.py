"""What schedulers' variables say: hosts, how many ranks each takes, and how many there are."""

from __future__ import annotations

import pytest

from hvdlite.launch.allocation import Allocation, Scheduler, allocation_of, list_file, spread
from hvdlite.launch.hosts import Faults, Host

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-10],gpu1", "SLURM_TASKS_PER_NODE": "2(x3),1"}
LSF = {"LSB_JOBID": "7"}


def test_slurm_names_nodes_and_tasks():
    found = allocation_of({**SLURM, "SLURM_NTASKS": "7"})
    assert found == Allocation(
        Scheduler.SLURM, (Host("n08", 2), Host("n09", 2), Host("n10", 2), Host("gpu1", 1)), 7
    )  # fmt: skip
    assert found.size == 7


def test_without_a_number_of_tasks_slurms_slots_are_added_up():
    assert allocation_of(SLURM).size == 7


@pytest.mark.parametrize("environ", [{"SLURM_JOB_ID": "7"}, {"LSB_JOBID": "7"}, {"PBS_JOBID": "7"}])
def test_an_allocation_that_tells_nothing_has_no_size(environ):
    assert allocation_of(environ).size is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two'"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, r"SLURM_JOB_NODELIST='n\[1-'"),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, "are 4 nodes, SLURM_TASKS_PER_NODE='2.x2.' are 2"),
    ],
)
def test_variables_that_cannot_be_read_are_quoted(changed, message):
    with pytest.raises(Faults, match=message):
        allocation_of({**SLURM, **changed})


def test_lsf_names_hosts_and_slots_in_either_variable():
    assert allocation_of({**LSF, "LSB_MCPU_HOSTS": "a 2 b 1"}).hosts == (Host("a", 2), Host("b", 1))
    assert allocation_of({**LSF, "LSB_HOSTS": "a a b"}).hosts == (Host("a", 2), Host("b", 1))


def test_under_csm_the_batch_host_takes_no_rank_and_slots_are_cores():
    found = allocation_of({**LSF, "CSM_ALLOCATION_ID": "1", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"})
    assert found.size is None
    assert spread(found, 4).hosts == (Host("n1", 2), Host("n2", 2))


def test_pbs_lists_a_host_once_per_rank_in_a_file():
    environ = {"PBS_JOBID": "7", "PBS_NODEFILE": "/nodes"}
    assert list_file(environ) == "/nodes"
    found = allocation_of(environ, "a\na\nb\n")
    assert (found.hosts, found.size) == ((Host("a", 2), Host("b", 1)), 3)
    assert spread(found, 9) is found


def test_hosts_that_pbs_lists_once_take_what_is_asked_for_evenly():
    found = allocation_of({"PBS_JOBID": "7"}, "a\nb\n")
    assert found.size == 2
    assert spread(found, 5).hosts == (Host("a", 3), Host("b", 2))


def test_grid_engine_lists_hosts_and_slots():
    environ = {"PE_HOSTFILE": "/pe"}
    assert list_file(environ) == "/pe"
    assert allocation_of(environ, "a 2 all.q UNDEFINED\nb 1 all.q <NULL>\n").hosts == (Host("a", 2), Host("b", 1))


def test_outside_of_an_allocation_there_is_none():
    assert allocation_of({"SLURM_CONF": "/etc/slurm.conf", "PBS_NODEFILE": "/stale"}) is None
    assert list_file({"PBS_NODEFILE": "/stale"}) is None
