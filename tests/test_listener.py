"""What rings is heard, and a connection that hears nothing any more is found out."""

from __future__ import annotations

import pytest
from psycopg import Notify

from outbox import db
from outbox.db import Conn, connect
from outbox.listener import PROBE_WITHIN_S, Bells, Deaf
from tests import emptied

shared_url = emptied.shared_url
database_url = emptied.database_url


def channels(conn: Conn) -> list[str]:
    return sorted(row["name"] for row in conn.execute("SELECT pg_listening_channels() AS name"))


def test_what_rings_is_heard_once_whoever_rings_and_however_often(conn: Conn, database_url: str) -> None:
    bells = Bells(conn, ["a", "b"])
    with connect(database_url, name="posthouse tests") as other:
        for payload in ("", "x" * 7_999, "{"):
            other.execute("SELECT pg_notify('a', %s)", [payload])
    bells.sleep(5)
    assert bells.take() == {"a"}
    assert bells.take() == set()


@pytest.mark.parametrize("at_once", [True, False])
def test_what_rings_during_a_statement_is_kept(conn: Conn, database_url: str, at_once: bool) -> None:
    bells = Bells(conn, ["a"])
    with connect(database_url, name="posthouse tests") as other:
        other.execute("NOTIFY a")
    if at_once:
        db.at_once(conn, "SELECT pg_sleep(0.1)", {})
    else:
        conn.execute("SELECT pg_sleep(0.1)")
    bells.sleep(60)
    assert bells.take() == {"a"}


def test_a_probe_that_comes_back_is_nobody_s_business(conn: Conn) -> None:
    bells = Bells(conn, ["a"], probe_every_s=30)
    rung: list[Notify] = []
    conn.add_notify_handler(rung.append)
    heard = set()
    for second in range(100):
        bells.probe(1_000.0 + second)
        heard |= bells.take()
    assert heard == set()
    assert len(rung) == 4, "one statement in thirty seconds"


def test_a_connection_that_answers_but_hears_nothing_is_deaf(conn: Conn) -> None:
    bells = Bells(conn, ["a"])
    conn.execute("UNLISTEN *")
    bells.probe(1_000.0)
    bells.take()
    bells.probe(1_000.0 + PROBE_WITHIN_S)
    with pytest.raises(Deaf):
        bells.probe(1_000.1 + PROBE_WITHIN_S)


def test_without_channels_nothing_is_listened_to_and_nothing_is_proved(conn: Conn) -> None:
    bells = Bells(conn, [])
    bells.probe(1_000.0)
    assert channels(conn) == []
    bells.take()
    bells.probe(2_000.0)
    bells.close()


def test_two_processes_probe_on_channels_of_their_own(conn: Conn, database_url: str) -> None:
    with connect(database_url, name="posthouse tests") as other:
        Bells(conn, ["a"])
        Bells(other, ["a"])
        ours, theirs = channels(conn), channels(other)
    assert ours[0] == theirs[0] == "a"
    assert ours[1] != theirs[1]
