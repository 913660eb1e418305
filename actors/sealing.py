"""Keep secrets in rows: AES-256-GCM, bound to row and purpose (specs/webhooks.md 13)."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import settings

_KEY_BYTES, _KEY_ID_BYTES, _NONCE_BYTES = 32, 4, 12


class NoSealKey(Exception):
    """There is no key to seal with: SEAL_KEYS is not set."""


class CannotOpen(Exception):
    """The value was sealed with a key we do not have, for another row, or is damaged."""


class Vault:
    """Seals with the first key, opens with any. A value's key id is in front of it."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = {_key_id(key): AESGCM(key) for key in keys}

    def seal(self, text: str, *, owner: str, purpose: str) -> bytes:
        """Seal *text* for the row *owner*. Raises NoSealKey."""
        if not self._ciphers:
            raise NoSealKey("SEAL_KEYS is not set: 32 random bytes in base64 are wanted")
        key_id, cipher = next(iter(self._ciphers.items()))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return key_id + nonce + cipher.encrypt(nonce, text.encode(), _bound_to(owner, purpose))

    def open(self, sealed: bytes, *, owner: str, purpose: str) -> str:
        """Return what was sealed for *owner* and *purpose*. Raises CannotOpen."""
        cipher = self._ciphers.get(sealed[:_KEY_ID_BYTES])
        if cipher is None:
            raise CannotOpen("sealed with a key that is not in SEAL_KEYS")
        nonce, content = sealed[_KEY_ID_BYTES:][:_NONCE_BYTES], sealed[_KEY_ID_BYTES + _NONCE_BYTES :]
        try:
            return cipher.decrypt(nonce, content, _bound_to(owner, purpose)).decode()
        except (InvalidTag, ValueError):
            raise CannotOpen("sealed for another row, or damaged") from None


def vault() -> Vault:
    """The process's vault, with the keys of SEAL_KEYS. Raises ValueError when one cannot be read."""
    return Vault(parse_keys(key.get_secret_value() for key in settings.load().seal_keys))


def parse_keys(texts: Iterable[str]) -> list[bytes]:
    """Read the keys of SEAL_KEYS. ValueError says which one is wrong, never what it is."""
    return [_parse_key(text, number) for number, text in enumerate(texts, 1)]


def _parse_key(text: str, number: int) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(f"SEAL_KEYS: key {number} is not the base64 of {_KEY_BYTES} bytes")
    return key


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"posthouse key id" + key).digest()[:_KEY_ID_BYTES]


def _bound_to(owner: str, purpose: str) -> bytes:
    return f"{owner}:{purpose}".encode()
