"""The plans of the hot statements, as they are run, beside a million ended and two hundred thousand delayed jobs.

The server itself tells the plan of each statement of each function, first with the parameters and later without them,
on sessions like those of a process: the claim loop's, the control thread's, the pool's. What a statement reads may
depend on what it handles, never on what the table holds beside that, whatever the planner was last told of the table.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from middleware import leases
from outbox import controls, explain, jobs, keeping
from outbox.db import Conn, connect
from outbox.jobs import Claim, NewJob, RetryRefused, Settlement
from tests import emptied

shared_url = emptied.shared_url

ENDED, DELAYED, LEASED = 1_000_000, 200_000, 100
WORKER, OTHER = str(uuid.uuid4()), str(uuid.uuid4())
MESSAGE = '{"actor_name": "a", "args": [1, 2, 3], "kwargs": {}, "options": {}}'
#: By then a statement is planned without its parameters: five runs are the driver's to prepare it, five the server's.
TIMES = 12


@dataclass
class Plan:
    """What the server did for one statement."""

    text: str
    root: dict[str, Any]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(_nodes(self.root))

    @property
    def scans(self) -> list[dict[str, Any]]:
        """Where it read jobs."""
        return [node for node in self.nodes if node.get("Relation Name") == "queue" and "Scan" in node["Node Type"]]

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def blocks(self) -> int:
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])

    @property
    def rows(self) -> float:
        """The most jobs that one scan read, kept and thrown away."""
        return max((self._read(node) for node in self.scans), default=0)

    def _read(self, node: Mapping[str, Any]) -> float:
        each = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        return float(each * node["Actual Loops"])


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _nodes(part)


class Session:
    """A connection that keeps the plans of what it runs."""

    def __init__(self, url: str, session: Mapping[str, str] = MappingProxyType({})) -> None:
        self.conn = connect(url, name="posthouse plans", session=session)
        self._told: list[Plan] = []
        for statement in (
            "LOAD 'auto_explain'",
            "SET auto_explain.log_analyze = on",
            "SET auto_explain.log_buffers = on",
            "SET auto_explain.log_format = json",
            "SET auto_explain.log_level = notice",
        ):
            self.conn.execute(statement.encode())
        self.conn.add_notice_handler(self._tell)

    def _tell(self, notice: psycopg.errors.Diagnostic) -> None:
        _, said, plan = (notice.message_primary or "").partition("plan:")
        if said:
            told = json.loads(plan)
            self._told.append(Plan(told["Query Text"], told["Plan"]))

    def plans(self, do: Callable[[Conn], object]) -> list[Plan]:
        """Of each statement that *do* runs."""
        self._told.clear()
        self.conn.execute("SET auto_explain.log_min_duration = 0")
        do(self.conn)
        self.conn.execute("SET auto_explain.log_min_duration = -1")
        return [plan for plan in self._told if "auto_explain" not in plan.text]


# The table.


@pytest.fixture(scope="module")
def full_url(shared_url: str) -> str:
    """The module's database, as a busy one is after days; no vacuum and no analysis comes in between."""
    with connect(shared_url, name="posthouse plans") as conn:
        conn.execute("ALTER TABLE dramatiq.queue SET (autovacuum_enabled = off)")
        conn.execute("SET synchronous_commit = off; SET maintenance_work_mem = '256MB'")
        # Made at the end, from sorted rows, they take a fifth of the time.
        found = conn.execute(
            "SELECT indexname AS name, indexdef FROM pg_indexes WHERE tablename = 'queue' AND indexname <> 'queue_pkey'"
        ).fetchall()
        for index in found:
            conn.execute(sql.SQL("DROP INDEX dramatiq.{}").format(sql.Identifier(index["name"])))
        conn.execute(
            """
            INSERT INTO dramatiq.queue (
                message_id, queue_name, state, message, priority, available_at, created_at, attempt, claimed_at,
                finished_at, mtime
            )
            SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'q' || n %% 5,
                   CASE n %% 10 WHEN 0 THEN 'rejected' ELSE 'done' END::dramatiq.state, %s, n %% 4, at, at, 1, at, at,
                   at
            FROM generate_series(1, %s) AS n
            CROSS JOIN LATERAL (SELECT now() - n * interval '0.5 s' AS at) AS times
            """,
            [MESSAGE, ENDED],
        )
        conn.execute(
            """
            INSERT INTO dramatiq.queue (
                message_id, queue_name, message, priority, available_at, created_at, limit_key, limit_running
            )
            SELECT ('00000000-0000-7000-8001-' || lpad(to_hex(n), 12, '0'))::uuid, 'q' || n %% 5, %s, n %% 4,
                   now() + interval '1 day' + n * interval '1 min', now() - n * interval '1 ms',
                   CASE n %% 7 WHEN 0 THEN 'k' || n %% 9 END, CASE n %% 7 WHEN 0 THEN 5 END
            FROM generate_series(1, %s) AS n
            """,
            [MESSAGE, DELAYED],
        )
        for index in found:
            conn.execute(index["indexdef"].encode())
        jobs.enqueue_many(conn, [NewJob(queue=f"q{n % 2}", actor="a", priority=n % 3) for n in range(4_000)])
        jobs.claim(conn, {"q0": LEASED}, worker_id=OTHER, lease_s=9_999)
    return shared_url


