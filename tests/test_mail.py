"""Mails over real sockets: what arrives, what is refused, and what each answer of the server means."""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email import message_from_bytes, policy
from email.message import EmailMessage
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from dramatiq.errors import Retry

import settings
from actors import corpus, notify  # noqa: F401 - corpus declares the event types
from actors.effects import mail as smtp
from actors.effects.mail import Greylisted, Mail, MailError, MailMisconfigured, Server, judge, send, server
from middleware import context
from middleware.failures import Discard, Snooze
from outbox import events
from outbox.db import Database, NetworkInTransaction

MAIL = Mail(
    id="0b5c.owner.notify",
    date=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    sender="posthouse@example.org",
    recipient="owner@example.com",
    subject="Import of ünï: 3 added",
    text="Hello.\n.\nA lone dot above, a bare LF each line.\n",
    html="<p>Hello.</p>",
)


# --- servers


@dataclass
class Inbox:
    """What a server got, and what it answers."""

    mails: list[EmailMessage] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)
    senders: list[str] = field(default_factory=list)
    rcpt: str = "250 OK"
    data: str = "250 OK"

    async def handle_MAIL(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        self.senders.append(address)
        envelope.mail_from = address
        return "250 OK"

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if self.rcpt.startswith("250"):
            self.recipients.append(address)
            envelope.rcpt_tos.append(address)
        return self.rcpt

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        if self.data.startswith("250"):
            parsed = message_from_bytes(envelope.content, policy=policy.SMTP)
            self.mails.append(parsed)
        return self.data


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serve(inbox: Inbox, *, is_implicit: bool = False, **options: Any) -> Iterator[int]:
    """An SMTP server on loopback; its port. *is_implicit*: TLS from the first byte."""
    wrap = {"ssl_context": options.pop("tls_context")} if is_implicit else {}
    controller = Controller(inbox, hostname="127.0.0.1", port=free_port(), **wrap, **options)
    controller.start()
    try:
        yield controller.port
    finally:
        controller.stop()


@contextmanager
def scripted(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that says what *talk* does to each connection; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            with conn:
                try:
                    talk(conn)
                except OSError:
                    continue

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@dataclass(frozen=True)
class Tls:
    """A server's context, and the file of the authority that vouches for it."""

    context: ssl.SSLContext
    ca_file: Path


def certificate(folder: Path, **names: Any) -> Tls:
    """A self-signed certificate for *names* (host=, address=)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    alternatives: list[x509.GeneralName] = []
    if "address" in names:
        alternatives.append(x509.IPAddress(ip_address(names["address"])))
    if "host" in names:
        alternatives.append(x509.DNSName(names["host"]))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "certificate.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file = folder / "key.pem"
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(pem, key_file)
    return Tls(server_context, pem)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificate(tmp_path_factory.mktemp("tls"), address="127.0.0.1")


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def plain(inbox: Inbox) -> Iterator[Server]:
    with serve(inbox) as port:
        yield Server("127.0.0.1", port, "none")


# --- what arrives


def test_a_mail_arrives_over_starttls_with_both_its_forms(inbox: Inbox, tls: Tls) -> None:
    with serve(inbox, tls_context=tls.context, require_starttls=True) as port:
        send(MAIL, Server("127.0.0.1", port, "starttls"), ca_file=tls.ca_file)
    (got,) = inbox.mails
    assert got["From"] == MAIL.sender
    assert got["To"] == MAIL.recipient
    assert got["Subject"] == MAIL.subject
    assert got["Auto-Submitted"] == "auto-generated"
    text, html = (got.get_body((kind,)) for kind in ("plain", "html"))
    assert text is not None
    assert text.get_content().replace("\r\n", "\n") == MAIL.text
    assert html is not None
    assert "<p>Hello.</p>" in html.get_content()
    assert inbox.recipients == [MAIL.recipient]


def test_a_mail_arrives_over_tls_from_the_first_byte(inbox: Inbox, tls: Tls) -> None:
    with serve(inbox, tls_context=tls.context, is_implicit=True) as port:
        send(MAIL, Server("127.0.0.1", port, "implicit"), ca_file=tls.ca_file)
    assert len(inbox.mails) == 1


def test_every_attempt_has_the_same_message_id_and_date(inbox: Inbox, plain: Server) -> None:
    send(MAIL, plain)
    send(MAIL, plain)
    first, second = inbox.mails
    assert first["Message-ID"] == second["Message-ID"] == "<0b5c.owner.notify@example.org>"
    assert first["Date"] == second["Date"] == "Fri, 02 Jan 2026 03:04:05 +0000"


def test_an_international_domain_goes_out_as_a_labels(inbox: Inbox, plain: Server) -> None:
    send(replace(MAIL, recipient="owner@bücher.example"), plain)
    assert inbox.recipients == ["owner@xn--bcher-kva.example"]


def test_a_local_part_beyond_ascii_needs_a_server_that_takes_it(inbox: Inbox) -> None:
    strange = replace(MAIL, recipient="öwner@example.com")
    with serve(inbox, enable_SMTPUTF8=False) as port, pytest.raises(Discard, match="SMTPUTF8"):
        send(strange, Server("127.0.0.1", port, "none"))
    with serve(inbox, enable_SMTPUTF8=True) as port:
        send(strange, Server("127.0.0.1", port, "none"))
    assert inbox.recipients == ["öwner@example.com"]


def test_credentials_are_sent_over_tls(inbox: Inbox, tls: Tls) -> None:
    def check(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        right = (data.login, data.password) == (b"user", b"p@ss")
        return AuthResult(success=right, handled=False)

    wanted: dict[str, Any] = {"authenticator": check, "auth_required": True, "tls_context": tls.context}
    with serve(inbox, require_starttls=True, **wanted) as port:
        url = f"smtp://user:p%40ss@127.0.0.1:{port}"
        send(MAIL, server(url), ca_file=tls.ca_file)
        for wrong in (f"smtp://user:wrong@127.0.0.1:{port}", f"smtp://127.0.0.1:{port}"):
            with pytest.raises(MailMisconfigured, match=r"53[05]"):
                send(MAIL, server(wrong), ca_file=tls.ca_file)
    assert len(inbox.mails) == 1


# --- TLS that is not as it should be


def test_without_starttls_nothing_is_sent_in_clear(inbox: Inbox, plain: Server) -> None:
    with pytest.raises(MailMisconfigured, match="STARTTLS"):
        send(MAIL, replace(plain, tls="starttls"))
    assert (inbox.senders, inbox.mails) == ([], [])


def test_a_certificate_of_another_name_is_a_configuration_fault(inbox: Inbox, tmp_path: Path) -> None:
    other = certificate(tmp_path, host="mail.example.org")
    for is_implicit in (True, False):
        with serve(inbox, tls_context=other.context, is_implicit=is_implicit) as port:
            to = Server("127.0.0.1", port, "implicit" if is_implicit else "starttls")
            with pytest.raises(MailMisconfigured, match="CERTIFICATE_VERIFY_FAILED"):
                send(MAIL, to, ca_file=other.ca_file)
    assert inbox.senders == []


def test_a_certificate_nobody_vouches_for_is_a_configuration_fault(inbox: Inbox, tls: Tls) -> None:
    with serve(inbox, tls_context=tls.context) as port, pytest.raises(MailMisconfigured):
        send(MAIL, Server("127.0.0.1", port, "starttls"))


def test_a_handshake_that_breaks_off_is_retried() -> None:
    with scripted(lambda conn: conn.close()) as port:
        for tls_kind in ("implicit", "none"):
            with pytest.raises(MailError):
                send(MAIL, Server("127.0.0.1", port, tls_kind))


# --- what the server answers


@pytest.mark.parametrize(
    ("rcpt", "data", "error"),
    [
        ("550 5.1.1 no such user", "250 OK", Discard),
        ("450 4.2.0 come back", "250 OK", Greylisted),
        ("451 4.7.1 greylisted", "250 OK", Greylisted),
        ("452 too many", "250 OK", MailError),
        ("530 5.7.0 authenticate first", "250 OK", MailMisconfigured),
        ("250 OK", "554 5.7.1 spam", Discard),
        ("250 OK", "552 too large", Discard),
        ("250 OK", "451 local error", Greylisted),
        ("250 OK", "421 closing", MailError),
    ],
)
def test_each_answer_has_its_meaning_and_the_next_mail_goes_out(
    inbox: Inbox, plain: Server, rcpt: str, data: str, error: type[Exception]
) -> None:
    inbox.rcpt, inbox.data = rcpt, data
    with pytest.raises(error) as raised:
        send(MAIL, plain)
    assert raised.type is error
    assert (rcpt if not rcpt.startswith("250") else data)[4:] in str(raised.value)
    inbox.rcpt = inbox.data = "250 OK"
    send(MAIL, plain)
    assert len(inbox.mails) == 1


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (smtplib.SMTPSenderRefused(553, b"no", "a@b"), Discard),
        (smtplib.SMTPSenderRefused(451, b"later", "a@b"), Greylisted),
        (smtplib.SMTPSenderRefused(530, b"auth", "a@b"), MailMisconfigured),
        (smtplib.SMTPAuthenticationError(535, b"bad"), MailMisconfigured),
        (smtplib.SMTPAuthenticationError(454, b"later"), MailError),
        (smtplib.SMTPConnectError(421, b"busy"), MailError),
        (smtplib.SMTPConnectError(554, b"go away"), MailMisconfigured),
        (smtplib.SMTPHeloError(504, b"no"), MailMisconfigured),
        (smtplib.SMTPServerDisconnected("gone"), MailError),
        (smtplib.SMTPException("No suitable authentication method found."), MailMisconfigured),
        (smtplib.SMTPNotSupportedError("STARTTLS extension not supported by server."), MailMisconfigured),
        (socket.gaierror("no such host"), MailError),
        (ConnectionRefusedError("refused"), MailError),
        (TimeoutError("late"), MailError),
        (ssl.SSLError("handshake"), MailError),
        (ssl.SSLCertVerificationError("name"), MailMisconfigured),
    ],
)
def test_the_table_of_meanings(error: Exception, meaning: type[Exception]) -> None:
    assert type(judge(error)) is meaning


def test_a_greeting_of_421_is_retried_on_a_new_connection(inbox: Inbox) -> None:
    with (
        scripted(lambda conn: conn.sendall(b"421 not now\r\n")) as port,
        pytest.raises(MailError, match="421"),
    ):
        send(MAIL, Server("127.0.0.1", port, "none"))


def test_an_error_after_the_mail_was_accepted_is_no_error() -> None:
    def talk(conn: socket.socket) -> None:
        say(
            conn,
            "220 hi",
            "250 hello",
            "250 sender",
            "250 rcpt",
            "354 go",
            "250 accepted",
            "500 what is QUIT",
        )

    with scripted(talk) as port:
        send(MAIL, Server("127.0.0.1", port, "none"))


def say(conn: socket.socket, *lines: str) -> None:
    """Each line as the answer to what came; the last but the QUIT's answers the dot."""
    conn.sendall(f"{lines[0]}\r\n".encode())
    for line in lines[1:]:
        received = conn.recv(65_536)
        if received.endswith(b"\r\n.\r\n") or not line.startswith("250 accepted"):
            conn.sendall(f"{line}\r\n".encode())


# --- time


def test_a_server_silent_after_data_ends_the_attempt_in_time() -> None:
    def talk(conn: socket.socket) -> None:
        say(conn, "220 hi", "250 hello", "250 sender", "250 rcpt", "354 go")
        conn.settimeout(5)
        while conn.recv(65_536):
            pass

    with scripted(talk) as port:
        began = time.monotonic()
        with pytest.raises(MailError):
            send(MAIL, Server("127.0.0.1", port, "none"), total_s=0.6)
        assert 0.5 < time.monotonic() - began < 4


def test_a_slow_talker_does_not_outlive_the_total() -> None:
    def talk(conn: socket.socket) -> None:
        for _ in range(100):
            conn.sendall(b"2")
            time.sleep(0.05)

    with scripted(talk) as port:
        began = time.monotonic()
        with pytest.raises(MailError):
            send(MAIL, Server("127.0.0.1", port, "none"), total_s=0.5)
        assert time.monotonic() - began < 3


def test_a_command_has_its_own_limit_within_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smtp, "COMMAND_S", 0.3)
    with scripted(lambda conn: print(conn.recv(1))) as port:
        began = time.monotonic()
        with pytest.raises(MailError):
            send(MAIL, Server("127.0.0.1", port, "none"))
        assert time.monotonic() - began < 4


# --- what is never sent


@pytest.mark.parametrize(
    "change",
    [
        {"subject": "two\nlines"},
        {"subject": "a\0b"},
        {"subject": "a\u2028b"},
        {"id": "x\r\nBcc: y@z"},
        {"recipient": "a@x\r\nRCPT TO:<b@y>"},
        {"recipient": "a b@example.com"},
        {"recipient": "a@b@example.com"},
        {"recipient": "nobody"},
        {"recipient": "@example.com"},
        {"recipient": "a@"},
        {"recipient": "a@x,b@y"},
        {"recipient": "A <a@example.com>"},
        {"recipient": "a" * 250 + "@example.com"},
        {"recipient": "a@" + "ü" * 64 + ".example"},
        {"sender": "nobody"},
    ],
)
def test_an_impossible_header_or_address_is_discarded_before_connecting(change: dict[str, Any]) -> None:
    with pytest.raises(Discard):
        send(replace(MAIL, **change), Server("127.0.0.1", 1, "none"))


def test_no_mail_is_sent_inside_a_transaction(db: Database) -> None:
    with pytest.raises(NetworkInTransaction), db.transaction():
        send(MAIL, Server("127.0.0.1", 1, "none"))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("smtp://mail.example.org", Server("mail.example.org", 587, "starttls")),
        ("smtps://u:p%40@mail.example.org", Server("mail.example.org", 465, "implicit", "u", "p@")),
        ("smtp://127.0.0.1:8425?tls=none", Server("127.0.0.1", 8425, "none")),
        ("smtp://[::1]?tls=none", Server("::1", 25, "none")),
        ("smtp://localhost?tls=none", Server("localhost", 25, "none")),
    ],
)
def test_an_smtp_url_is_read(url: str, expected: Server) -> None:
    assert server(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "smtp://mail.example.org?tls=none",
        "smtps://127.0.0.1?tls=none",
        "smtp://127.0.0.1?tls=maybe",
        "smtp://",
        "http://mail.example.org",
        "smtp://u:secret@host:port",
        "smtp://u:secret@host/path",
        "",
    ],
)
def test_a_bad_smtp_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="SMTP_URL") as raised:
        server(url)
    assert "secret" not in str(raised.value)


