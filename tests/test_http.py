"""The guarded client reaches what it may reach, as long and as much as it may, and nothing else."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.effects.addresses import BLOCKED, Policy, parse_policy
from actors.effects.http import Answer, Client, Failure
from actors.effects.resolver import NameNotFound, Resolver
from actors.effects.urls import InvalidUrl, parse_url
from outbox import db
from tests.receivers import OK, Authority, Names, Receiver, receiving

LOOPBACK = parse_policy((443, 8443), ("*=127.0.0.1/32:*",), ())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def client(policy: Policy = LOOPBACK, ca_file: Path | None = None, **names: list[str]) -> Client:
    answers = {name.replace("_", "."): addresses for name, addresses in names.items()}
    return Client(policy, ca_file=ca_file, resolver=Resolver(Names(answers)))


def post(
    using: Client, url: str, *, deadline_s: float = 5, max_body_bytes: int = 16_384, **options: Any
) -> Answer | Failure:
    return using.exchange("POST", url, deadline_s=deadline_s, max_body_bytes=max_body_bytes, **options)


def answered(result: Answer | Failure) -> Answer:
    assert isinstance(result, Answer), result
    return result


def failed(result: Answer | Failure) -> tuple[str, str]:
    assert isinstance(result, Failure), result
    return result.error_class, result.message


# Where


def edges() -> list[str]:
    return sorted({str(address) for network in BLOCKED for address in (network[0], network[-1])})


@pytest.mark.parametrize("address", edges())
def test_the_first_and_last_address_of_every_blocked_range_is_blocked(address: str) -> None:
    assert not Policy().is_public(address)
    if ip_address(address).version == 4:
        assert not Policy().is_public(f"::ffff:{address}")


@pytest.mark.parametrize(
    "address",
    [
        "::ffff:127.0.0.1",
        "::ffff:100.64.0.1",
        "::ffff:0:7f00:1",
        "::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "2001:0:7f00:1::",
        "fd00:ec2::254",
        "169.254.169.254",
        "168.63.129.16",
        "192.88.99.1",
        "100.127.255.255",
        "224.0.0.251",
        "ff02::1",
    ],
)
def test_every_spelling_of_an_inner_address_is_blocked(address: str) -> None:
    assert not Policy().is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "::ffff:8.8.8.8", "2606:4700::1111", "172.15.255.255", "172.32.0.0"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert Policy().is_public(address)


def test_a_range_of_the_settings_is_blocked_too() -> None:
    policy = parse_policy((443,), (), ("8.8.8.0/24", "2606:4700:64::/96"))
    assert not policy.is_public("8.8.8.8")
    assert not policy.is_public("2606:4700:64::7f00:1")
    assert policy.is_public("8.8.9.8")


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "example.com",
        "example.com=10.0.0.0/8",
        "example.com=10.0.0.0:x",
        "example.com=10.0.0.1/8:443",
        "example.com=10.0.0.0/8:0",
        "example.com=10.0.0.0/8:65536",
        "=10.0.0.0/8:443",
        "*.example.com=10.0.0.0/8:443",
        "*=10.0.0.0/7:443",
        "*=0.0.0.0/0:*",
        "*=fc00::/15:443",
    ],
)
def test_a_malformed_or_far_too_wide_exemption_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="outbound_allow"):
        parse_policy((443,), (entry,), ())


@pytest.mark.parametrize(
    ("host", "port", "address", "expected"),
    [
        ("inner.example", 8080, "10.1.2.3", True),
        ("inner.example", 8080, "::ffff:10.1.2.3", True),
        ("inner.example", 8081, "10.1.2.3", False),
        ("inner.example", 8080, "10.2.0.1", False),
        ("other.example", 8080, "10.1.2.3", False),
        ("any.example", 9000, "fd00::1", True),
    ],
)
def test_an_exemption_opens_its_host_network_and_port_only(host: str, port: int, address: str, expected: bool) -> None:
    policy = parse_policy((443,), ("Inner.Example.=10.1.0.0/16:8080", "*=fd00::/16:*"), ())
    assert policy.exempts(host, port, address) is expected


VALID_URLS = [
    ("https://example.com", "https://example.com/", "example.com", 443),
    ("HTTPS://Example.COM./a?b=c", "https://example.com/a?b=c", "example.com", 443),
    (
        "https://b\u00fccher.example/\u00fc",
        "https://xn--bcher-kva.example/%C3%BC",
        "xn--bcher-kva.example",
        443,
    ),
    ("https://example.com:8443/", "https://example.com:8443/", "example.com", 8443),
    ("https://example.com:443/", "https://example.com/", "example.com", 443),
    ("https://192.0.2.7/", "https://192.0.2.7/", "192.0.2.7", 443),
    ("https://[2001:DB8::1]/", "https://[2001:db8::1]/", "2001:db8::1", 443),
    ("https://a_b.example/", "https://a_b.example/", "a_b.example", 443),
]

INVALID_URLS = [
    "",
    "example.com",
    "//example.com",
    "https:example.com",
    "ftp://example.com/",
    "http://example.com/",
    "http:///x",
    "https:///x",
    "https://",
    "https://./",
    "https://a..b/",
    "https://-a.example/",
    "https://xn--/",
    "https://xn--a/",
    "https://" + "a" * 64 + ".example/",
    "https://example.com/" + "a" * 2_048,
    "https://example.com:0/",
    "https://example.com:80/",
    "https://example.com:8080/",
    "https://example.com:99999/",
    "https://example.com:-1/",
    "https://user@example.com/",
    "https://user:word@example.com/",
    "https://@example.com/",
    "https://example.com\\@other.example/",
    "https://example.com/\\@",
    "https://example.com/#part",
    "https://example.com/a b",
    "https://example.com/\r\nx",
    "https://example.com/\u00a0",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://017700000001/",
    "https://0177.0.0.1/",
    "https://1.2.3.256/",
    "https://example.0x7f/",
    "https://\uff11\uff12\uff17.0.0.1/",
    "https://[::1/",
    "https://[1.2.3.4]/",
    "https://[fe80::1%25eth0]/",
    "https://ex%61mple.com/",
    "https://example.com/\ud800",
]


@pytest.mark.parametrize(("text", "url", "host", "port"), VALID_URLS)
def test_a_url_is_kept_in_one_spelling(text: str, url: str, host: str, port: int) -> None:
    target = parse_url(text, Policy(), allow_http=False)
    assert (target.url, target.host, target.port) == (url, host, port)
    assert parse_url(url, Policy(), allow_http=False) == target


@pytest.mark.parametrize("text", INVALID_URLS)
def test_every_other_url_is_refused_by_a_rule_that_does_not_show_it(text: str) -> None:
    with pytest.raises(InvalidUrl) as refusal:
        parse_url(text, Policy(), allow_http=False)
    assert "example" not in str(refusal.value)


@given(st.one_of(st.text(max_size=40), st.from_regex(r"https?://[^/]{0,20}(/.{0,20})?", fullmatch=True)))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        target = parse_url(text, LOOPBACK, allow_http=True)
    except InvalidUrl:
        return
    assert parse_url(target.url, LOOPBACK, allow_http=True) == target


def test_http_is_allowed_by_setting_on_port_80_and_by_exemption() -> None:
    assert parse_url("http://example.com/", Policy(), allow_http=True).port == 80
    exempting = parse_policy((443,), ("inner.example=10.0.0.0/8:8080",), ())
    assert parse_url("http://inner.example:8080/", exempting, allow_http=False).port == 8080


@pytest.mark.parametrize(
    ("url", "policy", "reason"),
    [
        ("https://name.example/", Policy(), "address"),
        ("https://name.example:8080/", LOOPBACK, "port"),
        ("http://name.example:443/", LOOPBACK, "scheme"),
    ],
)
def test_a_name_that_resolves_elsewhere_than_its_exemption_stays_blocked(url: str, policy: Policy, reason: str) -> None:
    assert failed(post(client(policy, name_example=["10.0.0.1"]), url)) == ("blocked", reason)


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "https://[::ffff:7f00:1]/", "https://169.254.169.254/"])
def test_a_literal_inner_address_is_blocked(url: str) -> None:
    assert failed(post(client(Policy()), url)) == ("blocked", "address")


def test_one_inner_address_refuses_the_whole_answer() -> None:
    with receiving() as inner:
        exempt = parse_policy((443,), (f"*=127.0.0.1/32:{inner.port}",), ())
        using = client(exempt, mixed_example=["127.0.0.1", "127.0.0.2"])
        assert failed(post(using, f"http://mixed.example:{inner.port}/")) == ("blocked", "scheme")
        assert failed(post(using, f"https://mixed.example:{inner.port}/")) == ("blocked", "port")
    assert inner.requests == []


def test_a_name_that_turns_inward_is_blocked_at_the_next_call() -> None:
    names = Names({"turning.example": ["127.0.0.1"]})
    with receiving() as inner:
        exempt = parse_policy((443,), (f"turning.example=127.0.0.1/32:{inner.port}",), ())
        using = Client(exempt, resolver=Resolver(names))
        assert answered(post(using, f"http://turning.example:{inner.port}/")).status == 200
        names.answers["turning.example"] = ["127.0.0.2"]
        assert failed(post(using, f"http://turning.example:{inner.port}/"))[0] == "blocked"
    assert len(inner.requests) == 1
    assert names.asked == ["turning.example"] * 2


def test_the_neighbour_port_of_an_exemption_stays_blocked() -> None:
    with receiving() as open_one, receiving() as other:
        using = client(parse_policy((443,), (f"*=127.0.0.1/32:{open_one.port}",), ()))
        assert answered(post(using, open_one.url)).status == 200
        assert failed(post(using, other.url)) == ("blocked", "invalid_url")
    assert other.requests == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_answers_and_never_followed(status: int) -> None:
    with receiving() as inner:
        reply = f"HTTP/1.1 {status} Moved\r\nLocation: {inner.url}\r\nContent-Length: 0\r\n\r\n".encode()
        with receiving(reply) as outer:
            answer = answered(post(client(), outer.url))
    assert (answer.status, answer.header("location")) == (status, inner.url)
    assert inner.requests == []


def test_proxies_netrc_and_cookies_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password word\n")
    netrc.chmod(0o600)
    with (
        receiving() as proxy,
        receiving(OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b\r\n\r\n", 1)) as receiver,
    ):
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NETRC", str(netrc))
        using = client()
        assert [answered(post(using, receiver.url)).status for _ in range(2)] == [200, 200]
        assert not {"authorization", "cookie", "proxy-authorization"} & set(receiver.headers())
    assert proxy.requests == []


# With whom


def test_host_and_server_name_stay_the_name_while_the_address_is_pinned(authority: Authority) -> None:
    with receiving(tls=authority.serving("hook.example")) as receiver:
        using = client(ca_file=authority.trust, hook_example=["127.0.0.1"])
        answer = answered(post(using, f"https://hook.example:{receiver.port}/x?y"))
    assert receiver.server_names == ["hook.example"]
    assert receiver.headers()["host"] == f"hook.example:{receiver.port}"
    assert receiver.requests[0].startswith(b"POST /x?y HTTP/1.1\r\n")
    assert (answer.status, answer.trace.remote_ip) == (200, "127.0.0.1")
    phases = (answer.trace.dns_ms, answer.trace.connect_ms, answer.trace.tls_ms, answer.trace.first_byte_ms)
    assert all(phase is not None and phase < answer.trace.total_ms for phase in phases)


def test_each_of_two_hosts_behind_one_address_has_its_certificate_checked(authority: Authority) -> None:
    with receiving(tls=authority.serving("first.example")) as receiver:
        using = client(ca_file=authority.trust, first_example=["127.0.0.1"], second_example=["127.0.0.1"])
        assert answered(post(using, f"https://first.example:{receiver.port}/")).status == 200
        assert failed(post(using, f"https://second.example:{receiver.port}/"))[0] == "tls_error"
    assert len(receiver.requests) == 1


def test_a_certificate_of_an_unknown_authority_is_a_tls_error(authority: Authority) -> None:
    with receiving(tls=authority.serving("hook.example")) as receiver:
        using = client(hook_example=["127.0.0.1"])
        assert failed(post(using, f"https://hook.example:{receiver.port}/"))[0] == "tls_error"
    assert receiver.requests == []


def test_a_certificate_for_an_address_is_accepted_for_that_address(authority: Authority) -> None:
    with receiving(tls=authority.serving("127.0.0.1")) as receiver:
        answer = answered(post(client(ca_file=authority.trust), f"https://127.0.0.1:{receiver.port}/"))
    assert answer.status == 200


def test_an_address_that_refuses_is_passed_over_for_the_next() -> None:
    with receiving() as receiver:
        policy = parse_policy((443,), ("*=127.0.0.0/8:*",), ())
        using = client(policy, two_example=["127.0.0.9", "127.0.0.1"])
        answer = answered(post(using, f"http://two.example:{receiver.port}/"))
    assert (answer.status, answer.trace.remote_ip) == (200, "127.0.0.1")


# How it fails


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def silence(connection: socket.socket) -> None:
    connection.recv(1)


def trickle(connection: socket.socket, head: bytes, drop: bytes) -> None:
    connection.sendall(head)
    while True:
        time.sleep(0.05)
        connection.sendall(drop)


def test_a_refused_connection_and_an_unknown_name_are_told_apart() -> None:
    assert failed(post(client(), f"http://127.0.0.1:{unused_port()}/"))[0] == "connection_refused"
    assert failed(post(client(Policy()), "https://nowhere.example/"))[0] == "dns_error"
    assert failed(post(client(Policy(), empty_example=[]), "https://empty.example/"))[0] == "dns_error"


def test_a_reset_before_the_answer_is_a_connection_reset() -> None:
    with receiving(reset) as receiver:
        assert failed(post(client(), receiver.url))[0] == "connection_reset"


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 102_400 + b"\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" * 10_000,
        b"HTTP/1.1 099 Odd\r\n\r\n",
    ],
    ids=["nothing", "ssh", "bad status", "bad header", "header cap", "1xx flood", "status below 100"],
)
def test_what_is_not_http_or_beyond_a_cap_is_a_protocol_error(reply: bytes) -> None:
    with receiving(reply) as receiver:
        assert failed(post(client(), receiver.url))[0] == "protocol_error"


@pytest.mark.parametrize(
    "reply",
    [
        silence,
        lambda connection: trickle(connection, b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        lambda connection: trickle(connection, b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    ],
    ids=["silence", "header trickle", "1xx trickle"],
)
def test_the_deadline_ends_an_exchange_that_only_trickles(reply: Any) -> None:
    with receiving(reply) as receiver:
        started = time.monotonic()
        assert failed(post(client(), receiver.url, deadline_s=0.4))[0] == "timeout"
        assert time.monotonic() - started < 1.5


@contextmanager
def deaf_listener() -> Iterator[int]:
    """A listener whose peer never reads, with small buffers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        yield listener.getsockname()[1]


