"""The list: ours, what is built in beside it, and the others with their versions, each at its documented best."""

from __future__ import annotations

import json
from typing import LiteralString

from bench.figures import OURS, OURS_IN_BATCHES
from bench.peers.environments import Environment
from bench.peers.peer import Entry, Keys, Table, Way

THREADS = 8
RAW = "raw loop"
STOCK = "dramatiq-pg"
PGQUEUER = "PgQueuer"

NOW: LiteralString = "clock_timestamp()"
NOW_IN_UTC: LiteralString = "timezone('UTC', clock_timestamp())"
IN_AN_HOUR: LiteralString = "clock_timestamp() + interval '1 hour'"

# Ours. The shipped queues are made small, so that the one that is measured fits into the connection budget.

SHIPPED = {name: {"threads": 1} for name in ("index", "notify", "webhook", "maintenance", "fetch", "tasks")}


def _told(*, awaited: bool) -> dict[str, str]:
    measured = {"threads": THREADS, "time_limit_s": 30, "awaited": awaited}
    return {"QUEUES": json.dumps({**SHIPPED, "bench": measured}), "LOG_FORMAT": "json"}


OUR_WORKERS = f"dramatiq bench.actors --processes {{processes}} --threads {THREADS} --queues bench"
NOT_AWAITED = Way(OUR_WORKERS, _told(awaited=False))
AWAITED = Way(OUR_WORKERS, _told(awaited=True))
OUR_JOBS = Table(
    name="dramatiq.queue",
    unfinished="""
        SELECT count(*) AS n
        FROM dramatiq.queue
        WHERE state IN ('queued', 'consumed') AND available_at <= clock_timestamp()
    """,
    fresh={
        "message_id": "new.id",
        "message": "jsonb_set(message, '{message_id}', to_jsonb(new.id))",
        "available_at": NOW,
        "created_at": NOW,
    },
    later={"available_at": IN_AN_HOUR},
    empty="TRUNCATE dramatiq.queue, posthouse.attempts, posthouse.events CASCADE",
    id="uuidv7()",
)
POSTHOUSE = Entry(OURS, "posthouse_jobs", OUR_JOBS, NOT_AWAITED, AWAITED, pace=20_000)
IN_BATCHES = Entry(
    OURS_IN_BATCHES, "posthouse_jobs", OUR_JOBS, NOT_AWAITED, None, pace=30_000, job="batch", only_drains=True
)

# Built in beside it.

RAW_LOOP = Entry(
    RAW,
    "raw_jobs",
    Table(
        name="job",
        unfinished="SELECT count(*) AS n FROM job WHERE state <> 'done' AND run_at <= clock_timestamp()",
        fresh={"run_at": NOW},
        later={"run_at": IN_AN_HOUR},
        empty="TRUNCATE job",
    ),
    Way(""),
    None,
    pace=40_000,
)
DRAMATIQ = f"dramatiq bench.peers.dramatiq_jobs --processes {{processes}} --threads {THREADS} --skip-logging"
WITHOUT_DELAY: LiteralString = "jsonb_set(message, '{message_id}', to_jsonb(new.id))"
WITH_DELAY: LiteralString = """
    jsonb_set(
        jsonb_set(message, '{message_id}', to_jsonb(new.id)) || '{"queue_name": "bench.DQ"}',
        '{options,eta}',
        to_jsonb((extract(epoch FROM clock_timestamp()) * 1000 + 3600000)::bigint)
    )
"""
DRAMATIQ_PG = Entry(
    STOCK,
    "dramatiq_jobs",
    Table(
        name="dramatiq.queue",
        unfinished="""
            SELECT count(*) AS n
            FROM dramatiq.queue
            WHERE state IN ('queued', 'consumed') AND queue_name = 'bench'
        """,
        fresh={"message_id": "new.id", "message": WITHOUT_DELAY},
        later={"queue_name": "'bench.DQ'", "message": WITH_DELAY},
        empty="TRUNCATE dramatiq.queue",
    ),
    Way(DRAMATIQ, {"BENCH_VARIANT": "dramatiq-pg"}),
    Way(DRAMATIQ, {"BENCH_VARIANT": "dramatiq-pg"}),
    pace=700,
    has_bulk=False,
)
BUILT_IN = [POSTHOUSE, IN_BATCHES, RAW_LOOP, DRAMATIQ_PG]