# --- the actor


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, db: Database) -> Callable[..., None]:
    monkeypatch.setattr(notify, "transaction", db.transaction)

    def configure(**given: str) -> None:
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        settings.load.cache_clear()

    configure(MAIL_FROM="posthouse@example.org", OWNER_EMAIL="owner@example.com")
    return configure


def imported(db: Database, folder: str = "notes", skipped: int = 0) -> str:
    counts = {"added": 3, "changed": 2, "unchanged": 1, "deleted": 0, "skipped": skipped}
    with db.transaction() as conn:
        return events.record(conn, "corpus.imported", folder, counts)


def test_the_owner_hears_of_an_import_once(
    db: Database, inbox: Inbox, plain: Server, configured: Callable[..., None]
) -> None:
    configured(SMTP_URL=f"smtp://127.0.0.1:{plain.port}?tls=none")
    event_id = imported(db, "<b>notes", skipped=4)
    assert notify.notify(event_id) is None
    assert notify.notify(event_id) is None
    (got,) = inbox.mails
    assert got["Message-ID"] == f"<{event_id}.owner.notify@example.org>"
    assert got["Subject"] == "Import of <b>notes: 3 added, 2 changed, 0 deleted"
    text, html = (got.get_body((kind,)) for kind in ("plain", "html"))
    assert text is not None
    assert "skipped    4" in text.get_content()
    assert html is not None
    assert "&lt;b&gt;notes" in html.get_content()


