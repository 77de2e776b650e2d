"""A server that speaks enough of Redis' protocol, and breaks as told."""

from __future__ import annotations

import contextlib
import socket
import threading


class FakeRedis:
    """Knobs: a connection is cut after `cut_after` bytes of a value; SET keeps `keeps` bytes; `silent`; `full`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.cut_after: int | None = None
        self.keeps: int | None = None
        self.silent = self.full = False
        self.commands: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Refuses new connections and cuts those that there are."""
        with contextlib.suppress(OSError):  # twice is once
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            try:
                while line := reader.readline():
                    parts = [self._part(connection, reader) for _ in range(int(line[1:]))]
                    connection.sendall(self._answer(parts))
            except (OSError, ValueError):
                return

    def _part(self, connection: socket.socket, reader) -> bytes:
        length = int(reader.readline()[1:])
        if self.cut_after is not None and length > self.cut_after:
            reader.read(self.cut_after)
            connection.shutdown(socket.SHUT_RDWR)
            raise OSError("cut")
        value = reader.read(length)
        reader.read(2)
        return value

    def _answer(self, parts: list[bytes]) -> bytes:
        command = parts[0].upper()
        self.commands.append(command)
        if self.silent:
            return b""
        if command == b"SET":
            if self.full:
                return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
            self.values[parts[1]] = parts[2][: self.keeps]
        if command == b"GET":
            value = self.values.get(parts[1])
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        return b"+OK\r\n"
