"""What must be true before a process may claim: each refusal is one line and an exit code."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg
import structlog

from middleware import connection_budget
from outbox import catalogue, migrations, pooler
from outbox.db import LOST, Conn, behind_pooler, connect
from outbox.relay import Subscription
from settings import Settings, refuse

log = structlog.get_logger("posthouse.boot")

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


def listens(settings: Settings, url: str) -> bool:
    """Whether this process will hear notifications. Behind a transaction pooler it will not, unless
    DATABASE_LISTEN_URL leads past it: then it polls, and one log line says so. Raises SystemExit 69.
    """
    past = settings.database_listen_url
    listen_url = past.get_secret_value() if past else url
    with reach(url, settings.db_start_wait_s) as conn:
        pooled = behind_pooler(conn)
    with reach(listen_url, settings.db_start_wait_s, "DATABASE_LISTEN_URL" if past else "DATABASE_URL") as conn:
        heard = pooler.hears(conn, lambda: connect(listen_url, name="posthouse boot"))
    if not heard:
        log.warning("pooler.detected", mode="poll-only", remedy="DATABASE_LISTEN_URL")
    elif pooled:
        log.info("pooler.detected", mode="listen")
    return heard


def reach(url: str, wait_s: float, named: str = "DATABASE_URL") -> Conn:
    """A connection, waited for up to *wait_s* seconds; then SystemExit 69 with the reason, never with the URL.

    *named*: the setting that the URL comes from.
    """
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return connect(url, name="posthouse boot")
        except psycopg.ProgrammingError:
            refuse(f"{named} is none that Postgres reads; it looks like postgresql://user:password@host:port/database")
        except psycopg.OperationalError as error:
            if time.monotonic() >= give_up or _hopeless(error):
                refuse(f"the database does not answer: {reason(error)}; check {named}", EXIT_UNAVAILABLE)
            time.sleep(0.5)


def _hopeless(error: psycopg.OperationalError) -> bool:
    text = str(error)
    return any(sign in text for sign in ("password", "does not exist", "no pg_hba.conf", "invalid"))


def reason(error: psycopg.Error) -> str:
    """The first line of what libpq says: address and cause, but no credentials."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("connection failed: ")