def test_without_a_server_or_an_owner_the_job_completes(db: Database, configured: Callable[..., None]) -> None:
    event_id = imported(db)
    configured(SMTP_URL="")
    assert notify.notify(event_id) == "not sent"
    configured(SMTP_URL="smtp://127.0.0.1:1?tls=none", OWNER_EMAIL="")
    assert notify.notify(event_id) == "not sent"


def test_a_greylisted_mail_waits_a_minute_and_then_is_charged(
    db: Database,
    inbox: Inbox,
    plain: Server,
    configured: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configured(SMTP_URL=f"smtp://127.0.0.1:{plain.port}?tls=none")
    inbox.rcpt = "451 greylisted"
    event_id = imported(db)
    monkeypatch.setattr(context, "current", lambda: job(attempt=1, snoozed_s=0))
    with pytest.raises(Snooze) as snoozed:
        notify.notify(event_id)
    assert snoozed.value.seconds == 60
    for attempt, delay_ms in ((1, 60_000), (3, 180_000)):
        monkeypatch.setattr(context, "current", lambda attempt=attempt: job(attempt=attempt, snoozed_s=60))
        with pytest.raises(Retry) as retried:
            notify.notify(event_id)
        assert retried.value.delay == delay_ms


def job(**claim: Any) -> SimpleNamespace:
    return SimpleNamespace(claim=SimpleNamespace(**claim))


def test_a_fault_of_configuration_keeps_the_mail(db: Database, configured: Callable[..., None]) -> None:
    event_id = imported(db)
    for given in ({"SMTP_URL": "smtp://far.example?tls=none"}, {"MAIL_FROM": ""}):
        configured(**given)
        with pytest.raises(Snooze) as snoozed:
            notify.notify(event_id)
        assert snoozed.value.seconds == 900


def test_a_server_that_is_away_is_tried_again(db: Database, configured: Callable[..., None]) -> None:
    configured(SMTP_URL="smtp://127.0.0.1:1?tls=none")
    with pytest.raises(MailError):
        notify.notify(imported(db))


def test_an_event_that_is_gone_is_discarded(db: Database, configured: Callable[..., None]) -> None:
    configured(SMTP_URL="smtp://127.0.0.1:1?tls=none")
    with pytest.raises(Discard):
        notify.notify("00000000-0000-4000-8000-000000000000")
