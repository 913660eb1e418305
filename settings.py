"""Every setting of Posthouse, in one place, typed; queues and their limits are data here.

Each field is read once, at start, from the environment variable of the same name in capitals. The unit is in the name.
This is the only module that reads the environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

EXIT_CONFIG = 78

QUEUE_NAME = r"^[a-zA-Z_][a-zA-Z0-9._-]{0,39}$"


class QueueSettings(BaseModel):
    """One queue: its processes, the threads of each, the seconds an attempt may take, whether somebody waits for it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    processes: int = Field(1, ge=1, le=64)
    threads: int = Field(ge=1, le=256)
    time_limit_s: float = Field(gt=0, le=86_400)
    awaited: bool = False


QUEUES: dict[str, QueueSettings] = {
    "index": QueueSettings(threads=4, time_limit_s=30, awaited=True),
    "notify": QueueSettings(threads=2, time_limit_s=30, awaited=True),
    "webhook": QueueSettings(threads=8, time_limit_s=30),
    "maintenance": QueueSettings(threads=1, time_limit_s=600),
    "fetch": QueueSettings(threads=3, time_limit_s=120),
    "tasks": QueueSettings(threads=2, time_limit_s=600),
}


def _postgres_url(url: SecretStr) -> SecretStr:
    if not url.get_secret_value().startswith(("postgresql://", "postgres://")):
        raise ValueError("must start with postgresql://")
    return url


PostgresUrl = Annotated[SecretStr, AfterValidator(_postgres_url)]
Words = Annotated[tuple[str, ...], NoDecode]


class Settings(BaseSettings):
    """What this process was told. Raises pydantic's ValidationError; `load` turns that into one line and exit 78."""

    model_config = SettingsConfigDict(env_ignore_empty=True, frozen=True, extra="ignore", allow_inf_nan=False)

    database_url: PostgresUrl | None = Field(None, description="Postgres to use; unset: the embedded one")
    database_listen_url: PostgresUrl | None = Field(
        None, description="direct connection for LISTEN, when DATABASE_URL is a transaction pooler"
    )
    data_dir: Path = Field(Path(".data"), description="embedded Postgres, keys, metrics, objects")
    db_start_wait_s: float = Field(30, ge=1, le=600, description="wait for the database at boot, then exit 69")

    queues: Annotated[dict[str, QueueSettings], NoDecode] = Field(
        QUEUES, description="JSON that changes or adds queues: {name: {processes, threads, time_limit_s, awaited}}"
    )
    max_connections: int = Field(94, ge=2, le=100_000, description="connections the server gives this role")

    lease_s: float = Field(20, ge=1, le=3_600, description="a job's lease; a dead worker's jobs run again after it")
    control_interval_s: float = Field(5, gt=0, le=600, description="between renewals of the leases")
    rescue_interval_s: float = Field(5, gt=0, le=60, description="between looks for expired leases")
    keeper_patience_s: float = Field(
        10, ge=1, le=3_600, description="past a job's time limit, before the keeper kills its silent process"
    )
    poll_interval_s: float = Field(1, gt=0, le=60, description="between claims of a quiet queue")
    awaited_poll_interval_s: float = Field(0.1, gt=0, le=60, description="the same where somebody waits")
    listen_probe_interval_s: float = Field(30, gt=0, le=600, description="between proofs that notifications arrive")
    watchdog_s: float = Field(60, ge=5, le=3_600, description="a thread that stands still so long ends its process, 70")
    shutdown_grace_s: float = Field(20, ge=0, le=3_600, description="running jobs may end in this time after SIGTERM")
    shutdown_total_s: float = Field(30, ge=1, le=3_600, description="from SIGTERM to exit")

    relay_batch: int = Field(200, ge=1, le=10_000, description="events a relay pass takes at most")
    relay_sweep_s: float = Field(60, gt=0, le=3_600, description="a pass without any notification")
    event_retention_days: float = Field(7, gt=0, description="fanned-out events are kept so long")
    completed_job_retention_hours: float = Field(24, gt=0, description="completed jobs are kept so long")
    failed_job_retention_days: float = Field(7, gt=0, description="discarded and cancelled jobs are kept so long")

    web_host: str = Field("127.0.0.1", min_length=1, description="address of the page")
    web_port: int = Field(8400, ge=0, le=65_535, description="port of the page")

    smtp_url: SecretStr | None = Field(None, description="smtp:// (STARTTLS), smtps://; ?tls=none on loopback only")
    mail_from: str = Field("", description="sender of mails")
    owner_email: str = Field("", description="who is told what happened")

    meili_url: str = Field("", pattern=r"^(https?://.+)?$", description="Meilisearch; unset: Postgres full text")
    meili_api_key: SecretStr = Field(SecretStr(""), description="its key")
    meili_index: str = Field("posthouse", pattern=r"^[A-Za-z0-9_-]{1,400}$", description="its index")

    outbound_ports: Annotated[tuple[int, ...], NoDecode] = Field((443, 8443), description="ports calls may go to")
    outbound_allow: Words = Field((), description="exceptions, HOST=CIDR:PORT, comma-separated")
    outbound_block: Words = Field((), description="further ranges that are never called")
    outbound_ca_file: Path | None = Field(None, description="further certificate authorities")
    webhook_allow_http: bool = Field(False, description="endpoints may be http://")
    webhook_http_timeout_s: float = Field(10, gt=0, description="one exchange in all, below the job's limit")
    webhook_time_limit_s: float = Field(15, gt=0, description="one delivery job, below the endpoint's lease")
    endpoint_lease_s: float = Field(20, gt=0, description="one delivery in flight an endpoint")
    webhook_max_endpoints: int = Field(100, ge=1, description="endpoints in all")
    seal_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="base64 of 32 bytes each, comma-separated: the first seals, all open"
    )

    log_format: str = Field("auto", pattern="^(auto|json|text)$", description="auto: text on a terminal, else JSON")

    @model_validator(mode="before")
    @classmethod
    def _split(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: _words(value) if name in _LISTS else value for name, value in values.items()} | _queues(values)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        _below("3 × control_interval_s", 3 * self.control_interval_s, "lease_s", self.lease_s, equal=True)
        _below("shutdown_grace_s + 4", self.shutdown_grace_s + 4, "shutdown_total_s", self.shutdown_total_s, equal=True)
        _below("webhook_http_timeout_s", self.webhook_http_timeout_s, "webhook_time_limit_s", self.webhook_time_limit_s)
        _below("webhook_time_limit_s", self.webhook_time_limit_s, "endpoint_lease_s", self.endpoint_lease_s)
        return self


