"""Where calls may go: addresses and ports, and the exemptions a person made (specs/webhooks.md 6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Neither this list nor `is_global` is enough alone: each lets through what the other stops.
BLOCKED: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8",  # reaches this machine
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier NAT: neither private nor global to Python
        "127.0.0.0/8",
        "169.254.0.0/16",  # cloud metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays: global to Python
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast: global to Python
        "240.0.0.0/4",
        "255.255.255.255/32",
        "168.63.129.16/32",  # a cloud's host agent on a public address
        "::/96",  # v4-compatible, unspecified and loopback
        "::ffff:0:0:0/96",  # translated
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",
        "100::/64",
        "100:0:0:1::/64",
        "2001::/23",  # Teredo and friends
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)

_WIDEST_FOR_ANY_HOST = {4: 8, 6: 16}


class BlockedAddress(Exception):
    """A call was refused. No httpx or httpcore error, so that no retry can take it for a network fault."""


@dataclass(frozen=True)
class Exemption:
    """One `HOST=CIDR:PORT` of `outbound_allow`; *host* and *port* None mean any."""

    host: str | None
    network: Network
    port: int | None

    def names(self, host: str, port: int) -> bool:
        return self.host in (None, host) and self.port in (None, port)


@dataclass(frozen=True)
class Policy:
    """What calls may reach."""

    ports: frozenset[int] = frozenset({443, 8443})
    allow: tuple[Exemption, ...] = ()
    block: tuple[Network, ...] = ()

    def knows(self, host: str, port: int) -> bool:
        """Whether some address of *host* at *port* may be exempt, so that only connecting can tell."""
        return any(exemption.names(host, port) for exemption in self.allow)

    def exempts(self, host: str, port: int, address: str) -> bool:
        """Whether an exemption lifts the address, port and `http` rules here."""
        ip = _unwrapped(address)
        return any(ip in exemption.network for exemption in self.allow if exemption.names(host, port))

    def rule_against(self, scheme: str, host: str, port: int, address: str, http_allowed: bool) -> str | None:
        """Which rule forbids to call *host* at *address*: scheme, port or address; None when none does."""
        if self.exempts(host, port, address):
            return None
        if scheme == "http" and not http_allowed:
            return "scheme"
        if not self.has_port(scheme, port):
            return "port"
        return None if self.is_public(address) else "address"

    def has_port(self, scheme: str, port: int) -> bool:
        """Whether *port* may be called without an exemption; 80 only with `http`."""
        return port in self.ports or (scheme == "http" and port == 80)

    def is_public(self, address: str) -> bool:
        """Whether *address* is global and in no blocked range; IPv4-mapped is judged as the IPv4 inside."""
        ip = _unwrapped(address)
        return ip.is_global and not any(ip in network for network in (*BLOCKED, *self.block))


def parse_exemption(entry: str) -> Exemption:
    """Read `HOST=CIDR:PORT`. ValueError when malformed, or when `*` as host opens too wide a network."""
    host, equals, rest = entry.strip().partition("=")
    cidr, colon, port = rest.rpartition(":")
    if not host or not equals or not colon:
        raise ValueError(f"outbound_allow {entry!r}: HOST=CIDR:PORT is wanted")
    try:
        network = ip_network(cidr.strip("[]"))
        number = None if port == "*" else _port(port)
    except ValueError as error:
        raise ValueError(f"outbound_allow {entry!r}: {error}") from None
    if host == "*" and network.prefixlen < _WIDEST_FOR_ANY_HOST[network.version]:
        raise ValueError(f"outbound_allow {entry!r}: a network so wide needs a host")
    return Exemption(None if host == "*" else _host(entry, host), network, number)


def parse_block(entry: str) -> Network:
    """Read one range of `outbound_block`. ValueError when malformed."""
    try:
        return ip_network(entry.strip())
    except ValueError as error:
        raise ValueError(f"outbound_block {entry!r}: {error}") from None


def parse_policy(ports: tuple[int, ...], allow: tuple[str, ...], block: tuple[str, ...]) -> Policy:
    """Read the outbound settings. ValueError names the entry that is wrong."""
    return Policy(
        frozenset(ports),
        tuple(parse_exemption(entry) for entry in allow),
        tuple(parse_block(entry) for entry in block),
    )


def _host(entry: str, host: str) -> str:
    bare = host.strip("[]").rstrip(".").lower()
    if not bare or not bare.isascii() or any(character in "*/@ " for character in bare):
        raise ValueError(f"outbound_allow {entry!r}: the host is one name, one address, or *")
    return IPv6Address(bare).compressed if ":" in bare else bare


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65_535:
        raise ValueError("the port is 1 to 65535, or *")
    return int(text)


def _unwrapped(address: str) -> Address:
    ip = ip_address(address)
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip
