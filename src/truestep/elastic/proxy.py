"""A line between a machine and its supervisor that can be cut, for trying out partitions. Torch-free."""

import contextlib
import socket
import threading


class Line:
    """Listens on this machine and passes everything on to `target`, both ways. While it is cut, it is a black hole:
    connections stay open, new ones are accepted, and nothing comes through until it is mended."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, name="line", daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._door.close()
        self.mend()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._connect, args=(near,), name="line", daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._whole.wait()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self._open += [near, far]
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(one, other), name="line", daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end hung up
            while data := one.recv(65536):
                self._whole.wait()
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