# The others. Their options are those of their guides for many short jobs; `prompt` is closer to their defaults.

PSYCOPG = "psycopg[binary]==3.3.9"
DRAMATIQ_POSTGRES = Entry(
    "dramatiq-postgres",
    "dramatiq_jobs",
    Table(
        name="dramatiq.queue",
        unfinished="SELECT count(*) AS n FROM dramatiq.queue WHERE available_at <= clock_timestamp()",
        fresh={"message_id": "new.id", "message": WITHOUT_DELAY, "mtime": NOW, "available_at": NOW},
        later={"queue_name": "'bench.DQ'", "message": WITH_DELAY, "available_at": IN_AN_HOUR},
        empty="TRUNCATE dramatiq.queue",
    ),
    Way(DRAMATIQ, {"BENCH_VARIANT": "dramatiq-postgres", "dramatiq_queue_prefetch": "128"}),
    Way(DRAMATIQ, {"BENCH_VARIANT": "dramatiq-postgres"}),
    pace=1_700,
    environment=Environment("dramatiq-postgres", ("dramatiq-postgres==1.4.0", "dramatiq==2.2.1", PSYCOPG)),
    has_bulk=False,
)
PROCRASTINATE_WORKER = Way(
    f"procrastinate --app bench.peers.procrastinate_jobs.app --log-level warning worker -c {THREADS}"
)
PROCRASTINATE = Entry(
    "procrastinate",
    "procrastinate_jobs",
    Table(
        name="procrastinate_jobs",
        unfinished="""
            SELECT count(*) AS n
            FROM procrastinate_jobs
            WHERE status IN ('todo', 'doing') AND coalesce(scheduled_at <= clock_timestamp(), true)
        """,
        fresh={},
        later={"scheduled_at": IN_AN_HOUR},
        empty="TRUNCATE procrastinate_jobs CASCADE",
    ),
    PROCRASTINATE_WORKER,
    PROCRASTINATE_WORKER,
    pace=700,
    environment=Environment("procrastinate", ("procrastinate==3.10.0", PSYCOPG)),
)
PGQUEUER_ENVIRONMENT = Environment("pgqueuer", ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0", PSYCOPG))
PGQUEUER_JOBS = Table(
    name="pgqueuer",
    unfinished="SELECT count(*) AS n FROM pgqueuer WHERE execute_after <= clock_timestamp()",
    fresh={"created": NOW, "updated": NOW, "heartbeat": NOW, "execute_after": NOW},
    later={"execute_after": IN_AN_HOUR},
    empty="TRUNCATE pgqueuer, pgqueuer_log",
)
PGQUEUER_100 = Entry(
    PGQUEUER,
    "pgqueuer_jobs",
    PGQUEUER_JOBS,
    Way("", {"BENCH_VARIANT": "100"}),
    Way("", {"BENCH_VARIANT": ""}),
    pace=15_000,
    environment=PGQUEUER_ENVIRONMENT,
)
PGQUEUER_1000 = Entry(
    "PgQueuer, batches of 1,000",
    "pgqueuer_jobs",
    PGQUEUER_JOBS,
    Way("", {"BENCH_VARIANT": "1000"}),
    None,
    pace=17_000,
    environment=PGQUEUER_ENVIRONMENT,
    only_drains=True,
)
CHANCY = Entry(
    "Chancy",
    "chancy_jobs",
    Table(
        name="chancy_jobs",
        unfinished="""
            SELECT count(*) AS n
            FROM chancy_jobs
            WHERE state IN ('pending', 'running', 'retrying') AND scheduled_at <= clock_timestamp()
        """,
        fresh={"id": "new.id", "created_at": NOW, "scheduled_at": NOW},
        later={"scheduled_at": IN_AN_HOUR},
        empty="TRUNCATE chancy_jobs",
        id="uuidv7()",
    ),
    Way("", {"BENCH_VARIANT": "async"}),
    Way("", {"BENCH_VARIANT": "threads"}),
    pace=5_000,
    environment=Environment("chancy", ("chancy==0.26.0", PSYCOPG)),
)
OBAN_START = "oban start --dsn {url} --cron-modules bench.peers.oban_jobs --log-level WARNING --queues bench:"
OBAN = Entry(
    "Oban for Python",
    "oban_jobs",
    Table(
        name="oban_jobs",
        unfinished="""
            SELECT count(*) AS n
            FROM oban_jobs
            WHERE state IN ('available', 'executing', 'retryable')
        """,
        fresh={
            "inserted_at": "timezone('UTC', clock_timestamp())",
            "scheduled_at": "timezone('UTC', clock_timestamp())",
        },
        later={"state": "'scheduled'", "scheduled_at": "timezone('UTC', clock_timestamp()) + interval '1 hour'"},
        empty="TRUNCATE oban_jobs",
    ),
    Way(OBAN_START + "100"),
    Way(OBAN_START + str(THREADS)),
    pace=4_000,
    environment=Environment("oban", ("oban==0.7.0", PSYCOPG), python=(3, 12)),
)
GRAPHILE = Entry(
    "graphile-worker (Node)",
    "graphile_jobs.mjs",
    Table(
        name="graphile_worker._private_jobs",
        unfinished="SELECT count(*) AS n FROM graphile_worker._private_jobs WHERE run_at <= clock_timestamp()",
        fresh={"run_at": NOW, "created_at": NOW, "updated_at": NOW},
        later={"run_at": IN_AN_HOUR},
        empty="DELETE FROM graphile_worker._private_jobs",
    ),
    Way("", {"BENCH_VARIANT": "batch"}),
    Way("", {"BENCH_VARIANT": "8"}),
    pace=40_000,
    environment=Environment(
        "graphile-worker", ("graphile-worker@0.18.0", "node@22.23.3", "pg@8.23.1"), node=True, programs=("npm",)
    ),
)
CELERY_WORKER = (
    "celery -A bench.peers.celery_jobs worker -Q bench -l WARNING "
    "--without-gossip --without-mingle --without-heartbeat "
)
CELERY = Entry(
    "Celery on Redis",
    "celery_jobs",
    Keys(lists=("bench",), hashes=("unacked",), mixed=True),
    Way(CELERY_WORKER + "-c {processes}"),
    Way(CELERY_WORKER + f"-P threads -c {THREADS}"),
    pace=1_500,
    environment=Environment("celery", ("celery[redis]==5.7.0",), programs=("redis-server", "redis-cli")),
    has_bulk=False,
)
DRAMATIQ_REDIS = Entry(
    "Dramatiq on Redis",
    "dramatiq_jobs",
    Keys(hashes=("dramatiq:bench.msgs",)),
    Way(DRAMATIQ, {"BENCH_VARIANT": "redis", "dramatiq_queue_prefetch": "128"}),
    Way(DRAMATIQ, {"BENCH_VARIANT": "redis"}),
    pace=4_000,
    environment=Environment("dramatiq-redis", ("dramatiq[redis]==2.2.1",), programs=("redis-server", "redis-cli")),
    has_bulk=False,
)
OTHERS = [
    DRAMATIQ_POSTGRES,
    PROCRASTINATE,
    PGQUEUER_100,
    PGQUEUER_1000,
    CHANCY,
    OBAN,
    GRAPHILE,
    CELERY,
    DRAMATIQ_REDIS,
]
