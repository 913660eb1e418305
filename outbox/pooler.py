"""Poolers between us and Postgres: behind one that lends a server process for a transaction only, a LISTEN is deaf."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from psycopg import sql as identifiers

from outbox.db import Conn, behind_pooler
from outbox.listener import Bells

HEARD_WITHIN_S = 1.0


def hears(conn: Conn, connect: Callable[[], Conn]) -> bool:
    """Whether *conn*, a fresh session, hears what another one, from *connect*, has to tell. Found out by trying.

    A pooler that lends a server process for the whole session passes; a direct connection is not even tried.
    """
    if not behind_pooler(conn):
        return True
    channel = f"posthouse_boot_{secrets.token_hex(8)}"
    bells = Bells(conn, [channel])
    with connect() as other:
        other.execute(identifiers.SQL("NOTIFY {}").format(identifiers.Identifier(channel)))
        bells.sleep(HEARD_WITHIN_S)
        heard = channel in bells.take()
    bells.close()
    return heard
