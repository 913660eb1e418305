"""The guarded HTTP client: one exchange with a host somebody else named, bounded in place, time and size.

Webhooks, suppliers and fetches go through `Client.exchange`. It follows no redirect, uses no proxy, keeps no
cookie and no connection, and does not raise for what the other side did: that is a `Failure`.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpcore
import httpx

from actors.effects.addresses import BlockedAddress, Policy
from actors.effects.network import Allowance, Deadline, GuardedBackend, Trace, checked_addresses
from actors.effects.resolver import NameNotFound, NoCapacity, Resolver
from actors.effects.urls import InvalidUrl, Target, parse_url
from outbox.db import refuse_in_transaction

MAX_HEADER_BYTES = 102_400
MAX_READ_BYTES = 262_144

Headers = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """What came back. *headers* have lower-case names; *body* is raw and cut at the cap, *complete* tells."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes = field(repr=False)
    complete: bool
    trace: Trace = field(default_factory=Trace)

    def header(self, name: str) -> str | None:
        """The value of *name*; several are joined by comma and space."""
        values = [value for given, value in self.headers if given == name]
        return ", ".join(values) if values else None


@dataclass(frozen=True)
class Failure:
    """Why there is no answer.

    *error_class* is dns_error, connection_refused, connection_reset, network_unreachable, tls_error, timeout
    or protocol_error; or `blocked`: the call is not allowed, *message* is address, port, scheme or
    invalid_url; or `internal_error`: our own fault.
    """

    error_class: str
    message: str
    trace: Trace = field(default_factory=Trace)


class Client:
    """One for the process: a policy, the trusted authorities, a resolver. Safe to use from many threads."""

    def __init__(self, policy: Policy, *, ca_file: Path | None = None, resolver: Resolver | None = None) -> None:
        self.policy = policy
        self.resolver = resolver or Resolver()
        self._tls = _tls_context(ca_file)

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        deadline_s: float,
        max_body_bytes: int,
        allow_http: bool = False,
    ) -> Answer | Failure:
        """Send one request and read the answer's first *max_body_bytes*, all within *deadline_s* seconds.

        Raises NetworkInTransaction when this thread has a transaction open.
        """
        refuse_in_transaction("http")
        allowance = Allowance(Deadline(deadline_s), MAX_READ_BYTES + max_body_bytes, Trace())
        with allowance.trace.measure("total_ms"):
            try:
                target = parse_url(url, self.policy, allow_http=allow_http)
                request = httpx.Request(method, target.url, headers=list(headers), content=body)
                with GuardedTransport(self._backend(target, allowance), self._tls) as transport:
                    return _read(transport.handle_request(request), max_body_bytes, allowance.trace)
            except InvalidUrl:
                return Failure("blocked", "invalid_url", allowance.trace)
            except BlockedAddress as refusal:
                return Failure("blocked", str(refusal), allowance.trace)
            except NameNotFound as error:
                return Failure("dns_error", str(error), allowance.trace)
            except NoCapacity as error:
                return Failure("internal_error", str(error), allowance.trace)
            except httpcore.NetworkError as error:
                error_class, message = error.args
                return Failure(error_class, message, allowance.trace)
            except httpcore.TimeoutException as error:
                return Failure("timeout", str(error), allowance.trace)
            except httpcore.RemoteProtocolError as error:
                return Failure("protocol_error", str(error), allowance.trace)

    def look_up(self, target: Target) -> None:
        """Raise BlockedAddress, NameNotFound or NoCapacity when *target* could not be called now."""
        refuse_in_transaction("dns")
        checked_addresses(target, self.policy, self.resolver)

    def _backend(self, target: Target, allowance: Allowance) -> GuardedBackend:
        return GuardedBackend(target, self.policy, self.resolver, allowance)


class GuardedTransport(httpx.BaseTransport):
    """An httpx transport for one request: no retries, no keep-alive, HTTP/1.1. Errors are httpcore's."""

    def __init__(self, backend: httpcore.NetworkBackend, tls: ssl.SSLContext) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls,
            max_connections=1,
            max_keepalive_connections=0,
            retries=0,
            network_backend=backend,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._pool.handle_request(
            httpcore.Request(
                request.method,
                httpcore.URL(
                    scheme=request.url.raw_scheme,
                    host=request.url.raw_host,
                    port=request.url.port,
                    target=request.url.raw_path,
                ),
                headers=request.headers.raw,
                content=request.read(),
            )
        )
        if sum(len(name) + len(value) for name, value in answer.headers) > MAX_HEADER_BYTES:
            raise httpcore.RemoteProtocolError("the header section is longer than the cap")
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer))

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


def _read(response: httpx.Response, max_bytes: int, trace: Trace) -> Answer:
    """Read up to *max_bytes* raw. The status line decided already: a body that breaks off is incomplete."""
    body, complete = bytearray(), False
    try:
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > max_bytes:
                break
        complete = len(body) <= max_bytes
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.RemoteProtocolError):
        complete = False
    finally:
        response.close()
    headers = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw)
    return Answer(response.status_code, headers, bytes(body[:max_bytes]), complete, trace)


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    context = httpx.create_ssl_context(trust_env=False)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    return context