def forget_statistics(conn: Conn, rows: int) -> None:
    """As they are when the table was never analysed (-1), or last when it was empty (0)."""
    conn.execute("DELETE FROM pg_statistic WHERE starelid = 'dramatiq.queue'::regclass")
    conn.execute(
        """
        UPDATE pg_class SET reltuples = %s, relpages = 0
        WHERE oid = 'dramatiq.queue'::regclass
           OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'dramatiq.queue'::regclass)
        """,
        [rows],
    )


def take_statistics_of(conn: Conn, chosen: str) -> None:
    """As they are when the table was last analysed while it held only rows like those *chosen*."""
    conn.execute("CREATE TABLE posthouse.sample (LIKE dramatiq.queue INCLUDING GENERATED)")
    found = conn.execute(
        """
        SELECT string_agg(attname, ', ' ORDER BY attnum) AS columns FROM pg_attribute
        WHERE attrelid = 'posthouse.sample'::regclass AND attnum > 0 AND attgenerated = ''
        """
    ).fetchone()
    columns = found["columns"] if found else ""
    query = f"INSERT INTO posthouse.sample ({columns}) SELECT {columns} FROM dramatiq.queue WHERE {chosen} LIMIT 1000"
    conn.execute(query.encode())
    conn.execute("ANALYZE posthouse.sample")
    forget_statistics(conn, 1_000)
    conn.execute(
        """
        UPDATE pg_statistic
        SET starelid = ours.attrelid, staattnum = ours.attnum
        FROM pg_attribute sample
        JOIN pg_attribute ours USING (attname)
        WHERE starelid = sample.attrelid
          AND staattnum = sample.attnum
          AND sample.attrelid = 'posthouse.sample'::regclass
          AND ours.attrelid = 'dramatiq.queue'::regclass
        """
    )
    conn.execute(
        """
        UPDATE pg_class SET relpages = sample.relpages
        FROM pg_class sample
        WHERE pg_class.oid = 'dramatiq.queue'::regclass AND sample.oid = 'posthouse.sample'::regclass
        """
    )
    conn.execute("DROP TABLE posthouse.sample")


#: What the planner was last told of the table.
STATISTICS: dict[str, Callable[[Conn], object]] = {
    "fresh": lambda conn: conn.execute("ANALYZE dramatiq.queue"),
    "none": lambda conn: forget_statistics(conn, -1),
    "it is empty": lambda conn: forget_statistics(conn, 0),
    "all are queued": lambda conn: take_statistics_of(conn, "state = 'queued' AND limit_key IS NULL"),
    "all have ended": lambda conn: take_statistics_of(conn, "state = 'done'"),
}


# The statements.


