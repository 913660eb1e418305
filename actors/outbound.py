"""The process's guarded HTTP client, as the settings say: webhooks, suppliers and fetches share it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import settings
from actors.effects.addresses import parse_policy
from actors.effects.http import Client


def client() -> Client:
    """The one client. Raises ValueError when the outbound settings cannot be read."""
    told = settings.load()
    return _client(told.outbound_ports, told.outbound_allow, told.outbound_block, told.outbound_ca_file)


@lru_cache
def _client(ports: tuple[int, ...], allow: tuple[str, ...], block: tuple[str, ...], ca_file: Path | None) -> Client:
    policy = parse_policy(ports, allow, block)
    try:
        return Client(policy, ca_file=ca_file)
    except OSError as error:
        raise ValueError(f"outbound_ca_file {ca_file} cannot be read: {error.strerror}") from None
