"""Which network interface of this machine the other machines of a run reach it by. Torch-free.

Gloo takes the interface that the machine's own name leads to. That is the loopback on many (127.0.1.1 in /etc/hosts)
and another network on some, so each worker is told.
"""

import socket
import struct
import sys

SIOCGIFADDR = 0x8915
"""Asks the Linux kernel for the IPv4 address of an interface (netdevice(7))."""
LOOPBACK = "lo"


def interface_of(address: str) -> str | None:
    """The interface whose first IPv4 address this is; None where there is none, or no way to know."""
    if not sys.platform.startswith("linux"):
        return None
    if address.startswith("127."):
        return LOOPBACK
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == address), None)


def _ipv4_of(interface: str) -> str | None:
    import fcntl  # not everywhere

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None  # it has none
    return socket.inet_ntoa(answer[20:24])