class Work:
    """What one round of a process's calls hands from one to the next."""

    def __init__(self) -> None:
        self.held: list[Claim] = []
        self.round = 0

    def _taken(self, count: int) -> list[Claim]:
        return [self.held.pop() for _ in range(count)]

    def claim(self, conn: Conn) -> None:
        self.held += jobs.claim(conn, {"q0": 10, "q1": 10}, worker_id=WORKER, lease_s=9_999)

    def claim_nothing(self, conn: Conn) -> None:
        assert jobs.claim(conn, {"q2": 10, "q3": 10}, worker_id=WORKER, lease_s=9_999) == []

    def claim_limited(self, conn: Conn) -> None:
        found = controls.claim_limited(conn, {"q0": 5, "q1": 5}, worker_id=WORKER, lease_s=9_999)
        self.held += found.claims

    def renew(self, conn: Conn) -> None:
        assert len(jobs.renew(conn, {held.id: held.token for held in self.held}, lease_s=9_999)) == len(self.held)

    def still_held(self, conn: Conn) -> None:
        assert len(jobs.still_held(conn, {held.id: held.token for held in self.held})) == len(self.held)

    def settle(self, conn: Conn) -> None:
        ends = [
            Settlement(held.id, held.token, "queued", delay_s=9_999, outcome="failed", error="no")
            for held in self._taken(5)
        ]
        assert len(jobs.settle(conn, ends)) == 5

    def settle_completed(self, conn: Conn) -> None:
        assert len(jobs.settle(conn, [Settlement(held.id, held.token, "done") for held in self._taken(5)])) == 5

    def release(self, conn: Conn) -> None:
        assert jobs.release(conn, {held.id: held.token for held in self._taken(5)}) == 5

    def release_unheld(self, conn: Conn) -> None:
        assert jobs.release_unheld(conn, WORKER, [held.token for held in self.held[5:]]) == 5
        del self.held[:5]

    def take_over(self, conn: Conn) -> None:
        kept = keeping.take_over(conn, WORKER, tokens=[self.held[0].token], to=WORKER, lease_s=9_999)
        assert len(kept) == len(self.held)

    def rescue(self, conn: Conn) -> None:
        assert len(jobs.rescue(conn, dead=[WORKER])) == len(self.held)
        self.held.clear()

    def retry(self, conn: Conn) -> None:
        """A discarded one."""
        self.round += 1
        with suppress(RetryRefused):
            jobs.retry(conn, ended_id(10 * self.round))


def ended_id(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012x}"


DELAYED_ID = f"00000000-0000-7000-8001-{DELAYED // 2:012x}"
LOOP, CONTROL, POOL = jobs.SESSION, leases.SESSION, MappingProxyType[str, str]({})


@dataclass(frozen=True)
class Hot:
    """A call and its session; the blocks that each of its statements may read, and the jobs in one scan."""

    name: str
    session: Mapping[str, str]
    do: Callable[[Work, Conn], object]
    blocks: int
    rows: int


HOT = [
    Hot("claim", LOOP, Work.claim, 600, 30),
    Hot("claim nothing", LOOP, Work.claim_nothing, 300, 30),
    Hot("claim with keys", LOOP, Work.claim_limited, 800, 20 + 10 * LEASED),
    Hot("next due", LOOP, lambda work, conn: jobs.next_due(conn, ["q0", "q1", "q2"]), 1_500, 150),
    Hot("renew", CONTROL, Work.renew, 600, 60),
    Hot("still held", CONTROL, Work.still_held, 300, 60),
    Hot("settle", LOOP, Work.settle, 200, 10),
    Hot("settle completed", LOOP, Work.settle_completed, 200, 10),
    Hot("release", LOOP, Work.release, 200, 10),
    Hot("release unheld", LOOP, Work.release_unheld, 600, 2 * LEASED),
    Hot("take over", CONTROL, Work.take_over, 600, 2 * LEASED),
    Hot("kept by", CONTROL, lambda work, conn: keeping.kept_by(conn, [OTHER]), 300, 2 * LEASED),
    Hot("rescue", CONTROL, Work.rescue, 600, 2 * LEASED),
    Hot("enqueue", POOL, lambda work, conn: jobs.enqueue_many(conn, [unique() for _ in range(10)]), 400, 0),
    Hot("enqueue again", POOL, lambda work, conn: jobs.enqueue(conn, unique("u")), 50, 2),
    Hot("retry", POOL, Work.retry, 100, 1),
    Hot("prune", POOL, lambda work, conn: jobs.prune(conn, completed_s=9_999, failed_s=9_999, limit=100), 1_500, 200),
    Hot("load", POOL, lambda work, conn: jobs.load(conn, DELAYED_ID), 20, 2),
    Hot("listing of a state", POOL, lambda work, conn: jobs.listing(conn, state="running"), 800, 2 * LEASED),
    Hot("listing of an event", POOL, lambda work, conn: jobs.listing(conn, event_id=WORKER), 100, 2),
    Hot("explain", POOL, lambda work, conn: explain.explain(conn, DELAYED_ID), 1_500, explain.COUNT_TO),
]


#: Told wrong, it reads all that wait or have ended to find the newest; people can wait for that.
FOR_PEOPLE = [Hot("listing", POOL, lambda work, conn: jobs.listing(conn), 2_000, 3 * jobs.PAGE)]


