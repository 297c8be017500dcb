"""Hosts made of Linux namespaces, on one machine: for measuring and testing what happens between hosts. Needs root.

Each host has a network, a host name, mounts and System V IPC of its own: `eth0` with an address, its own /dev/shm
and /etc/hosts. Files are shared, as on a cluster with a common home. The links meet in a bridge that lives in
a namespace of its own, so that nothing shows in the machine's own network. A namespace lives as
long as its holder, a `cat` that ends when whoever made the hosts ends, in whatever way.

The only commands used are Debian's: `ip` and `tc` (iproute2), `nsenter` and `unshare` (util-linux).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

COMMANDS = ("ip", "tc", "nsenter", "unshare")
NETWORK = "10.77.0"  # of a private network that nobody else sees
_SWITCH = Path(__file__).with_name("delay_switch.py")
_ENTER = ("--net", "--uts", "--mount", "--ipc")
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "HYDRA_", "MPI_")


def missing() -> str:
    """Return what keeps this machine from having such hosts, or "" if nothing does."""
    lost = [name for name in COMMANDS if shutil.which(name) is None]
    if lost:
        return f"{', '.join(lost)} not found (on Debian: apt install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--ipc", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Hosts:
    """`with Hosts(4) as hosts:` hosts h1 to h4, which are gone afterwards, with all that runs on them.

    Args:
        n: how many.
    """

    def __init__(self, n: int) -> None:
        self.names = [f"h{number}" for number in range(1, n + 1)]
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._delay: subprocess.Popen[bytes] | None = None
        self._place = Path()

    def __enter__(self) -> Hosts:
        self._place = Path(tempfile.mkdtemp(prefix="hosts-"))
        try:
            self._make()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def enter(self, host: str) -> list[str]:
        """Return the beginning of a command line that runs on `host` what follows."""
        return ["nsenter", "-t", str(self._holders[host].pid), *_ENTER, f"--wd={os.getcwd()}", "--"]

    def mpirun(self, python: str | Path, ranks: Sequence[int], *, env: Mapping[str, str] | None = None) -> list[str]:
        """Return the beginning of a command line for a job of Python processes on these hosts.

        Args:
            python: an interpreter with `mpirun` next to it, of Open MPI or MPICH.
            ranks: how many on each host, in the order of the hosts; 0 leaves a host out.
            env: variables for all ranks.
        """
        used = [(name, count) for name, count in zip(self.names, ranks, strict=False) if count]
        mpirun = Path(python).parent / "mpirun"
        variables = dict(env or {})
        if (mpirun.parent / "prterun").exists():  # Open MPI's
            places = ",".join(f"{name}:{count}" for name, count in used)
            start = [mpirun, "--prtemca", "plm_ssh_agent", self._agent, "--bind-to", "none", "--host", places]
            start += [word for name in variables for word in ("-x", f"{name}={variables[name]}")]
        else:
            places = ",".join(f"{name}:{count}" for name, count in used)
            start = [mpirun, "-launcher", "ssh", "-launcher-exec", self._agent, "-hosts", places]
            start += [word for name in variables for word in ("-genv", name, variables[name])]
            start += ["-n", sum(count for _, count in used)]
        return [*self.enter(used[0][0]), *map(str, start), str(python)]

    def run(self, command: Sequence[Any], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a command line that `mpirun` began, and return what it said. What it left behind on the hosts is ended.

        Raises:
            subprocess.TimeoutExpired: it still ran after `timeout` seconds; it does not any more.
        """
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", TMPDIR=str(self._place))
        try:
            return subprocess.run(
                list(map(str, command)), env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=timeout,
            )  # fmt: skip
        finally:
            self._end_processes()

    def shape(self, rate: str | None, burst: str = "256kb") -> None:
        """Let every host send at most `rate` (as `tc` writes it: 1gbit). None: as fast as the machine can."""
        for host in self.names:
            subprocess.run([*self.enter(host), "tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
            if rate is not None:
                limit = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
                _call(*self.enter(host), "tc", "qdisc", "add", "dev", "eth0", "root", *limit)

    def delay(self, seconds: float) -> None:
        """Let every frame between two hosts take this long. 0: as short as it can.

        By a switch in user space, because not every kernel has netem.
        """
        ports = [f"p{number}" for number in range(1, len(self.names) + 1)]
        self._end_delay()
        for port in ports:
            _call(*self._in_switch(), "ip", "link", "set", port, *(["nomaster"] if seconds else ["master", "br0"]))
        if seconds:
            self._delay = subprocess.Popen(
                [*self._in_switch(), sys.executable, str(_SWITCH), str(seconds), *ports],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert self._delay.stdout is not None
            if self._delay.stdout.readline() != b"ready\n":
                raise RuntimeError("the switch that delays frames did not start")

    def down(self) -> None:
        """End everything on the hosts, and the hosts. Twice is harmless."""
        self._end_delay()
        self._end_processes()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
            for pipe in (holder.stdin, holder.stdout):
                assert pipe is not None
                pipe.close()
        self._holders.clear()
        if self._place != Path():
            shutil.rmtree(self._place, ignore_errors=True)

    def _make(self) -> None:
        names = "".join(f"{NETWORK}.{number} {name}\n" for number, name in enumerate(self.names, 1))
        (self._place / "hosts").write_text("127.0.0.1 localhost\n" + names)
        self._hold("switch", "--net")
        _call(*self._in_switch(), "ip", "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _call(*self._in_switch(), "ip", "link", "set", "br0", "up")
        for number, host in enumerate(self.names, 1):
            pid = self._hold(host, *_ENTER, "--propagation", "private")
            port = ["ip", "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
            _call(*self._in_switch(), *port)
            _call(*self._in_switch(), "ip", "link", "set", f"p{number}", "master", "br0", "up")
            setup = f"""
                echo {host} > /proc/sys/kernel/hostname
                mount --bind {self._place}/hosts /etc/hosts
                mount -t tmpfs -o mode=1777 tmpfs /dev/shm
                ip link set lo up
                ip addr add {NETWORK}.{number}/24 dev eth0
                ip link set eth0 up"""
            _call(*self.enter(host), "sh", "-ec", setup)
        self._write_agent()

    def _hold(self, name: str, *flags: str) -> int:
        command = ["unshare", *flags, "sh", "-c", "echo ready; exec cat"]
        # In a session of its own, so that Ctrl-C reaches us first, who take everything down in order.
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
        self._holders[name] = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no namespaces for {name}: {shlex.join(command)} ended")
        return holder.pid

    @property
    def _agent(self) -> Path:
        return self._place / "agent"

    def _write_agent(self) -> None:
        """Write what mpirun takes for ssh: `agent [options] HOST COMMAND...`."""
        cases = "\n".join(f'{host}) set -- {shlex.join(self.enter(host))} /bin/sh -c "$*";;' for host in self.names)
        self._agent.write_text(
            "#!/bin/sh\n"
            "while :; do case \"$1\" in -*) shift;; *) break;; esac; done\n"
            "host=$1; shift\n"
            f"case \"$host\" in\n{cases}\n*) echo \"no host $host\" >&2; exit 255;;\nesac\n"
            "exec \"$@\"\n"
        )  # fmt: skip
        self._agent.chmod(0o700)

    def _in_switch(self) -> list[str]:
        return ["nsenter", "-t", str(self._holders["switch"].pid), "--net", "--"]

    def _end_delay(self) -> None:
        if self._delay is not None:
            self._delay.kill()
            self._delay.communicate()
            self._delay = None

    def _end_processes(self) -> None:
        """Kill what still runs on the hosts, and wait until it is gone."""
        ours = {holder.pid for holder in self._holders.values()}
        deadline = time.monotonic() + 5
        while (left := self._processes() - ours) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _processes(self) -> set[int]:
        """Return the processes in the network namespaces of the hosts."""
        spaces = set()
        for name, holder in self._holders.items():
            with contextlib.suppress(OSError):
                if name != "switch":
                    spaces.add(os.readlink(f"/proc/{holder.pid}/ns/net"))
        found = set()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") in spaces:
                    found.add(int(entry))
        return found


def _call(*command: str) -> None:
    subprocess.run(command, check=True)
