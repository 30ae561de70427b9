"""Cables that take their time, for machines without netem: pairs of tap devices, and what comes in at one end goes out
at the other `delay` later, in the same order.

    python -m tests.slow_cable MILLISECONDS NAME:NAME ...

Says "up" when the devices are there; ends when its input does.
"""

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65536


def tap(name: str) -> int:
    """A new tap device in this network namespace; it is gone when the descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def carry(delay_s: float, pairs: list[tuple[str, str]]) -> None:
    other, under_way = {}, deque[tuple[float, int, bytes]]()
    with selectors.DefaultSelector() as selector:
        for pair in pairs:
            near, far = map(tap, pair)
            other |= {near: far, far: near}
        for device in (*other, sys.stdin.fileno()):
            selector.register(device, selectors.EVENT_READ)
        print("up", flush=True)
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            for key, _ in selector.select(wait_s):
                if key.fd == sys.stdin.fileno():
                    return
                under_way.append((time.monotonic() + delay_s, other[key.fd], os.read(key.fd, FRAME_BYTES)))
            while under_way and under_way[0][0] <= time.monotonic():
                _, device, frame = under_way.popleft()
                deliver(device, frame)


def deliver(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:  # that end is not plugged in (EIO): the frame is lost, as on any cable
        return


if __name__ == "__main__":
    carry(int(sys.argv[1]) / 1000, [(name.split(":")[0], name.split(":")[1]) for name in sys.argv[2:]])
