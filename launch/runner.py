"""What hvdrun starts once per rank: it runs the program and tells hvdrun what the program says, and how it ended.

It stands alone (standard library, no import of ours, 10 ms) and is run as `python -I -S runner.py [--files DIR]
[--append 1] [--columns N] -- command`. All it says goes to its standard error in frames, one a line, which
`launch/frames.py` reads:

    RS rank kind base64 LF     kind: s started, i in init() (hvdlite/arrival.py), o and e output and errors, x ended,
                               t last output, where it is in files, a packets of input taken (launch/feed.py),
                               b a sign of life (launch/silence.py)

Frames are whole for hvdrun although every launcher cuts what it forwards where it likes. A launcher forwards
what it reads at once in one piece: Open MPI at most 4096 bytes, srun lines of at most 1024. So a frame is
shorter than 1024, frames are written 4096 bytes at a time, and only when all that was there has been read.
"""

from __future__ import annotations

import _thread
import binascii
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import resource
import select
import signal
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence

RANK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK", "SLURM_PROCID",
)  # fmt: skip

_INPUT = re.compile(rb"\x1e(\d+) ([0-9a-f]{8}) ([A-Za-z0-9+/=]*)")  # as launch/feed.py makes it, up to the newline
_PAYLOAD = 720  # bytes: 960 in base64, which leaves room for the rest of a frame
_AT_ONCE = 4  # frames in one write, which have to fit into 4096 bytes
_KEPT = 4000  # bytes of the last output, where it goes into files
_LOOK = 1.0  # seconds between two looks at whether the launcher is still there, and between two signs of life
_REST = 0.2  # seconds of waiting for what others still write into the program's pipes after its end
_PIPES_HOLD = 2**18  # bytes at most, of the program's own that are still to be read then
_READ_OUT = 2.0  # seconds for the launcher to read what is left
_GRACE = 5.0  # seconds between asking a program to end and ending it
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_ARRIVAL = "HVDRUN_ARRIVAL"
_HYDRA = "HYDI_CONTROL_FD"  # what MPICH's launcher sets, and no other
_HIGH = 64  # descriptors below are often used by shell scripts


def frames(rank: int, kind: str, data: bytes) -> list[bytes]:
    """Return `data` in frames of at most 1000 bytes."""
    pieces = [data[start : start + _PAYLOAD] for start in range(0, len(data), _PAYLOAD)]
    return [b"\x1e%d %s " % (rank, kind.encode()) + binascii.b2a_base64(piece) for piece in pieces]


class Teller:
    """The way to hvdrun. It waits for the launcher, as the program then has to."""

    def __init__(self, rank: int, fd: int = 2) -> None:
        self._rank, self._fd = rank, fd
        self._turn = _thread.allocate_lock()  # two threads at once would write more than is read at once
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)

    def tell(self, kind: str, data: bytes) -> None:
        pending = frames(self._rank, kind, data)
        for start in range(0, len(pending), _AT_ONCE):
            with self._turn:
                self.wait_until_read()
                rest = b"".join(pending[start : start + _AT_ONCE])
                while rest:  # a pipe takes it whole; others may not
                    rest = rest[os.write(self._fd, rest) :]

    def wait_until_read(self, seconds: float = float("inf")) -> None:
        """Return when the launcher has read all, or is gone."""
        end, pause, parent = time.monotonic() + seconds, 2e-5, os.getppid()
        while self._is_pipe and self._unread() and time.monotonic() < end and os.getppid() == parent:
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)

    def _unread(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4)), sys.byteorder)


class Files:
    """`stdout` and `stderr` in a folder of this rank's, instead of hvdrun's own output.

    Args:
        warn: told, once, why what the program says is lost from here on. The program goes on.
        append: the files of an earlier start of the job are gone on with.
    """

    def __init__(self, folder: str, warn: Callable[[OSError], None], append: bool = False) -> None:
        os.makedirs(folder, exist_ok=True)
        mode = os.O_APPEND if append else os.O_TRUNC
        self._fds = {
            kind: os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o666)
            for kind, name in (("o", "stdout"), ("e", "stderr"))
        }
        self._warn, self._is_lost = warn, False
        self.last = b""

    def write(self, kind: str, data: bytes) -> None:
        self.last = (self.last + data)[-_KEPT:]
        try:
            while data and not self._is_lost:
                data = data[os.write(self._fds[kind], data) :]
        except OSError as error:
            self._is_lost = True
            self._warn(error)


def terminal(columns: int) -> tuple[int, int]:
    """Return the ends of a terminal that changes nothing on the way: through it, programs write line by line.

    Through a pipe they would write when 8 KB have gathered. Where there are no terminals it is a pipe all the same.
    """
    try:
        ours, theirs = os.openpty()
    except OSError:
        return os.pipe()
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST  # newlines stay newlines
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    if columns:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    return ours, theirs


def pipe_for_arrival() -> tuple[int, int]:
    """Return the ends of the pipe by which hvdlite tells that it is in `init()`. The program inherits the second."""
    ours, low = os.pipe()
    try:
        theirs = fcntl.fcntl(low, fcntl.F_DUPFD, _HIGH)
    except OSError:  # a limit that is lower
        theirs = os.dup(low)
    os.close(low)
    os.set_inheritable(theirs, True)
    os.environ[_ARRIVAL] = f"{theirs}:{os.fstat(theirs).st_ino}"
    return ours, theirs


class Input:
    """Takes the standard input out of the packets in which it comes from hvdrun: each once, whatever arrives twice."""

    def __init__(self) -> None:
        self._rest = b""
        self.count = 0
        self.is_over = False

    def feed(self, data: bytes) -> bytes:
        """Return what is new in `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = b""
        for line in lines:
            match = _INPUT.fullmatch(line[line.rfind(b"\x1e") :] if b"\x1e" in line else b"")
            piece = _piece(match) if match and int(match[1]) == self.count else None
            if piece is not None:
                self.count += 1
                self.is_over |= not piece
                found += piece
        return found


def _piece(match: re.Match[bytes]) -> bytes | None:
    """Return what is in a packet, None if it was put together from parts of others."""
    with contextlib.suppress(binascii.Error):
        data = binascii.a2b_base64(match[3])
        return data if binascii.crc32(data) == int(match[2], 16) else None
    return None


def pass_input_on(source: int, target: int, tell: Callable[[str, bytes], None]) -> None:
    """Give the program its standard input until it ends. In a thread, for either end may make it wait.

    What comes when the program reads no more is read all the same, up to the end: hvdrun sends one at the latest when
    it hears that the program has ended, and Hydra kills all ranks when it has something for a rank that is gone.
    """
    packets, is_read = Input(), True
    with contextlib.suppress(OSError):
        while not packets.is_over and (data := os.read(source, 2**16)):
            before, data = packets.count, packets.feed(data)
            try:
                while data and is_read:
                    data = data[os.write(target, data) :]
            except OSError:  # nobody reads it: then no more is asked for
                is_read = False
            if packets.count > before and is_read:
                tell("a", b"%d" % (packets.count - before))
    os.close(target)


def start(command: Sequence[str], out: int, err: int, into: int) -> int:
    """Start the program with these for its output, in this process group: signals of launchers go to the whole group.

    So the runner leaves signals to the program, and waits for it. Whoever kills the runner alone kills both.
    """
    libc = ctypes.CDLL(None)  # before the fork
    runner = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    pid = os.fork()
    if pid:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        return pid
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != runner:
            os._exit(1)
        os.dup2(into, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and that would be inherited
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.execvp(command[0], list(command))
    except OSError as error:
        told = (
            f"hvdrun: {command[0]!r} cannot be run on {os.uname().nodename}: {error.strerror}{_hint(command[0], error)}"
        )
        os.write(2, f"{told}\n".encode())
        os._exit(126 if error.errno == errno.EACCES else 127)
    finally:
        os._exit(1)


def _hint(program: str, error: OSError) -> str:
    """Return what the kernel's words leave out: they are the same for a missing program and a missing interpreter."""
    if error.errno == errno.ENOENT and os.path.exists(program):
        return ". The file is there: correct its first line, whose interpreter (#!) is missing"
    if error.errno == errno.ENOEXEC:
        return ". It is no program of this machine; a script needs a first line such as #!/bin/sh"
    return ""


