"""The sum of all connections, before anything starts."""

import pytest

from middleware.connection_budget import lines, problem, server_limit
from outbox.db import Conn
from settings import QUEUES, QueueSettings


def queue(threads: int, processes: int = 1) -> dict[str, QueueSettings]:
    return {"q": QueueSettings(threads=threads, processes=processes, time_limit_s=1)}


def test_the_shipped_queues_use_45_connections_and_fit_the_default() -> None:
    assert sum(line.connections for line in lines(QUEUES)) == 45
    assert problem(QUEUES, 94, 97) is None


def test_a_process_costs_its_threads_and_three() -> None:
    assert lines(queue(threads=5, processes=2))[0].connections == 16


@pytest.mark.parametrize(("maximum", "fits"), [(36, True), (35, False), (37, True)])
def test_the_processes_may_use_half_of_the_connections(maximum: int, fits: bool) -> None:
    assert (problem(queue(threads=8), maximum, 1_000) is None) is fits


def test_a_refusal_shows_what_adds_up_to_what() -> None:
    text = problem(queue(threads=8, processes=9), 94, 97) or ""
    assert "need 106 connections" in text
    assert "half of MAX_CONNECTIONS=94 is 47" in text
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["q", "99"], ["relay", "3"], ["scheduler", "1"], ["web", "3"], ["sum", "106"],
    ]  # fmt: skip


def test_more_than_the_server_gives_is_refused() -> None:
    assert "more than the 90 this server can give" in (problem(queue(threads=8), 94, 90) or "")


def test_the_server_is_asked_what_it_keeps_for_itself(conn: Conn) -> None:
    assert server_limit(conn) == 197


def test_limits_of_the_role_and_of_the_database_count(conn: Conn) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE frugal CONNECTION LIMIT 20")
        conn.execute("SET LOCAL ROLE frugal")
        assert server_limit(conn) == 20
    database = conn.info.dbname
    conn.execute(f'ALTER DATABASE "{database}" CONNECTION LIMIT 9'.encode())
    assert server_limit(conn) == 9
