"""One mail to one recipient by SMTP, over checked TLS, within 25 s in all (specs/integrations.md 5)."""

from __future__ import annotations

import ipaddress
import re
import smtplib
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import idna

from middleware.failures import Discard
from outbox.db import refuse_in_transaction

TOTAL_S = 25.0
COMMAND_S = 5.0
MAX_ADDRESS_BYTES = 254

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_ADDRESS = re.compile(r"[^\s\x00-\x1f\x7f@<>(),:;\\\"\[\]]+@[^\s\x00-\x1f\x7f@<>(),:;\\\"\[\]]+")
_CONFIGURATION = frozenset({530, 534, 535, 538})
_GREYLISTING = frozenset({450, 451})


AnySocket = TypeVar("AnySocket", bound=socket.socket)


class MailError(Exception):
    """The mail was not accepted, or nobody knows; the same mail may be sent again."""


class Greylisted(MailError):
    """The server wants to see the mail again, a minute from now at the earliest."""


class MailMisconfigured(Exception):
    """Server, credentials or certificate are wrong: the mail is to be kept until a person has mended that."""


@dataclass(frozen=True)
class Mail:
    """What is sent. *id* (left of the @ of the Message-ID) and *date* are the same on every attempt."""

    id: str
    date: datetime
    sender: str
    recipient: str
    subject: str
    text: str
    html: str


@dataclass(frozen=True)
class Server:
    """An SMTP URL: smtp:// (STARTTLS required, port 587), smtps:// (465), ?tls=none (25) on loopback only."""

    host: str
    port: int
    tls: str
    user: str = ""
    password: str = ""


def server(url: str) -> Server:
    """The server *url* names. Raises ValueError with what is wrong, without the URL: it has a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("SMTP_URL: host and port cannot be read") from None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ValueError("SMTP_URL must be smtp://HOST or smtps://HOST")
    if options not in ({}, {"tls": "none"}) or parts.path.strip("/") or parts.fragment:
        raise ValueError("SMTP_URL: only ?tls=none may follow the host")
    tls = "none" if options else {"smtp": "starttls", "smtps": "implicit"}[parts.scheme]
    if tls == "none" and (parts.scheme != "smtp" or not _is_loopback(parts.hostname)):
        raise ValueError("SMTP_URL: ?tls=none is for smtp:// on this machine only")
    port = port or {"starttls": 587, "implicit": 465, "none": 25}[tls]
    return Server(parts.hostname, port, tls, *_credentials(parts))


def _credentials(parts: SplitResult) -> tuple[str, str]:
    return unquote(parts.username or ""), unquote(parts.password or "")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def send(mail: Mail, to: Server, *, ca_file: Path | None = None, total_s: float = TOTAL_S) -> None:
    """Hand *mail* to the server; returns once it is accepted. *ca_file*: further certificate authorities.

    Raises MailError (try again), Greylisted, MailMisconfigured, Discard (never again), NetworkInTransaction.
    """
    refuse_in_transaction("mail")
    message = compose(mail)
    try:
        session = _connect(to, _Clock(total_s), mail.sender.rpartition("@")[2], ca_file)
        try:
            if to.user:
                session.login(to.user, to.password)
            session.send_message(message, checked_address(mail.sender), checked_address(mail.recipient))
            with suppress(smtplib.SMTPException, OSError):
                session.quit()
        finally:
            session.close()
    except (smtplib.SMTPException, OSError) as error:
        raise judge(error) from error


def judge(error: Exception) -> MailError | MailMisconfigured | Discard:
    """What an SMTP session's failure means for the mail, by the table of specs/integrations.md 5."""
    match error:
        case smtplib.SMTPRecipientsRefused():
            return _of_answer(*next(iter(error.recipients.values())))
        case smtplib.SMTPSenderRefused() | smtplib.SMTPDataError():
            return _of_answer(error.smtp_code, error.smtp_error)
        case smtplib.SMTPResponseException() if error.smtp_code < 500:
            return _of_answer(error.smtp_code, error.smtp_error)
        case smtplib.SMTPNotSupportedError() if "SMTPUTF8" in str(error):
            return Discard("the server takes no addresses beyond ASCII (no SMTPUTF8)")
        case smtplib.SMTPResponseException() | smtplib.SMTPNotSupportedError() | ssl.SSLCertVerificationError():
            return MailMisconfigured(_said(error))
        case smtplib.SMTPException() if "authentication method" in str(error):
            return MailMisconfigured(_said(error))
        case _:
            return MailError(_said(error))


