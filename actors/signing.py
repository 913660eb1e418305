"""Sign and verify webhooks by Standard Webhooks 1.0.0: v1 is HMAC-SHA256, v1a is ed25519."""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from secrets import token_bytes

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SHARED, PRIVATE, PUBLIC = "whsec_", "whsk_", "whpk_"
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


class SignatureError(Exception):
    """The message is not what a holder of one of the keys sent, or not within the tolerance."""


def sign(webhook_id: str, timestamp: int, body: bytes, secrets: Iterable[str]) -> str:
    """Return the `webhook-signature` header: one entry a secret, `v1` before `v1a`, else in the given order.

    *timestamp* is the Unix second of this attempt. ValueError for an id that is empty or holds a dot, for a
    malformed secret, and for none at all.
    """
    if not webhook_id or "." in webhook_id:
        raise ValueError("a webhook id is not empty and holds no dot")
    ordered = sorted(secrets, key=lambda secret: secret.startswith(PRIVATE))
    if not ordered:
        raise ValueError("no secret to sign with")
    content = _content(webhook_id, timestamp, body)
    return " ".join(_entry(secret, content) for secret in ordered)


def verify(headers: Mapping[str, str], body: bytes, keys: Iterable[str], now: float, tolerance: float = 300) -> None:
    """Raise SignatureError, and nothing else, unless one entry of the signature fits one of *keys*.

    *keys* are `whsec_` or `whpk_` texts, *now* and *tolerance* are seconds; the tolerance holds in both
    directions. Unknown versions and malformed entries are skipped.
    """
    given = {name.lower(): value for name, value in headers.items()}
    try:
        webhook_id, stamp = given["webhook-id"], given["webhook-timestamp"]
        entries = [entry.partition(",") for entry in given["webhook-signature"].split(" ")]
        content = _content(webhook_id, _timestamp(stamp, now, tolerance), body)
        checks = [_check(key, content, version, value) for key in keys for version, _, value in entries]
    except KeyError as error:
        raise SignatureError(f"header {error.args[0]} is missing") from None
    except ValueError:
        raise SignatureError("a header or a key is malformed") from None
    if not webhook_id or "." in webhook_id or not any(checks):
        raise SignatureError("no signature fits")


def make_shared_secret() -> str:
    """Return a new `whsec_` secret of 32 random bytes."""
    return SHARED + _encode(token_bytes(32))


def make_private_key() -> str:
    """Return a new ed25519 key as `whsk_` text."""
    key = Ed25519PrivateKey.generate()
    return PRIVATE + _encode(key.private_bytes_raw() + key.public_key().public_bytes_raw())


def public_key(private: str) -> str:
    """Return the `whpk_` text of a `whsk_` key; it may be shown to anyone."""
    return PUBLIC + _encode(_private(private).public_key().public_bytes_raw())


def check_secret(secret: str) -> None:
    """Raise ValueError unless *secret* is a `whsec_` of 24 to 64 bytes, or a `whsk_`: seed and public key."""
    if secret.startswith(PRIVATE):
        _private(secret)
    else:
        _shared(secret)


def _entry(secret: str, content: bytes) -> str:
    if secret.startswith(PRIVATE):
        return "v1a," + _encode(_private(secret).sign(content))
    return "v1," + _hmac(_shared(secret), content)


def _check(key: str, content: bytes, version: str, value: str) -> bool:
    if key.startswith(PUBLIC):
        public = _public(key)
        return version == "v1a" and _fits(public, content, value)
    expected = _hmac(_shared(key), content)
    return version == "v1" and hmac.compare_digest(expected.encode(), value.encode("utf-8", "replace"))


def _fits(public: Ed25519PublicKey, content: bytes, value: str) -> bool:
    try:
        public.verify(_decode(value, ""), content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _content(webhook_id: str, timestamp: int | str, body: bytes) -> bytes:
    return f"{webhook_id}.{timestamp}.".encode() + body


def _timestamp(stamp: str, now: float, tolerance: float) -> str:
    """Return *stamp* as it was sent: the signature covers its digits, leading zeros too."""
    if not _TIMESTAMP.fullmatch(stamp):
        raise SignatureError("the timestamp is malformed")
    if abs(now - int(stamp)) > tolerance:
        raise SignatureError("the timestamp is outside the tolerance")
    return stamp


def _hmac(key: bytes, content: bytes) -> str:
    return _encode(hmac.digest(key, content, hashlib.sha256))


def _shared(secret: str) -> bytes:
    key = _decode(secret, SHARED)
    if not 24 <= len(key) <= 64:
        raise ValueError("a shared secret has 24 to 64 bytes")
    return key


def _private(secret: str) -> Ed25519PrivateKey:
    pair = _decode(secret, PRIVATE)
    if len(pair) != 64:
        raise ValueError("a private key has 64 bytes: seed and public key")
    key = Ed25519PrivateKey.from_private_bytes(pair[:32])
    if key.public_key().public_bytes_raw() != pair[32:]:
        raise ValueError("the public half of a private key does not belong to its seed")
    return key


def _public(key: str) -> Ed25519PublicKey:
    raw = _decode(key, PUBLIC)
    if len(raw) != 32:
        raise ValueError("a public key has 32 bytes")
    return Ed25519PublicKey.from_public_bytes(raw)


def _decode(text: str, prefix: str) -> bytes:
    encoded = text.removeprefix(prefix)
    if not _BASE64.fullmatch(encoded):
        raise ValueError("not standard base64")
    bare = encoded.rstrip("=")
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except ValueError:
        raise ValueError("not standard base64") from None


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
