"""Hosts that cannot take part: one message with cause and remedy, soon, and nothing left running."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.mpi
LIMIT = 30.0  # seconds; the promise to users, far more than is needed


def refused(cluster, mpi, *args, **more) -> str:
    """Return the one message of an hvdrun that started nothing."""
    started = time.monotonic()
    done = cluster.hvdrun(mpi, *args, **more)
    assert time.monotonic() - started < LIMIT
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if "running as root" not in line]
    assert lines[0].startswith("hvdrun: ")
    assert all(line.startswith("  ") for line in lines[1:]), done.stderr
    return "\n".join(lines)


def ask_password(cluster):
    (cluster.ssh / "authorized_keys").write_text("")
    cluster.stop_sshd("h2")
    cluster.sshd("h2", "-o", "PasswordAuthentication=yes")


def forget_host_key(cluster):
    (cluster.ssh / "ssh_known_hosts").write_text("")


def move_port(cluster):
    cluster.stop_sshd("h2")


def take_down(cluster):
    cluster.on("h2", "ip", "link", "set", "eth0", "down")


def filter_ssh(cluster):
    cluster.drop("h2", "tcp dport 22")


def filter_data(cluster):
    cluster.drop("h1", "tcp dport != 22 ct state new")


def filter_data_there(cluster):
    cluster.drop("h2", "tcp dport != 22 ct state new")


def lead(cluster, name, address):
    """Let a name lead to an address on h1."""
    change = f"cp /etc/hosts /run/hosts; echo {address} {name} >> /run/hosts; mount --bind /run/hosts /etc/hosts"
    cluster.on("h1", "sh", "-ec", change)


def lead_back(cluster):
    lead(cluster, "h9", "127.0.0.1")


def lead_astray(cluster):
    lead(cluster, "h9", "10.77.0.2")


def nothing(cluster):
    """Leave the hosts as they are."""


@pytest.mark.parametrize(
    ("prepare", "args", "message"),
    [
        (nothing, ["-H", "h1,nowhere"], "host nowhere: this name is not known here. Correct it in -H"),
        (take_down, ["-H", "h1,h2"], "host h2: no answer (10.77.0.2): it is down, or a firewall keeps port 22 shut"),
        (move_port, ["-H", "h1,h2"], "host h2: its port 22 (10.77.0.2) is closed: no sshd listens there"),
        (nothing, ["-H", "h1,h2", "-p", "77"], "host h2: its port 77 (10.77.0.2) is closed"),
        (filter_ssh, ["-H", "h1,h2", "--start-timeout", "2"], "host h2: no answer (10.77.0.2): it is down, or"),
        (ask_password, ["-H", "h1,h2"], "host h2: ssh would need a password, or the key is refused: root@h2"),
        (forget_host_key, ["-H", "h1,h2"], "host h2: ssh does not know its key, or knows another one. Run `ssh h2`"),
        (filter_data, ["-H", "h1,h2"], "do not get through: from h2 to h1 (timed out). Open the firewall"),
        (filter_data_there, ["-H", "h1,h2"], "get through: from this machine to h2 (timed out). Open the firewall"),
        (lead_back, ["-H", "h1,h9"], "hosts this machine and h9: the one that answers calls itself 'h1' each time"),
        (lead_astray, ["-H", "h2,h9"], "hosts h2 and h9: the one that answers calls itself 'h2' each time"),
        (nothing, ["-H", "h1,h2", "--network-interfaces", "eth7"], "host h2: there is no network device 'eth7'"),
    ],
    ids=[
        "unknown", "down", "closed", "other-port", "filtered", "password", "host-key", "no-way-back", "no-way-there",
        "loopback", "twice", "device",
    ],
)  # fmt: skip
def test_a_host_that_cannot_be_used_is_named(cluster, openmpi, prepare, args, message):
    prepare(cluster)
    assert message in refused(cluster, openmpi, *args, "python", "-c", "print('started')")


def test_all_hosts_with_faults_are_told_at_once(cluster, mpi):
    cluster.stop_sshd("h2")
    said = refused(cluster, mpi, "-H", "h1,h2,nowhere,nobody", "python", "-c", "print('started')")
    assert said.splitlines()[0] == "hvdrun: 2 faults in this job:"
    assert "hosts nowhere, nobody: this name is not known" in said
    assert "host h2: its port 22" in said


def hide(cluster, what, host="h2"):
    """Let a host have an empty folder in place of one."""
    cluster.on(host, "mount", "-t", "tmpfs", "tmpfs", str(what))


def test_what_a_host_lacks_is_named(cluster, mpi, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hide(cluster, mpi.python.parent)
    hide(cluster, tmp_path.parent)
    said = refused(cluster, mpi, "-H", "h1,h2", str(mpi.python), "-c", "print('started')")
    assert f"host h2: there is no directory {tmp_path}. " in said
    assert f"host h2: there is no program '{mpi.python}'. Install the same environment in the same place" in said
    assert f"host h2: there is no MPI at {mpi.mpirun}. " in said


def replace(cluster, host, program, script):
    """Let a host have a shell script in place of a program."""
    fake = cluster.ssh / program.name
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    cluster.on(host, "mount", "--bind", str(fake), str(program))


def test_other_versions_there_are_named(cluster, mpi):
    replace(cluster, "h2", mpi.mpirun, "echo mpirun 9.8.7")
    replace(cluster, "h2", mpi.python, "echo @ python 2.7")  # and no hvdlite
    said = refused(cluster, mpi, "-H", "h1,h2", str(mpi.python), "-c", "print('started')")
    assert "host h2: the MPI there is 9.8.7, here it is 5.0." in said
    assert f"host h2: '{mpi.python}' there is 2.7, here it is 3." in said
    assert f"host h2: hvdlite is not installed for '{mpi.python}' there. Install version " in said


def test_a_host_may_be_used_without_asking(cluster, openmpi):
    replace(cluster, "h2", openmpi.mpirun, "echo mpirun 9.8.7")
    assert "9.8.7" in refused(cluster, openmpi, "-H", "h1,h2", "hostname")
    done = cluster.hvdrun(openmpi, "-H", "h1,h2", "--no-host-check", "--no-label", "hostname")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["h1", "h2"]), done.stderr


def test_the_launchers_name_must_lead_to_it_for_hydra(cluster, mpich):
    # Hydra's daemons call back by the launcher's name; Debian writes 127.0.1.1 for a machine's own.
    change = "echo 127.0.1.1 h1 > /run/hosts; cat /etc/hosts >> /run/hosts; mount --bind /run/hosts /etc/hosts"
    cluster.on("h2", "sh", "-ec", change)
    said = refused(cluster, mpich, "-H", "h1,h2", "hostname")
    assert "host h2: there the name 'h1' leads to 127.0.1.1, which is that host itself. Correct /etc/hosts" in said


def test_a_login_that_prints_is_no_fault(cluster, openmpi):
    (cluster.ssh / "sshrc").write_text("echo Welcome; echo '@ welcome' >&2\n")
    done = cluster.hvdrun(openmpi, "-H", "h1,h2", "hostname")
    assert done.returncode == 0, done.stderr
