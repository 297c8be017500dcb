"""A cluster on one machine: hosts from namespaces (benchmarks/hosts.py), each with an sshd, and hvdrun on the first."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PROGRAMS = ("ssh", "ssh-keygen", "/usr/sbin/sshd", "/usr/sbin/nft")
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDRA_", "MPI", "SSH_", "HVDLITE_", "HOROVOD_")
_SSHD = """
HostKey {place}/host
AuthorizedKeysFile {place}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
PidFile none
"""


class Cluster:
    """Hosts h1, h2, ... that reach each other by ssh, whose /etc/ssh is `ssh`, a folder of their own."""

    def __init__(self, hosts: Any, place: Path) -> None:
        self.hosts, self.ssh = hosts, place
        for name in ("host", "user"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name))
        shutil.copy(place / "user.pub", place / "authorized_keys")
        key = " ".join((place / "host.pub").read_text().split()[:2])
        (place / "ssh_known_hosts").write_text(f"* {key}\n")
        (place / "ssh_config").write_text(f"IdentityFile {place}/user\nUserKnownHostsFile /dev/null\n")
        (place / "sshd_config").write_text(_SSHD.format(place=place))
        for host in hosts.names:
            self.on(host, "sh", "-ec", f"mount --bind {place} /etc/ssh; mount -t tmpfs tmpfs /run; mkdir /run/sshd")
            self.sshd(host)

    def on(self, host: str, *command: str) -> str:
        """Run a command on a host, and return what it printed."""
        return call(*self.hosts.enter(host), *command)

    def sshd(self, host: str, *options: str) -> None:
        """Start an sshd, and wait until it listens: its command comes back before, and its name changes then."""
        before = self._listeners(host)
        self.on(host, "/usr/sbin/sshd", *options)
        _until(lambda: self._listeners(host) > before)

    def stop_sshd(self, host: str) -> None:
        listeners = self._listeners(host)
        assert listeners
        for pid in listeners:
            os.kill(pid, 9)
        _until(lambda: not self._listeners(host))

    def _listeners(self, host: str) -> set[int]:
        return {pid for pid, said in self.processes(host).items() if "sshd" in said and "[listener]" in said}

    def drop(self, host: str, rule: str) -> None:
        """Let a host lose, without a word, the packets that arrive and fit `rule` (nft's)."""
        for words in (
            "table inet t",
            "chain inet t c { type filter hook input priority 0; }",
            f"rule inet t c {rule} drop",
        ):
            self.on(host, "/usr/sbin/nft", "add", words)

    def second_network(self, one: str, other: str) -> None:
        """Connect two hosts by a cable of their own, between devices eth1 with 10.78.0.1 and 10.78.0.2."""
        there = str(self.hosts._holders[other].pid)
        self.on(one, *["ip", "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns"], there)
        for number, host in enumerate((one, other), 1):
            self.on(host, "sh", "-ec", f"ip addr add 10.78.0.{number}/24 dev eth1; ip link set eth1 up")

    def command(self, mpi: Any, *args: str, host: str = "h1") -> list[str]:
        return [*self.hosts.enter(host), str(mpi.python), "-m", "hvdlite.launch", *args]

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return {**clean, "PATH": "/usr/bin:/bin", "TMPDIR": str(self.ssh), **(env or {})}

    def hvdrun(
        self,
        mpi: Any,
        *args: str,
        host: str = "h1",
        env: Mapping[str, str] | None = None,
        timeout: float = 40,
        text: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run hvdrun on a host to its end with `text` for input, and check that nothing is left of the job anywhere."""
        done = subprocess.run(
            self.command(mpi, *args, host=host), env=self.environ(env), input=text, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        assert self.gone(5) == {}
        return done

    def processes(self, host: str) -> dict[int, str]:
        """Return what runs on a host, but for what keeps it alive."""
        holder = self.hosts._holders[host].pid
        space, found = os.readlink(f"/proc/{holder}/ns/net"), {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/net") == space and int(entry) != holder:
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def left(self) -> dict[str, list[str]]:
        """Return what runs on the hosts besides the waiting sshd; what has ended is not counted, reaped or not."""
        running = {
            host: [said for said in self.processes(host).values() if said and "sshd: /usr/sbin/sshd" not in said]
            for host in self.hosts.names
        }
        return {host: found for host, found in running.items() if found}

    def gone(self, seconds: float) -> dict[str, list[str]]:
        """Wait until nothing is left, at most so long, and return what is left then."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def call(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def cluster(request: pytest.FixtureRequest, lab: ModuleType, short_tmpdir: str) -> Iterator[Cluster]:
    """Two hosts, or as many as the parameter says, taken down after the test."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        needed = f"{', '.join(missing)} not found (on Debian: apt install openssh-client openssh-server nftables)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(needed)
    with lab.Hosts(getattr(request, "param", 2)) as hosts:
        yield Cluster(hosts, Path(short_tmpdir))
