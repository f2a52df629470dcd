"""A proxy before a PostgreSQL server that loses a connection at a chosen message of the client."""

from __future__ import annotations

import enum
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

LATE_S = 0.2
"""Long enough for another connection, so that both sessions are there at once."""

SOCKET_NAME = ".s.PGSQL.5432"


class Cut(enum.Enum):
    """What becomes of the message at which the client loses its connection."""

    BEFORE = "the server never gets it, and notices the loss"
    AFTER = "the server gets it, and notices the loss when it answers"
    GHOST = "the server gets it, and does not notice: its session stays open"
    LATE = "the server gets it when the client is back, and does not notice"
    NOT_NOTICED = "the server does not get it, and does not notice: its session stays open"


class CuttingProxy:
    """Forwards connections to a server's socket; `directory` is the host of a DSN."""

    def __init__(self, directory: Path, server: Path) -> None:
        self.directory = directory
        self._server = server / SOCKET_NAME
        self._cut: tuple[int, Cut] | None = None
        self._text = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / SOCKET_NAME))
        self._listener.listen()
        self.messages = 0
        """Messages of clients since the last call of arm()."""
        self.is_refusing = False
        self._ghosts: list[socket.socket] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def arm(self, number: int | None, cut: Cut = Cut.BEFORE, text: bytes = b"") -> None:
        """Lose the connection at this number of the client's messages with the text, counted from now."""
        self.messages = 0
        self._text = text
        self._cut = None if number is None else (number, cut)

    @property
    def has_cut(self) -> bool:
        return self._cut is None

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                _end(end)
        self.end_ghosts()

    def end_ghosts(self) -> None:
        """Let the server notice the losses."""
        while self._ghosts:
            _end(self._ghosts.pop())

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_refusing:
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._server))
            except OSError:
                client.close()
                continue
            self._pairs.append((client, server))
            threading.Thread(target=self._forward_client, args=(client, server), daemon=True).start()
            threading.Thread(target=self._forward_server, args=(server, client), daemon=True).start()

    def _forward_server(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while chunk := server.recv(65_536):
                client.sendall(chunk)
        _end(client)

    def _forward_client(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            # The first message has no type.
            head = _read(client, 4)
            server.sendall(head + _read(client, int.from_bytes(head) - 4))
            while True:
                head = _read(client, 5)
                message = head + _read(client, int.from_bytes(head[1:]) - 4)
                self.messages += self._text in message
                if self._cut is None or self._text not in message or self.messages != self._cut[0]:
                    server.sendall(message)
                    continue
                cut, self._cut = self._cut[1], None
                if cut in (Cut.AFTER, Cut.GHOST):
                    server.sendall(message)
                if cut in (Cut.GHOST, Cut.LATE, Cut.NOT_NOTICED):
                    self._ghosts.append(server)
                    _end(client)
                    if cut is Cut.LATE:
                        # What the client does meanwhile must not matter, however long it takes.
                        time.sleep(LATE_S)
                        server.sendall(message)
                    return
                break
        _end(client)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)


def _read(source: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        chunk = source.recv(size - len(content))
        if not chunk:
            raise OSError("closed")
        content += chunk
    return content


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
