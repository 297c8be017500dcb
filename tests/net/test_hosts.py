"""The hosts themselves: apart from each other, slow when asked, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest


def on(hosts, host, *command):
    return subprocess.run([*hosts.enter(host), *command], capture_output=True, text=True, check=True, timeout=20).stdout


def test_hosts_have_names_memory_and_addresses_of_their_own(hosts):
    assert [on(hosts, host, "hostname").strip() for host in hosts.names] == hosts.names
    on(hosts, "h1", "touch", "/dev/shm/only-here")
    assert on(hosts, "h1", "ls", "/dev/shm") == "only-here\n"
    assert on(hosts, "h2", "ls", "/dev/shm") == ""
    assert not os.path.exists("/dev/shm/only-here")
    assert "10.77.0.3/24" in on(hosts, "h3", "ip", "addr", "show", "eth0")


def test_links_are_shaped_and_opened_again(hosts):
    hosts.shape("1gbit")
    assert "rate 1Gbit" in on(hosts, "h2", "tc", "qdisc", "show", "dev", "eth0")
    hosts.shape(None)
    assert "tbf" not in on(hosts, "h2", "tc", "qdisc", "show", "dev", "eth0")


def test_a_frame_is_never_faster_than_the_delay(hosts):
    echo = (
        "import socket; s = socket.create_server(('', 7777)); print(flush=True); c = s.accept()[0]; c.send(c.recv(9))"
    )
    ask = (
        "import socket, time; c = socket.create_connection(('h1', 7777)); t = time.perf_counter(); c.send(b'x');"
        "c.recv(9); print(time.perf_counter() - t)"
    )
    hosts.delay(0.005)
    server = subprocess.Popen([*hosts.enter("h1"), sys.executable, "-c", echo], stdout=subprocess.PIPE)
    with server:
        server.stdout.readline()
        assert float(on(hosts, "h2", sys.executable, "-c", ask)) >= 0.01


def test_nothing_stays(lab):
    with lab.Hosts(2) as hosts:
        left = subprocess.Popen([*hosts.enter("h2"), "sleep", "1000"])
        holders = [holder.pid for holder in hosts._holders.values()]
        place = hosts._place
        time.sleep(0.05)  # so that it has entered
    assert left.wait(timeout=10) != 0
    assert not place.exists()
    assert not [pid for pid in holders if os.path.exists(f"/proc/{pid}")]


def test_hosts_end_with_who_made_them(lab):
    code = (
        f"import sys, time; sys.path.insert(0, {os.path.dirname(lab.__file__)!r}); import hosts\n"
        "with hosts.Hosts(2) as made:\n"
        "    print(made._place, *[h.pid for h in made._holders.values()], flush=True); time.sleep(1000)"
    )
    maker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with maker:
        place, *pids = maker.stdout.readline().split()
        maker.kill()
    deadline = time.monotonic() + 10
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, "holders outlive their maker"
        time.sleep(0.01)
    subprocess.run(["rm", "-r", place], check=True)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_missing_is_named(lab, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "ip, tc, nsenter, unshare not found" in lab.missing()
    assert "iproute2" in lab.missing()


def test_a_job_that_does_not_end_is_ended(hosts):
    with pytest.raises(subprocess.TimeoutExpired):
        hosts.run([*hosts.enter("h1"), "sleep", "1000"], timeout=0.2)
    assert hosts._processes() == {hosts._holders[host].pid for host in hosts.names}
