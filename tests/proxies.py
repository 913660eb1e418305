"""A TCP proxy before the tests' Postgres that can forget, by name, what a session says or hears."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

NOTIFICATION = b"A"


@dataclass
class Session:
    """One connection of a client through the proxy, known by the application name it started with."""

    client: socket.socket
    server: socket.socket
    name: str = ""
    swallowed: bool = False
    unheard: bool = False

    def up(self) -> None:
        with suppress(OSError):
            hello = self.client.recv(8192)
            self.name = hello.split(b"application_name\0", 1)[-1].split(b"\0", 1)[0].decode()
            self.server.sendall(hello)
            while said := self.client.recv(65_536):
                if not self.swallowed:
                    self.server.sendall(said)
        self.close()

    def down(self) -> None:
        kept = b""
        with suppress(OSError):
            while said := self.server.recv(65_536):
                kept += said
                # The server's messages: a letter, then a length that counts itself.
                while len(kept) >= 5 and len(kept) > (size := int.from_bytes(kept[1:5])):
                    message, kept = kept[: size + 1], kept[size + 1 :]
                    if self.lets_through(message):
                        self.client.sendall(message)
        self.close()

    def lets_through(self, message: bytes) -> bool:
        """Whether the client hears this message of the server."""
        return not self.swallowed and not (self.unheard and message.startswith(NOTIFICATION))

    def close(self) -> None:
        for side in (self.client, self.server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


@dataclass
class Proxy:
    """Leads from *url* to the server."""

    url: str
    sessions: list[Session] = field(default_factory=list)

    def named(self, name: str) -> list[Session]:
        return [session for session in self.sessions if session.name == name]


@contextmanager
def proxy(url: str, kind: type[Session] = Session) -> Iterator[Proxy]:
    """A proxy to the server and database of *url*, on a port of its own; what passes is for *kind* to say."""
    parts = urlsplit(url)
    (folder,) = parse_qs(parts.query)["host"]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        way = Proxy(f"postgresql://postgres@127.0.0.1:{port}{parts.path}?sslmode=disable&gssencmode=disable")
        threads: list[threading.Thread] = []

        def take() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    # Each message is a packet of its own: none may wait for the acknowledgement of the one before it.
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    server = socket.socket(socket.AF_UNIX)
                    server.connect(f"{folder}/.s.PGSQL.5432")
                    session = kind(client, server)
                    way.sessions.append(session)
                    for run in (session.up, session.down):
                        threads.append(threading.Thread(target=run))
                        threads[-1].start()

        threads.append(threading.Thread(target=take))
        threads[0].start()
        try:
            yield way
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for session in way.sessions:
                session.close()
            for thread in threads:
                thread.join(5)
            for session in way.sessions:
                session.client.close()
                session.server.close()
