"""Endpoints: where webhooks go. Secrets and header values are sealed in the row."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

import settings
from actors import outbound, signing
from actors.drafts import Draft, Problem, Refused, check
from actors.envelope import Header
from actors.sealing import Vault, vault
from broker import transaction
from outbox import catalogue
from outbox.db import Conn, sql


@dataclass(frozen=True)
class Endpoint:
    """An endpoint as people may see it: no secret, of the headers only the names."""

    id: str
    url: str
    description: str
    event_types: list[str]
    header_names: list[str]
    signing: str
    public_key: str | None
    enabled: bool
    disabled_reason: str | None
    disabled_at: datetime | None
    failing_since: datetime | None
    failures_in_row: int
    not_before: datetime | None
    created_at: datetime


@dataclass(frozen=True)
class Created:
    """A new endpoint and its secrets, separated by a space; they are shown this once."""

    endpoint: Endpoint
    secret: str = field(repr=False)


def add(draft: Draft) -> tuple[Created, str | None]:
    """Check an endpoint, store it, and return it with its secret, and a warning or None.

    Looks the host up, so no transaction may be open. Raises Refused with all that is wrong, and NoSealKey.
    """
    told = settings.load()
    checked, warning = check(draft, outbound.client(), allow_http=told.webhook_allow_http)
    with transaction() as conn:
        return create(conn, checked, vault(), max_endpoints=told.webhook_max_endpoints), warning


def create(conn: Conn, draft: Draft, vault: Vault, *, max_endpoints: int) -> Created:
    """Write a checked draft in the caller's transaction. Raises NoSealKey, and Refused past the limit."""
    endpoint_id = str(uuid.uuid4())
    secrets = _secrets(draft)
    private = next((secret for secret in secrets if secret.startswith(signing.PRIVATE)), None)
    row = {
        "id": endpoint_id,
        "url": draft.url,
        "description": draft.description,
        "event_types": list(draft.event_types),
        "headers": Jsonb([_sealed_header(vault, endpoint_id, name, value) for name, value in draft.headers]),
        "signing": draft.signing,
        "secret_sealed": vault.seal(" ".join(secrets), owner=endpoint_id, purpose="secret"),
        "public_key": private and signing.public_key(private),
        "max_endpoints": max_endpoints,
    }
    created = conn.execute(sql(__file__, "create_endpoint"), row).fetchone()
    if created is None:
        raise Refused([Problem("too_many_endpoints", "url", f"there are {max_endpoints} endpoints already")])
    return Created(Endpoint(**created), " ".join(secrets))


def listing(conn: Conn) -> list[Endpoint]:
    """Every endpoint, oldest first."""
    return [Endpoint(**row) for row in conn.execute(sql(__file__, "listing_endpoints"))]


def wants(event_types: Iterable[str], event_type: catalogue.EventType) -> bool:
    """Whether one of an endpoint's globs covers *event_type*; a type that is not WEBHOOK, none does."""
    if event_type.exposure is not catalogue.WEBHOOK:
        return False
    return any(catalogue.covered(glob, [event_type]) for glob in event_types)


def open_secrets(
    vault: Vault, endpoint_id: str, sealed: bytes, old: Iterable[dict[str, Any]], at: datetime
) -> list[str]:
    """Return the secrets to sign with at *at*: the current ones, then unexpired old ones, newest first.

    Raises CannotOpen.
    """
    valid = [base64.b64decode(entry["sealed"]) for entry in old if datetime.fromisoformat(entry["expires_at"]) > at]
    texts = [vault.open(value, owner=endpoint_id, purpose="secret") for value in (sealed, *valid)]
    return [secret for text in texts for secret in text.split(" ")]


def open_headers(vault: Vault, endpoint_id: str, sealed: Iterable[dict[str, str]]) -> list[Header]:
    """Return the custom headers of an endpoint with their values. Raises CannotOpen."""
    return [(entry["name"], _open_header(vault, endpoint_id, entry)) for entry in sealed]


def _open_header(vault: Vault, endpoint_id: str, entry: dict[str, str]) -> str:
    return vault.open(base64.b64decode(entry["sealed"]), owner=endpoint_id, purpose=_purpose(entry["name"]))


def _secrets(draft: Draft) -> list[str]:
    if draft.secret is not None:
        return [draft.secret]
    shared = [signing.make_shared_secret()] if draft.signing in ("v1", "both") else []
    private = [signing.make_private_key()] if draft.signing in ("v1a", "both") else []
    return shared + private


def _sealed_header(vault: Vault, endpoint_id: str, name: str, value: str) -> dict[str, str]:
    sealed = vault.seal(value, owner=endpoint_id, purpose=_purpose(name))
    return {"name": name, "sealed": base64.b64encode(sealed).decode()}


def _purpose(header_name: str) -> str:
    return f"header {header_name.lower()}"
