"""What must be true before a process may claim: each refusal is one line and an exit code."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from middleware import connection_budget
from outbox import catalogue, migrations
from outbox.db import LOST, Conn, connect
from outbox.relay import Subscription
from settings import Settings, refuse

EXIT_UNAVAILABLE = 69


def check(settings: Settings, url: str, subscriptions: Sequence[Subscription]) -> None:
    """Refuse to boot (SystemExit 69, 78) unless the database answers and fits this version, and connections add up."""
    for subscription in subscriptions:
        if not catalogue.covered(subscription.glob, catalogue.declared()):
            refuse(f"actor {subscription.actor} subscribes to {subscription.glob}, which matches no declared event")
    conn = reach(url, settings.db_start_wait_s)
    try:
        if missing := migrations.pending(conn, migrations.steps("")):
            refuse(f"the database lacks {len(missing)} migrations, from {missing[0]} on: run `python cli.py migrate`")
        server = connection_budget.server_limit(conn)
    except LOST as error:
        refuse(f"the database does not answer: {reason(error)}; check DATABASE_URL", EXIT_UNAVAILABLE)
    except psycopg.Error as error:
        refuse(f"the database refuses: {reason(error)}; check the rights of the role in DATABASE_URL")
    finally:
        conn.close()
    if problem := connection_budget.problem(settings.queues, settings.max_connections, server):
        refuse(problem)


def reach(url: str, wait_s: float) -> Conn:
    """A connection, waited for up to *wait_s* seconds; then SystemExit 69 with the reason, never with the URL."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return connect(url, name="posthouse boot")
        except psycopg.ProgrammingError:
            refuse(
                "DATABASE_URL is none that Postgres reads; it looks like postgresql://user:password@host:port/database"
            )
        except psycopg.OperationalError as error:
            if time.monotonic() >= give_up or _hopeless(error):
                refuse(f"the database does not answer: {reason(error)}; check DATABASE_URL", EXIT_UNAVAILABLE)
            time.sleep(0.5)


def _hopeless(error: psycopg.OperationalError) -> bool:
    text = str(error)
    return any(sign in text for sign in ("password", "does not exist", "no pg_hba.conf", "invalid"))


def reason(error: psycopg.Error) -> str:
    """The first line of what libpq says: address and cause, but no credentials."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("connection failed: ")