_LISTS = {"outbound_ports", "outbound_allow", "outbound_block", "seal_keys"}


def _words(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _queues(values: dict[str, Any]) -> dict[str, Any]:
    given = values.get("queues")
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"QUEUES is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('QUEUES must be a JSON object: {"name": {"threads": 2, "time_limit_s": 60}}')
    for name, queue in given.items():
        if not re.match(QUEUE_NAME, name):
            raise ValueError(f"QUEUES: {name!r} must be a letter or _, then letters, digits, . _ -, at most 40 bytes")
        if not isinstance(queue, dict | QueueSettings):
            raise ValueError(f"QUEUES: {name} must be an object with threads and time_limit_s")
    merged = {
        name: {**QUEUES[name].model_dump(), **queue} if name in QUEUES and isinstance(queue, dict) else queue
        for name, queue in given.items()
    }
    return {"queues": {**QUEUES, **merged}}


def _below(low_name: str, low: float, high_name: str, high: float, *, equal: bool = False) -> None:
    if low > high or (low == high and not equal):
        raise ValueError(f"{low_name} is {low:g}, but must be {'at most' if equal else 'below'} {high_name}, {high:g}")


@lru_cache
def load() -> Settings:
    """Read the environment once. A bad value: one line that names it on stderr, and exit 78."""
    try:
        return Settings()
    except ValidationError as error:
        refuse("; ".join(_sentence(dict(problem)) for problem in error.errors()))
    except SettingsError as error:
        refuse(str(error))


def _sentence(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place.upper()}: {message}" if place else message


def refuse(reason: str, code: int = EXIT_CONFIG) -> NoReturn:
    """End the process with one line on stderr; for faults a person must mend before anything can run."""
    print(f"posthouse: {reason}", file=sys.stderr, flush=True)
    sys.exit(code)


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment with *extra* on top, for a process that is about to be started."""
    return {**os.environ, **extra}


def adopt(environment: dict[str, str]) -> Settings:
    """Go on with *environment* as this process's own; the settings as it has them."""
    os.environ.update(environment)
    load.cache_clear()
    return load()


def is_set(name: str) -> bool:
    """Whether a person gave the environment variable *name* a value."""
    return bool(os.environ.get(name))


def metrics_dir() -> Path:
    """The folder of the processes' metric files; made known to prometheus_client, which reads it at import."""
    folder = Path(os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", str(load().data_dir.resolve() / "metrics")))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
