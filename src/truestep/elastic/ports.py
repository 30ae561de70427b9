"""Where to listen on this machine. Torch-free."""

import socket

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
