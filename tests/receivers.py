"""For tests: a receiver that speaks raw bytes, names that resolve as told, certificates made on the spot."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Reply = Callable[[socket.socket], None] | bytes


@dataclass
class Receiver:
    """A listener on loopback that keeps the raw bytes of each request; `reply` may be changed at any time."""

    port: int
    reply: Reply
    requests: list[bytes] = field(default_factory=list)
    server_names: list[str | None] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def headers(self, index: int = -1) -> dict[str, str]:
        head = self.requests[index].partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}

    def body(self, index: int = -1) -> bytes:
        return self.requests[index].partition(b"\r\n\r\n")[2]


@contextmanager
def receiving(reply: Reply = OK, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Serve each connection in a thread: read one request, let `reply` answer; all ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = Receiver(listener.getsockname()[1], reply)
        if tls is not None:
            tls.sni_callback = lambda _sock, name, _context: receiver.server_names.append(name)
        accepting = threading.Thread(target=_accept, args=(listener, receiver, tls))
        accepting.start()
        try:
            yield receiver
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listener: socket.socket, receiver: Receiver, tls: ssl.SSLContext | None) -> None:
    open_connections: list[socket.socket] = []
    threads: list[threading.Thread] = []
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            open_connections.append(connection)
            threads.append(threading.Thread(target=_serve, args=(connection, receiver, tls)))
            threads[-1].start()
    for connection in open_connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


def _serve(connection: socket.socket, receiver: Receiver, tls: ssl.SSLContext | None) -> None:
    with suppress(OSError), connection:
        stream = tls.wrap_socket(connection, server_side=True) if tls else connection
        with stream:
            request = _read_request(stream)
            if not request:
                return
            receiver.requests.append(request)
            receiver.in_flight += 1
            receiver.most_in_flight = max(receiver.most_in_flight, receiver.in_flight)
            try:
                if isinstance(receiver.reply, bytes):
                    stream.sendall(receiver.reply)
                else:
                    receiver.reply(stream)
            finally:
                receiver.in_flight -= 1


def _read_request(stream: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += (chunk := stream.recv(65_536))
        if not chunk:
            return b""
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while lengths and len(body) < lengths[0]:
        body += stream.recv(65_536)
    return head + b"\r\n\r\n" + body


@dataclass
class Names:
    """A resolver's lookup that answers as told and remembers what it was asked."""

    answers: dict[str, list[str]]
    asked: list[str] = field(default_factory=list)

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.answers[host]


class Authority:
    """A certificate authority of the test's own; `trust` is the file to trust it by."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Test authority")])
        self.trust = folder / "authority.pem"
        self.trust.write_bytes(_pem(self._sign(self._name, self._key.public_key(), [], is_authority=True)))

    def serving(self, *names: str) -> ssl.SSLContext:
        """A server context with a certificate for *names* (addresses too)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        chain = self._folder / f"{names[0]}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        chain.write_bytes(private + _pem(self._sign(subject, key.public_key(), list(names))))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        return context

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        names: list[str],
        *,
        is_authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if is_authority:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), False)
        return builder.sign(self._key, hashes.SHA256())


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