def unique(key: str | None = None) -> NewJob:
    return NewJob(queue="q0", actor="a", unique_key=key or str(uuid.uuid4()))


@pytest.mark.parametrize("told", STATISTICS)
def test_a_hot_statement_reads_what_it_handles_whatever_the_planner_was_told(full_url: str, told: str) -> None:
    """Every round, of the first with its parameters to the last one without, each fault is one line."""
    faults = dict[str, None]()
    work = Work()
    with sessions(full_url, told) as opened:
        for hot in [*HOT, *(FOR_PEOPLE if told == "fresh" else ())] * TIMES:
            for plan in opened[id(hot.session)].plans(partial(hot.do, work)):
                faults |= dict.fromkeys(f"{hot.name}: {fault}" for fault in found_wrong(plan, hot.blocks, hot.rows))
    assert list(faults) == []


def found_wrong(plan: Plan, blocks: int, rows: int) -> Iterator[str]:
    if whole := [node for node in plan.scans if node["Node Type"] == "Seq Scan"]:
        yield f"reads the whole table: {whole[0]}"
    if plan.blocks > blocks:
        yield f"{plan.blocks} blocks, not {blocks}, by {plan.indexes}"
    if plan.rows > rows:
        yield f"{plan.rows:g} rows in one scan, not {rows}, by {plan.indexes}"


@contextmanager
def sessions(url: str, told: str) -> Iterator[dict[int, Session]]:
    """One of each kind, once the planner was *told*."""
    with ExitStack() as opened:
        STATISTICS[told](opened.enter_context(connect(url, name="posthouse plans")))
        kinds = {id(kind): Session(url, kind) for kind in (LOOP, CONTROL, POOL)}
        for session in kinds.values():
            opened.enter_context(closing(session.conn))
        yield kinds


@pytest.mark.parametrize("told", ["fresh", "none"])
def test_a_count_reads_what_it_counts(full_url: str, told: str) -> None:
    """Depths and what ended lately, for people: told wrong, they may read all."""
    with sessions(full_url, told) as opened:
        (unfinished,) = opened[id(POOL)].plans(jobs.depths)
        (ended,) = opened[id(POOL)].plans(jobs.ended)
    assert list(found_wrong(unfinished, DELAYED + DELAYED // 5, DELAYED + DELAYED // 5)) == []
    # A job ended every half second of that hour.
    assert list(found_wrong(ended, 20_000, 10_000)) == []


def test_dead_rows_at_the_head_cost_a_claim_what_they_are_and_no_more(database_url: str) -> None:
    """F79: a long transaction elsewhere keeps what was worked off since; with it that goes, and no vacuum is needed."""
    with sessions(database_url, "it is empty") as opened, connect(database_url, name="report") as report:
        loop = opened[id(LOOP)]

        def blocks() -> int:
            (plan,) = loop.plans(lambda conn: jobs.claim(conn, {"q": 10}, worker_id=WORKER, lease_s=9_999))
            return plan.blocks

        before = blocks()
        with report.transaction():
            report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            report.execute("SELECT FROM dramatiq.queue LIMIT 1")
            come_and_go(loop.conn, "q", times=50)
            during = blocks()
        come_and_go(loop.conn, "q", times=1)
        after = blocks()
    assert 4 * before < during < before + 4 * 50 * 100
    assert 3 * after < during


def come_and_go(conn: Conn, queue: str, *, times: int) -> None:
    """A hundred jobs are enqueued, claimed and completed, so often."""
    for _ in range(times):
        jobs.enqueue_many(conn, [NewJob(queue=queue, actor="a") for _ in range(100)])
        held = jobs.claim(conn, {queue: 100}, worker_id=WORKER, lease_s=9_999)
        assert len(jobs.settle(conn, [Settlement(one.id, one.token, "done") for one in held])) == 100


def test_the_indexes_stay_smaller_than_five_tables(conn: Conn) -> None:
    """F80: after jobs that came and went; and none of them holds arguments."""
    come_and_go(conn, "q", times=100)
    query = "SELECT pg_indexes_size('dramatiq.queue') AS indexes, pg_table_size('dramatiq.queue') AS rows"
    (size,) = conn.execute(query).fetchall()
    assert size["indexes"] < 5 * size["rows"]
    indexed = conn.execute(
        """
        SELECT DISTINCT attname
        FROM pg_index
        JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey)
        WHERE indrelid = 'dramatiq.queue'::regclass
        """
    ).fetchall()
    assert {"message", "result"} & {row["attname"] for row in indexed} == set()