def test_the_deadline_covers_a_receiver_that_does_not_read() -> None:
    with deaf_listener() as port:
        result = post(client(), f"http://127.0.0.1:{port}/", deadline_s=0.4, body=b"x" * 10_000_000)
    assert failed(result)[0] == "timeout"


def test_the_deadline_covers_the_tls_handshake() -> None:
    with deaf_listener() as port:
        result = post(client(), f"https://127.0.0.1:{port}/", deadline_s=0.4)
    assert failed(result)[0] == "timeout"


def test_the_deadline_covers_a_name_server_that_is_silent() -> None:
    answer = threading.Event()

    def slow(host: str) -> list[str]:
        answer.wait(5)
        return ["127.0.0.1"]

    started = time.monotonic()
    result = post(Client(LOOPBACK, resolver=Resolver(slow)), "https://slow.example/", deadline_s=0.3)
    assert failed(result)[0] == "dns_error"
    assert time.monotonic() - started < 1.5
    answer.set()


def test_callers_of_one_name_share_one_lookup() -> None:
    entered, answer, asked = threading.Event(), threading.Event(), []

    def slow(host: str) -> list[str]:
        asked.append(host)
        entered.set()
        answer.wait(5)
        return ["192.0.2.1"]

    resolver, found = Resolver(slow), []
    callers = [threading.Thread(target=lambda: found.append(resolver.resolve("a.example", 5))) for _ in range(8)]
    for caller in callers:
        caller.start()
    entered.wait(5)
    time.sleep(0.05)
    answer.set()
    for caller in callers:
        caller.join()
    assert (asked, found) == (["a.example"], [["192.0.2.1"]] * 8)
    assert resolver.resolve("a.example", 5) == ["192.0.2.1"]
    assert asked == ["a.example"] * 2


