"""Read a URL that somebody gave us so that every part of the program understands the same by it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

import httpx
import idna

from actors.effects.addresses import Policy

MAX_URL_BYTES = 2_048
_DEFAULT_PORT = {"https": 443, "http": 80}
_AUTHORITY = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\xa0\\\s]")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


class InvalidUrl(Exception):
    """The text names the rule that is broken, never the value."""


@dataclass(frozen=True)
class Target:
    """A URL taken apart: *host* is a lower-case A-label name or a bare address, *url* the one spelling.

    *http_allowed*: whoever gave it accepts `http`, so that the check when connecting does.
    """

    scheme: str
    host: str
    port: int
    url: str
    http_allowed: bool

    @property
    def origin(self) -> str:
        """Scheme, host and port: all that a log may show."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"


def parse_url(text: str, policy: Policy, *, allow_http: bool) -> Target:
    """Read *text* by the rules of specs/webhooks.md 2. Raises InvalidUrl, and nothing else, for any text."""
    url = _parse(text)
    scheme, host = url.scheme, _host(url)
    port = url.port or _DEFAULT_PORT[scheme]
    if not policy.knows(host, port):
        _check_policy(scheme, port, policy, allow_http)
    explicit = "" if url.port is None else f":{url.port}"
    whole = f"{scheme}://{_bracketed(host)}{explicit}{url.raw_path.decode('ascii')}"
    if len(whole) > MAX_URL_BYTES:
        raise InvalidUrl(f"longer than {MAX_URL_BYTES} bytes")
    return Target(scheme, host, port, whole, allow_http)


def _parse(text: str) -> httpx.URL:
    if len(text) > MAX_URL_BYTES:
        raise InvalidUrl(f"longer than {MAX_URL_BYTES} bytes")
    if _FORBIDDEN.search(text):
        raise InvalidUrl("white space, control characters and backslashes are not allowed")
    authority = _AUTHORITY.match(text)
    if not authority:
        raise InvalidUrl("must start with https://")
    if "@" in authority[1]:
        raise InvalidUrl("user information is not allowed")
    if "#" in text:
        raise InvalidUrl("a fragment is not allowed")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, idna.IDNAError, UnicodeError, ValueError):
        raise InvalidUrl("cannot be read as a URL") from None
    if url.port is not None and not 1 <= url.port <= 65_535:
        raise InvalidUrl("the port is not 1 to 65535")
    return url


def _host(url: httpx.URL) -> str:
    host = url.raw_host.decode("ascii").lower()
    if ":" in host:
        return _ipv6(host)
    host = host.removesuffix(".")
    labels = host.split(".")
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        return _ipv4(host)
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise InvalidUrl("the host is not a name")
    for label in labels:
        _check_alabel(label)
    return host


def _check_alabel(label: str) -> None:
    if not label.startswith("xn--"):
        return
    try:
        idna.ulabel(label)
    except (idna.IDNAError, UnicodeError):
        raise InvalidUrl("the host is not a valid international name") from None


def _ipv4(host: str) -> str:
    try:
        return str(IPv4Address(host))
    except AddressValueError:
        raise InvalidUrl("an IPv4 address is written as four decimal numbers") from None


def _ipv6(host: str) -> str:
    try:
        address = IPv6Address(host)
    except AddressValueError:
        raise InvalidUrl("the address in brackets is not IPv6") from None
    if address.scope_id:
        raise InvalidUrl("a zone is not allowed")
    return address.compressed


def _check_policy(scheme: str, port: int, policy: Policy, allow_http: bool) -> None:
    if scheme == "http" and not allow_http:
        raise InvalidUrl("must start with https://")
    if not policy.has_port(scheme, port):
        raise InvalidUrl("the port is not allowed")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
