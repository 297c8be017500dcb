"""Jobs, hosts and hostfiles: text to values, with messages that quote the text."""

from __future__ import annotations

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch.job import Host, Job, parse_hostfile, parse_hosts


def test_hosts_are_read_in_order():
    assert parse_hosts("b:2,a:10, c") == (Host("b", 2), Host("a", 10), Host("c", 1))


def test_a_hostfile_is_read_in_both_spellings():
    text = "# cluster\nnode-1.lan slots=4\n\nnode2:3   # spare\nnode3\nnode4 slots = 2\n"
    expected = (Host("node-1.lan", 4), Host("node2", 3), Host("node3", 1), Host("node4", 2))
    assert parse_hostfile(text, "hosts") == expected


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
