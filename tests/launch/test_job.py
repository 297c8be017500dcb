"""Jobs, hosts and hostfiles: text to values, with messages that quote the text."""

from __future__ import annotations

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch.hosts import Faults
from hvdlite.launch.job import Host, Job, parse_hostfile, parse_hosts


def test_hosts_are_read_in_order():
    assert parse_hosts("b:2,a:10, c") == (Host("b", 2), Host("a", 10), Host("c", 1))


def test_a_hostfile_is_read_in_both_spellings():
    text = "# cluster\nnode-1.lan slots=4\n\nnode2:3   # spare\nnode3\nnode4 slots = 2\n"
    expected = (Host("node-1.lan", 4), Host("node2", 3), Host("node3", 1), Host("node4", 2))
    assert parse_hostfile(text, "hosts") == expected


def test_ranges_keep_their_zeros():
    text = "n[08-10]:2,gpu[1,3]-a[1-2],login"
    names = ["gpu1-a1", "gpu1-a2", "gpu3-a1", "gpu3-a2", "login"]
    assert parse_hosts(text) == (*(Host(f"n{i}", 2) for i in ("08", "09", "10")), *map(Host, names))


def test_a_host_that_is_named_again_takes_more_where_it_first_stood():
    assert parse_hosts("a:2,b:1,a:3") == (Host("a", 5), Host("b", 1))
    assert parse_hostfile("b\na\nb\n", "nodes") == (Host("b", 2), Host("a", 1))


def test_a_hostfile_may_have_ranges_and_open_mpis_limit():
    assert parse_hostfile("n[1-2] slots=4 max_slots=8\nlocalhost:1\n", "hosts") == (
        Host("n1", 4), Host("n2", 4), Host("localhost", 1),
    )  # fmt: skip


def test_every_bad_host_is_told_at_once():
    with pytest.raises(Faults, match="3 faults in this job") as caught:
        parse_hostfile("a slots=2\nb slots=x\nc user=me\n[]:1\n", "my.hosts")
    assert [fault.split(":")[0] for fault in caught.value.faults] == [f"my.hosts, line {n}" for n in (2, 3, 4)]


@pytest.mark.parametrize("text", ["n[1-", "n[2-1]", "n[]", "n[a-b]", "n[1-999999999]", "n[1-2]]", "n[1-2", "n]1["])
def test_bad_ranges_are_quoted(text):
    with pytest.raises(LaunchError, match=r"expected host:slots.*found"):
        parse_hosts(text)


def test_every_fault_of_a_job_is_told_with_its_field():
    with pytest.raises(Faults) as caught:
        Job(command=(), ranks=5, hosts=parse_hosts("a:2"), exports=("1=x", "A", "B=c"))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["command", "-np", "-x"]
    assert "'1=x' is not NAME or NAME=value" in str(caught.value)


def test_hosts_are_filled_in_order():
    assert Job(command=("x",), ranks=3, hosts=parse_hosts("a:2,b:2,c:2")).places == [Host("a", 2), Host("b", 1)]


@pytest.mark.parametrize("text", ["", "a:", ":4", "a:0", "a:-1", "a:x", "a:2,,b:2", "a b:2", "a;reboot"])
def test_bad_hosts_are_quoted(text):
    with pytest.raises(LaunchError, match=r"expected host:slots, such as node1:4"):
        parse_hosts(text)


def test_a_bad_hostfile_is_told_with_path_and_line():
    with pytest.raises(LaunchError, match=r"my\.hosts, line 2: 'b slots=many'"):
        parse_hostfile("a slots=2\nb slots=many\n", "my.hosts")


def test_an_empty_hostfile_is_refused():
    with pytest.raises(LaunchError, match=r"my\.hosts: no host in it"):
        parse_hostfile("# nothing\n", "my.hosts")


def test_more_ranks_than_slots_are_refused_with_both_numbers():
    with pytest.raises(LaunchError, match=r"5 ranks on a:2,b:2, which take 4"):
        Job(command=("x",), ranks=5, hosts=parse_hosts("a:2,b:2"))


@pytest.mark.parametrize(("command", "ranks"), [((), 1), (("x",), 0), (("x",), -1)])
def test_a_job_needs_a_command_and_a_rank(command, ranks):
    with pytest.raises(LaunchError):
        Job(command=command, ranks=ranks)


def test_a_colon_is_not_left_to_the_launcher():
    # Open MPI ended with 251 and said nothing; MPICH started what follows as another program.
    with pytest.raises(Faults, match="':' as an argument of its own begins another program"):
        Job(command=("python", "train.py", ":", "b"), ranks=2)
    assert Job(command=("python", "train.py", "a:b"), ranks=2)
