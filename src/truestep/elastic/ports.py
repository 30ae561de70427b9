"""A free port of this machine. Torch-free."""

import socket


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