def test_no_free_thread_for_a_lookup_is_our_own_fault() -> None:
    answer = threading.Event()

    def slow(host: str) -> list[str]:
        answer.wait(10)
        return ["127.0.0.1"]

    resolver = Resolver(slow)
    for number in range(16):
        with pytest.raises(NameNotFound):
            resolver.resolve(f"{number}.example", 0.01)
    started = time.monotonic()
    result = post(Client(LOOPBACK, resolver=resolver), "https://one-more.example/")
    assert failed(result)[0] == "internal_error"
    assert 0.9 < time.monotonic() - started < 2.5
    answer.set()


def test_a_lookup_out_of_handles_is_our_own_fault() -> None:
    def broken(host: str) -> list[str]:
        raise OSError(24, "Too many open files")

    result = post(Client(LOOPBACK, resolver=Resolver(broken)), "https://a.example/")
    assert failed(result)[0] == "internal_error"


def test_a_lookup_that_breaks_does_not_leave_its_name_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(lambda host: ["192.0.2.1"])
    monkeypatch.setattr("middleware.lifecycle.spawn", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resolver.resolve("a.example", 1)
    monkeypatch.undo()
    assert resolver.resolve("a.example", 1) == ["192.0.2.1"]


def test_no_call_is_made_inside_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db._mark, "depth", 1, raising=False)
    with receiving() as receiver, pytest.raises(db.NetworkInTransaction):
        post(client(), receiver.url)
    assert receiver.requests == []