def copy_until_end(pid: int, sources: dict[int, str], write: Callable[[str, bytes], None]) -> tuple[int, float]:
    """Pass on what the program writes until it has ended and all is read.

    Returns its exit code, or minus the signal that ended it, and when that was.
    """
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll, there, parent = select.poll(), set(sources), os.getppid()
    for fd in (*sources, wake):
        poll.register(fd, select.POLLIN)
    ended: tuple[int, float] | None = None
    alive = time.monotonic()
    rest, room = _REST, _PIPES_HOLD  # the time that a slow launcher needs for what is there does not count
    while ended is None or (there and rest > 0 and room > 0):
        since = time.monotonic()
        ready = poll.poll(1000 * (_LOOK if ended is None else rest))
        rest -= 0 if ended is None else time.monotonic() - since
        for fd, _ in ready:
            if fd == wake:
                os.read(wake, 512)
                continue
            n_read = _pass_on(fd, sources[fd], write)
            room -= 0 if ended is None else n_read
            if not n_read:
                poll.unregister(fd)
                there.discard(fd)
        if ended is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended = os.waitstatus_to_exitcode(status), time.time()
            elif os.getppid() != parent:  # the launcher is gone, and nobody else would end the program
                end(pid)
            elif time.monotonic() > alive + _LOOK:
                alive = time.monotonic()
                write("b", b".")
    return ended


def _pass_on(fd: int, kind: str, write: Callable[[str, bytes], None]) -> int:
    """Return how many bytes were read; 0 at the end."""
    try:
        data = os.read(fd, _PAYLOAD * _AT_ONCE)
    except OSError:  # a terminal whose other end nobody holds
        return 0
    if data:
        write(kind, data)
    return len(data)


def end(pid: int) -> None:
    """End the program, and what it has started where that is in a process group of this rank's."""
    send, target = (os.killpg, 0) if os.getpgrp() == os.getpid() else (os.kill, pid)
    with contextlib.suppress(ChildProcessError, ProcessLookupError):  # it has ended, and its number may be another's
        if _has_ended(pid):
            return
        send(target, signal.SIGTERM)
        until = time.monotonic() + _GRACE
        while not _has_ended(pid) and time.monotonic() < until:
            time.sleep(0.02)
        send(target, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    """Return whether it has, and leave it to be waited for. Raises ChildProcessError if that was done already."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_as(code: int) -> int:
    """End this process as the program has ended, so that the launcher takes the one for the other."""
    if code < 0:
        with contextlib.suppress(ValueError, OSError):  # a limit that is lower already
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def main(argv: Sequence[str]) -> int:
    """Run a program as this rank, and end as it did."""
    own, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    options = dict(zip(own[::2], own[1::2], strict=True))
    rank = next((int(value) for name in RANK_VARIABLES if (value := os.environ.get(name, "")).isdecimal()), 0)
    host, teller = os.uname().nodename, Teller(rank)
    files = None

    def warn(error: OSError) -> None:
        teller.tell("e", f"hvdrun: cannot write output on {host}: {error}\n".encode())

    def write(kind: str, data: bytes) -> None:
        (files.write if files and kind in "oe" else teller.tell)(kind, data)

    if "--files" in options:
        try:
            files = Files(f"{options['--files']}/rank.{rank:0{options['--width']}}", warn, "--append" in options)
        except OSError as error:
            warn(error)
            teller.tell("s", f"0 {host}".encode())
            teller.tell("x", f"1 {time.time():.6f} {host}".encode())
            return 1
    out, their_out = terminal(int(options.get("--columns", "0")))
    err, their_err = os.pipe()
    arrival, their_arrival = pipe_for_arrival()
    launchers, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    # Of the launchers most give all input to rank 0, and the others one that never ends.
    their_in, into = os.pipe() if rank == 0 else (os.dup(nothing), -1)
    pid = start(command, their_out, their_err, their_in)
    teller.tell("s", f"{pid} {host}".encode())
    # Nothing else that was inherited is closed: Hydra kills all when its connection to a rank closes too early, and
    # that is to happen when the end has been told.
    for fd in (their_in, their_out, their_err, their_arrival):
        os.close(fd)
    os.dup2(nothing, 0)
    input_over = _thread.allocate_lock()
    if rank == 0:
        input_over.acquire()

        def pass_on() -> None:
            try:
                pass_input_on(launchers, into, teller.tell)
            finally:
                input_over.release()

        _thread.start_new_thread(pass_on, ())
    else:
        os.close(launchers)
    try:
        code, at = copy_until_end(pid, {out: "o", err: "e", arrival: "i"}, write)
        if files and code:
            teller.tell("t", files.last)
        teller.tell("x", f"{code} {at:.6f} {host}".encode())
        teller.wait_until_read(_READ_OUT)
        if _HYDRA in os.environ:
            input_over.acquire(timeout=_READ_OUT)
    except BrokenPipeError:  # nobody listens any more
        end(pid)
        return 1
    return end_as(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