def _of_answer(code: int, text: bytes | str) -> MailError | MailMisconfigured | Discard:
    said = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    reason = f"{code} {' '.join(said.split())}"[:500]
    if code in _CONFIGURATION:
        return MailMisconfigured(reason)
    if code in _GREYLISTING:
        return Greylisted(reason)
    return Discard(reason) if 500 <= code < 600 else MailError(reason)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def compose(mail: Mail) -> EmailMessage:
    """*mail* as a message. Raises Discard for control characters in a header or an impossible address."""
    message = EmailMessage(policy=SMTP)
    recipient = checked_address(mail.recipient)
    sender = checked_address(mail.sender)
    message["From"] = sender
    message["To"] = recipient
    message["Subject"] = checked_header("subject", mail.subject)
    message["Date"] = format_datetime(mail.date)
    message["Message-ID"] = f"<{checked_header('id', mail.id)}@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(mail.text)
    message.add_alternative(mail.html, subtype="html")
    return message


def checked_header(name: str, value: str) -> str:
    """*value*, if it is one line of text. Raises Discard: the library lets NUL pass."""
    if _CONTROL.search(value):
        raise Discard(f"the {name} has a line break or a control character in it")
    return value


def checked_address(address: str) -> str:
    """*address* with its domain as A-labels. Raises Discard unless it is local@domain, at most 254 bytes."""
    if not _ADDRESS.fullmatch(address):
        raise Discard("the address is not of the form local@domain")
    local, _, domain = address.rpartition("@")
    try:
        known = domain if domain.isascii() else idna.encode(domain, uts46=True).decode()
        size = len(f"{local}@{known}".encode())
    except (idna.IDNAError, UnicodeError):
        raise Discard("the address has no valid domain") from None
    if size > MAX_ADDRESS_BYTES:
        raise Discard(f"the address is longer than {MAX_ADDRESS_BYTES} bytes")
    return f"{local}@{known}"


class _Clock:
    """What is left of the whole exchange and of the command under way: library timeouts are per operation."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s
        self._command_end = self._end

    def start_command(self) -> None:
        self._command_end = time.monotonic() + COMMAND_S

    def start_data(self) -> None:
        self._command_end = self._end

    def left_s(self) -> float:
        left = min(self._end, self._command_end) - time.monotonic()
        if left <= 0:
            raise TimeoutError("the server took too long")
        return left


def _connect(to: Server, clock: _Clock, greeting: str, ca_file: Path | None) -> smtplib.SMTP:
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    context.sslsocket_class = _timed(ssl.SSLSocket, clock)
    session = _Session(to, clock, context if to.tls == "implicit" else None, greeting)
    try:
        session.ehlo_or_helo_if_needed()
        if to.tls == "starttls":
            session.starttls(context=context)
            session.ehlo_or_helo_if_needed()
    except BaseException:
        session.close()
        raise
    return session


class _Session(smtplib.SMTP):
    """The library's client, on a socket that asks the clock before each operation."""

    def __init__(self, to: Server, clock: _Clock, context: ssl.SSLContext | None, greeting: str) -> None:
        self._clock = clock
        self._context = context
        # With a name of its own for EHLO the library does not look ours up, which may take minutes.
        super().__init__(to.host, to.port, local_hostname=greeting, timeout=COMMAND_S)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        sock = self._reach(host, port)
        self._clock.start_command()
        if self._context is None:
            return sock
        try:
            sock.settimeout(self._clock.left_s())
            return self._context.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise

    def _reach(self, host: str, port: int) -> socket.socket:
        failure: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            self._clock.start_command()
            sock = _timed(socket.socket, self._clock)(family, kind, protocol)
            try:
                sock.settimeout(self._clock.left_s())
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
            else:
                return sock
        raise failure

    def putcmd(self, cmd: str, args: str = "") -> None:
        self._clock.start_command()
        super().putcmd(cmd, args)

    def getreply(self) -> tuple[int, bytes]:
        code, text = super().getreply()
        if code == 354:
            self._clock.start_data()
        return code, text


def _timed(base: type[AnySocket], clock: _Clock) -> type[AnySocket]:
    """A kind of *base* that has only the time left on *clock* for each operation."""

    def recv_into(self: AnySocket, *args: Any) -> int:
        self.settimeout(clock.left_s())
        return base.recv_into(self, *args)

    def send(self: AnySocket, *args: Any) -> int:
        self.settimeout(clock.left_s())
        return base.send(self, *args)

    def sendall(self: AnySocket, *args: Any) -> None:
        self.settimeout(clock.left_s())
        base.sendall(self, *args)

    return type(f"Timed{base.__name__}", (base,), {"recv_into": recv_into, "send": send, "sendall": sendall})