# How much


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\x00\xff\xed\xa0\x80",
    ],
    ids=["204", "empty", "truncated", "malformed chunks", "odd bytes"],
)
def test_the_status_line_decides_whatever_the_body_does(reply: bytes) -> None:
    with receiving(reply) as receiver:
        assert answered(post(client(), receiver.url)).status in (200, 204)


def test_a_reset_or_a_trickle_after_the_status_line_is_still_an_answer() -> None:
    def reset_after_headers(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        time.sleep(0.05)
        reset(connection)

    def drip(connection: socket.socket) -> None:
        trickle(connection, b"HTTP/1.1 200 OK\r\n\r\n", b"x")

    for reply in (reset_after_headers, drip):
        with receiving(reply) as receiver:
            answer = answered(post(client(), receiver.url, deadline_s=0.4))
        assert (answer.status, answer.complete) == (200, False)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65_536)


def test_a_body_is_cut_at_the_cap_and_not_read_further() -> None:
    with receiving(endless) as receiver:
        answer = answered(post(client(), receiver.url, max_body_bytes=1_000))
    assert (len(answer.body), answer.complete) == (1_000, False)


def test_a_body_of_exactly_the_cap_is_complete() -> None:
    with receiving(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfour") as receiver:
        answer = answered(post(client(), receiver.url, max_body_bytes=4))
    assert (answer.body, answer.complete) == (b"four", True)


def test_a_body_is_never_decompressed() -> None:
    packed = gzip.compress(b"\x00" * 50_000_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    with receiving(head + packed) as receiver:
        answer = answered(post(client(), receiver.url))
    assert answer.body == packed[:16_384]


def test_an_early_answer_to_a_large_request_is_read() -> None:
    def refuse_early(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

    with receiving(refuse_early) as receiver:
        assert answered(post(client(), receiver.url, body=b"x" * 300_000)).status == 413


def test_given_headers_are_sent_as_they_are_and_nothing_is_added() -> None:
    headers = [("user-agent", "Me/1"), ("accept", "*/*"), ("x-one", "a b\tc"), ("connection", "close")]
    with receiving() as receiver:
        post(client(), receiver.url, headers=headers, body="é".encode())
    assert receiver.headers() == dict(headers) | {"host": f"127.0.0.1:{receiver.port}", "content-length": "2"}
    assert receiver.body() == "é".encode()


def test_every_call_opens_a_connection_of_its_own_and_leaves_none() -> None:
    with receiving() as receiver:
        using = client()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(20):
            post(using, receiver.url)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 20
    assert isinstance(receiver, Receiver)
    assert len(receiver.requests) == 20
