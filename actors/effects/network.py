"""Connect to checked addresses only, and keep one deadline and one byte cap over all of the connection."""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import zip_longest
from typing import Any

import httpcore

from actors.effects.addresses import BlockedAddress, Policy
from actors.effects.resolver import NoCapacity, Resolver
from actors.effects.urls import Target

DNS_S = 3.0
CONNECT_S = 5.0
ONE_ADDRESS_S = 2.0
ADDRESSES_TRIED = 4
MAX_READ_BYTES = 16_384

_OUT_OF_HANDLES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# The last two are what a host without IPv6 answers.
_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class Deadline:
    """A fixed end in monotonic time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self, at_most: float = float("inf")) -> float:
        """Seconds left, at most *at_most*. Raises TimeoutError when none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left, at_most)


@dataclass
class Trace:
    """How long the parts of one exchange took, as far as it came, and with whom it spoke."""

    remote_ip: str | None = None
    dns_ms: float | None = None
    connect_ms: float | None = None
    tls_ms: float | None = None
    first_byte_ms: float | None = None
    total_ms: float = 0.0

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            setattr(self, phase, (time.monotonic() - started) * 1_000)


@dataclass
class Allowance:
    """What one exchange may still use; *bytes_left* counts everything read, interim answers too."""

    deadline: Deadline
    bytes_left: int
    trace: Trace


@dataclass(frozen=True)
class GuardedBackend(httpcore.NetworkBackend):
    """Connects to one target: resolves it once, checks every address, connects to one of those checked."""

    target: Target
    policy: Policy
    resolver: Resolver
    allowance: Allowance

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        """Raises BlockedAddress, NameNotFound, NoCapacity, or httpcore's ConnectTimeout and ConnectError."""
        deadline, trace = self.allowance.deadline, self.allowance.trace
        with _as_httpcore(httpcore.ConnectTimeout, httpcore.ConnectError):
            with trace.measure("dns_ms"):
                addresses = checked_addresses(self.target, self.policy, self.resolver, deadline.left_s(DNS_S))
            with trace.measure("connect_ms"):
                sock, trace.remote_ip = _connect_one_of(_alternating(addresses), port, deadline)
        return _GuardedStream(sock, self.allowance)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.NetworkStream:
        raise BlockedAddress("unix socket")


def checked_addresses(target: Target, policy: Policy, resolver: Resolver, wait_s: float = DNS_S) -> list[str]:
    """Return every address of *target*'s host, all of them allowed.

    Raises BlockedAddress when one is not (dropping it would hide an attack), NameNotFound, NoCapacity.
    """
    try:
        addresses = [str(ip_address(target.host))]
    except ValueError:
        addresses = resolver.resolve(target.host, wait_s)
    for address in addresses:
        if rule := policy.rule_against(target.scheme, target.host, target.port, address, target.http_allowed):
            raise BlockedAddress(rule)
    return addresses


class _GuardedStream(httpcore.NetworkStream):
    """A socket whose every operation gets the time that is left; httpcore's own timeouts are ignored."""

    def __init__(self, sock: socket.socket, allowance: Allowance) -> None:
        self._sock = sock
        self._allowance = allowance
        self._opened = time.monotonic()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _as_httpcore(httpcore.ReadTimeout, httpcore.ReadError):
            self._sock.settimeout(self._allowance.deadline.left_s())
            data = self._sock.recv(min(max_bytes, MAX_READ_BYTES))
        self._count(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _as_httpcore(httpcore.WriteTimeout, httpcore.WriteError):
            while buffer:
                self._sock.settimeout(self._allowance.deadline.left_s())
                buffer = buffer[self._sock.send(buffer) :]

    def close(self) -> None:
        self._sock.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            with (
                _as_httpcore(httpcore.ConnectTimeout, httpcore.ConnectError),
                self._allowance.trace.measure("tls_ms"),
            ):
                self._sock.settimeout(self._allowance.deadline.left_s())
                secured = ssl_context.wrap_socket(self._sock, server_hostname=server_hostname)
        except BaseException:
            self.close()
            raise
        return _GuardedStream(secured, self._allowance)

    def get_extra_info(self, info: str) -> Any:
        return self._sock if info == "ssl_object" and isinstance(self._sock, ssl.SSLSocket) else None

    def _count(self, data: bytes) -> None:
        if self._allowance.trace.first_byte_ms is None:
            self._allowance.trace.first_byte_ms = (time.monotonic() - self._opened) * 1_000
        self._allowance.bytes_left -= len(data)
        if self._allowance.bytes_left < 0:
            raise httpcore.RemoteProtocolError("the answer is longer than the cap")


def _connect_one_of(addresses: list[str], port: int, deadline: Deadline) -> tuple[socket.socket, str]:
    within = Deadline(deadline.left_s(CONNECT_S))
    failure: OSError | None = None
    for address in addresses[:ADDRESSES_TRIED]:
        try:
            return _connect(address, port, within.left_s(ONE_ADDRESS_S)), address
        except OSError as error:
            if error.errno in _OUT_OF_HANDLES:
                raise NoCapacity(f"connect: {error.strerror}") from None
            failure = error if failure is None or failure.errno in _NO_ROUTE else failure
    assert failure is not None  # noqa: S101  a resolver never returns an empty list
    raise failure


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect((address, port))
        if ip_address(sock.getpeername()[0]) != ip_address(address):
            raise BlockedAddress("address")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _alternating(addresses: list[str]) -> list[str]:
    """The same addresses, families in turn, the first one's family first."""
    first = [address for address in addresses if (":" in address) == (":" in addresses[0])]
    other = [address for address in addresses if address not in first]
    return [address for pair in zip_longest(first, other) for address in pair if address is not None]


@contextmanager
def _as_httpcore(timeout: type[Exception], failure: type[Exception]) -> Iterator[None]:
    """Raise httpcore's errors, which it cleans up after; *failure* gets our class of error and its text."""
    try:
        yield
    except TimeoutError as error:
        raise timeout(str(error)) from error
    except OSError as error:
        # As arguments, because the pool of httpcore drops the cause.
        raise failure(_error_class(error), error.strerror or str(error)) from error


def _error_class(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "tls_error"
    if isinstance(error, ConnectionRefusedError):
        return "connection_refused"
    return "connection_reset" if isinstance(error, ConnectionError) else "network_unreachable"
