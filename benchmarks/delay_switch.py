"""An Ethernet switch in user space that delays every frame, for kernels without netem. Started by hosts.py.

    delay_switch.py SECONDS PORT...        within the switch's network namespace; ends with its standard input

Frames travel whole, with the header that says how to cut them (64 KiB at most), so that one frame is one read and
one write. Hosts are learned from the frames that they send.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE, SO_SNDBUFFORCE = 33, 32
HEADER = 10  # bytes of struct virtio_net_hdr
FRAMES_AT_ONCE = 64


def open_port(name: str) -> socket.socket:
    """Return a socket that sees every frame that comes out of `name`."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_RCVBUFFORCE, SO_SNDBUFFORCE):  # nothing may be dropped here
        port.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
    port.setblocking(False)
    port.bind((name, ETH_P_ALL))
    return port


def main() -> None:
    delay = float(sys.argv[1])
    ports = [open_port(name) for name in sys.argv[2:]]
    with open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")  # instead of 50 us
    # Ranks that poll keep every core busy: without this the switch would wait for a time slice.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    port_of: dict[bytes, socket.socket] = {}
    # One delay for all, so that they leave in the order in which they came.
    queue: deque[tuple[float, socket.socket, bytes]] = deque()
    now = time.perf_counter
    print("ready", flush=True)
    while True:
        patience = max(0.0, queue[0][0] - now()) if queue else None
        readable, _, _ = select.select([*ports, sys.stdin], [], [], patience)
        for port in readable:
            if port is sys.stdin:
                return
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame = port.recv(1 << 17)
                except BlockingIOError:
                    break
                port_of[frame[HEADER + 6 : HEADER + 12]] = port
                queue.append((now() + delay, port, frame))
        while queue and queue[0][0] <= now():
            _, came_from, frame = queue.popleft()
            known = port_of.get(frame[HEADER : HEADER + 6])
            for port in [known] if known else [other for other in ports if other is not came_from]:
                try:
                    port.send(frame)
                except OSError as error:
                    print(f"dropped a frame: {error}", file=sys.stderr, flush=True)


main()
