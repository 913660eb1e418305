"""Posthouse on the command line: `up` is the whole service, the other commands are its parts and its tools.

Exit codes: 0 done; 1 done, but something was cut short or left out; 2 wrong usage; 69 the database or the
embedded Postgres is not available; 70 a process could not start, or stood still; 73 an address or a folder cannot
be taken; 75 Posthouse already runs here; 78 a setting, the Procfile or the schema is wrong. What ends a command is
said in one line.
"""

from __future__ import annotations

import signal

_ON_CTRL_C = signal.getsignal(signal.SIGINT)
if _ON_CTRL_C is signal.default_int_handler:
    # Ctrl-C while the modules below are read ends the command without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import base64
import contextlib
import ctypes
import fcntl
import getpass
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psycopg
import typer
from honcho.environ import parse_procfile
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from middleware import boot, logs
from outbox import controls, embedded, events, explain, jobs, migrations
from outbox.db import Conn, connect
from runner import EXIT_INCOMPLETE, Plan, Runner, Screen, hear_no_more_signals, page, stop_signals
from settings import Settings, adopt, child_environment, is_set, load, refuse
from web import overview, terminal
from web.models import Job, JobLine, State, load_job

signal.signal(signal.SIGINT, _ON_CTRL_C)

_PR_SET_PDEATHSIG = 1
EXIT_USAGE = 2
EXIT_CANNOT_TAKE = 73
EXIT_RUNS_ALREADY = 75

HERE = Path(__file__).parent

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def up(procfile: Path = typer.Option(HERE / "Procfile", help="what to run, a process a line")) -> None:
    """Run it all: Postgres when DATABASE_URL is unset, migrations, the Procfile. Ctrl-C stops it."""
    settings = load()
    programs = _programs(procfile)
    screen = Screen(list(programs))
    data_dir = _data_dir(settings)
    code = 0
    with _only_here(data_dir, page(settings)), _stoppable(), _database(settings, screen.tell) as url:
        _migrate(url, screen.tell)
        _check(settings, url)
        _empty(data_dir / "metrics")
        plan = Plan(programs, procfile.resolve().parent, _environment(settings, url), settings)
        revive = None if settings.database_url else lambda: embedded.revive(data_dir)
        code = asyncio.run(Runner(plan, screen, _spawn, revive).run())
    raise typer.Exit(code)


@app.command()
def web() -> None:
    """Serve the page and the API on WEB_HOST and WEB_PORT."""
    settings = _connected()
    logs.configure(settings.log_format)
    with _listener(settings.web_host, settings.web_port) as listener:
        import uvicorn

        from web.app import create_app

        _outlive_uvicorn()
        config = uvicorn.Config(create_app(settings), log_config=None, timeout_graceful_shutdown=3)
        uvicorn.Server(config).run(sockets=[listener])


@app.command()
def relay() -> None:
    """Turn events into jobs, keep this host's workers, rescue what lost ones left; works no queue itself."""
    settings = _connected()
    from actors import broker
    from middleware import relay_process
    from middleware.lifecycle import process

    boot.check(settings, _url(settings), broker.subscriptions())
    raise typer.Exit(relay_process.run(settings, _url(settings), broker.subscriptions(), broker.kind, process))


@app.command()
def migrate() -> None:
    """Bring the schema of DATABASE_URL, or of the embedded Postgres that runs here, up to this version."""
    applied = _migrate(_url(_connected()), typer.echo)
    typer.echo(f"{len(applied)} applied" if applied else "nothing to do")


endpoint = typer.Typer(no_args_is_help=True, help="Where webhooks go.")
app.add_typer(endpoint, name="endpoint")


@endpoint.command("add")
def endpoint_add(
    url: str,
    event: list[str] = typer.Option(["*"], help="types to send, as globs; * is all that may be sent"),
    header: list[str] = typer.Option([], help="a header to send along, as 'Name: value'"),
    description: str = typer.Option("", help="for people"),
    signing: str = typer.Option("v1", help="v1, v1a or both"),
    secret: str | None = typer.Option(None, help="to sign with; else one is made"),
) -> None:
    """Send webhooks to URL from now on, and show the secret that signs them, this once."""
    with _ledger() as conn:
        from actors import endpoints
        from actors.drafts import Draft, Refused
        from actors.sealing import NoSealKey

        twins = [one.id for one in endpoints.listing(conn) if one.url.rstrip("/") == url.rstrip("/")]
    headers = [(name, value.strip()) for name, _, value in (text.partition(":") for text in header)]
    try:
        created, warning = endpoints.add(Draft(url, description, event, headers, signing, secret))
    except Refused as refusal:
        for problem in refusal.problems:
            typer.echo(f"{problem.field}: {problem.message}", err=True)
        raise typer.Exit(EXIT_INCOMPLETE) from None
    except NoSealKey as error:
        refuse(str(error))
    if warning:
        typer.echo(f"warning: {warning}", err=True)
    if twins:
        typer.echo(f"warning: {', '.join(twins)} has this address too: what both ask for comes twice", err=True)
    typer.echo(f"endpoint {created.endpoint.id}")
    typer.echo(f"secret   {created.secret}")


@endpoint.command("list")
def endpoint_list() -> None:
    """Where webhooks go, and how it is there."""
    _connected()
    from actors import endpoints
    from broker import transaction

    with transaction() as conn:
        found = endpoints.listing(conn)
    for listed in found:
        state = "enabled" if listed.enabled else f"disabled ({listed.disabled_reason})"
        failing = f", {listed.failures_in_row} failures in a row" if listed.failures_in_row else ""
        typer.echo(f"{listed.id}  {state}{failing}  {' '.join(listed.event_types)}  {listed.url}")


jobs_commands = typer.Typer(no_args_is_help=True, help="What there is to do, and what became of it.")
app.add_typer(jobs_commands, name="jobs")
AS_JSON = typer.Option(False, "--json", help="for programs, as the API answers")


@jobs_commands.command("list")
def jobs_list(
    state: State | None = typer.Option(None, help="only these"),
    queue: str | None = typer.Option(None, help="only of this queue"),
    actor: str | None = typer.Option(None, help="only of this actor"),
    limit: int = typer.Option(20, min=1, max=10_000, help="so many, the newest"),
    as_json: bool = AS_JSON,
) -> None:
    """The newest jobs."""
    with _ledger() as conn:
        rows = jobs.listing(conn, state=state, queue=queue, actor=actor, limit=limit)
    lines = [JobLine.model_validate(row) for row in rows]
    if as_json:
        typer.echo(terminal.as_json([line.model_dump(mode="json") for line in lines]))
    else:
        terminal.show_jobs(lines)


@jobs_commands.command("show")
def jobs_show(job_id: str, as_json: bool = AS_JSON) -> None:
    """One job: when what happened to it, its arguments, each attempt that failed."""
    with _ledger() as conn:
        job = _job(conn, job_id)
    if as_json:
        typer.echo(terminal.as_json(job.model_dump(mode="json")))
    else:
        terminal.show_job(job)


@jobs_commands.command("retry")
def jobs_retry(job_id: str) -> None:
    """Put a discarded job back, due now, with fresh attempts; its history stays."""
    with _ledger() as conn:
        job = _job(conn, job_id)
        try:
            jobs.retry(conn, job.id)
        except jobs.RetryRefused as reason:
            refuse(f"job {job.id} is {job.state}: {reason}", EXIT_INCOMPLETE)
    typer.echo(f"job {job.id} is due now")


@jobs_commands.command("explain")
def jobs_explain(job_id: str, as_json: bool = AS_JSON) -> None:
    """Why a job is not running: every true reason, the decisive one first."""
    with _ledger() as conn:
        found = explain.explain(conn, _job(conn, job_id).id, heard_within_s=overview.heard_within_s(load()))
    if found is None:
        refuse(f"job {job_id} has just been deleted: its time here is over", EXIT_INCOMPLETE)
    if as_json:
        typer.echo(terminal.as_json(TypeAdapter(explain.Explanation).dump_python(found, mode="json")))
    else:
        terminal.show_explanation(found)


queues_commands = typer.Typer(no_args_is_help=True, help="Let queues wait, and go on.")
app.add_typer(queues_commands, name="queues")


@queues_commands.command("list")
def queues_list(as_json: bool = AS_JSON) -> None:
    """The queues, and which of them are paused."""
    with _ledger() as conn:
        seen = overview.load(conn, load())
    if as_json:
        typer.echo(terminal.as_json(seen.model_dump(mode="json")["queues"]))
    else:
        terminal.show_pauses(seen.queues)


@queues_commands.command("pause")
def queues_pause(
    queue: str,
    reason: str = typer.Option(help="why, for those who wonder"),
    lasting: str | None = typer.Option(None, "--for", help="so long, as 90s, 30m, 2h or 1d; else until it is resumed"),
    by: str = typer.Option("", help="who says so; else the name you are logged in under"),
) -> None:
    """Start no job of QUEUE from now on, in any process; running ones finish."""
    until_s = None if lasting is None else _seconds(lasting)
    with _ledger() as conn:
        _require_queue(conn, queue)
        try:
            controls.pause(conn, queue, by=by or _login(), reason=reason, until_s=until_s)
        except controls.BadPause as fault:
            refuse(str(fault), EXIT_USAGE)
    typer.echo(f"queue {queue} is paused")


@queues_commands.command("resume")
def queues_resume(queue: str) -> None:
    """Let QUEUE go on; what is due starts at once."""
    with _ledger() as conn:
        _require_queue(conn, queue)
        resumed = controls.resume(conn, queue)
    typer.echo(f"queue {queue} goes on" if resumed else f"queue {queue} was not paused")


@app.command()
def status(as_json: bool = AS_JSON) -> None:
    """How the queues are doing: a verdict, and a line each."""
    with _ledger() as conn:
        seen = overview.load(conn, load())
    verdict = overview.judge(seen)
    if as_json:
        typer.echo(terminal.as_json({"verdict": asdict(verdict), **seen.model_dump(mode="json")}))
    else:
        terminal.show_status(seen, verdict)


@app.command("import")
def import_folder(
    folder: Path = typer.Argument(help="of Markdown files, with front matter or without"),
    collection: str = typer.Option("", help="whose documents these are; else called as the folder is"),
    delete: bool = typer.Option(False, "--delete", help="documents whose file is gone go too"),
) -> None:
    """Make the documents what the Markdown files below FOLDER say; what is as it was is left alone."""
    with _ledger():
        from actors import corpus
    console = Console(stderr=True)
    with Progress(TextColumn("importing"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        bar = progress.add_task("", total=None, visible=console.is_terminal)
        try:
            summary = corpus.import_folder(
                folder,
                collection=collection,
                delete=delete,
                tell=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        except NotADirectoryError:
            refuse(f"{folder} is not a folder", EXIT_USAGE)
        except ValueError as error:
            refuse(str(error), EXIT_USAGE)
    for skipped in summary.skipped:
        typer.echo(f"skipped {skipped.source}: {skipped.reason}", err=True)
    counts = f"{summary.added} added, {summary.changed} changed, {summary.unchanged} unchanged"
    typer.echo(f"{counts}, {summary.deleted} deleted, {len(summary.skipped)} skipped")
    if summary.skipped:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command()
def search(
    words: list[str] = typer.Argument(help="all must be there, the last perhaps as a beginning"),
    limit: int = typer.Option(20, min=1, max=100, help="so many, the best"),
) -> None:
    """Find documents that have all of WORDS."""
    with _ledger():
        from actors import corpus
    try:
        answer = corpus.search(" ".join(words), limit=limit)
    except corpus.SearchUnavailable as error:
        refuse(str(error), boot.EXIT_UNAVAILABLE)
    if answer.found:
        terminal.show_found(answer.found)
    typer.echo(f"{len(answer.found)} found by {answer.engine}")


@app.command()
def sink(
    secret: list[str] = typer.Option([], help="what may have signed: whsec_… or whpk_…; else one is made and kept"),
    port: int = typer.Option(8401, help="for webhooks"),
    smtp_port: int = typer.Option(8425, help="for mails"),
    record: Path | None = typer.Option(None, help="a file that gets each as a line of JSON"),
    delay: float = typer.Option(0, min=0, max=60, help="seconds until a webhook is answered, as if it were slow"),
) -> None:
    """Be the outside world on 127.0.0.1: take webhooks and mails, check the signatures, show what came."""
    remedy = "choose others by --port and --smtp-port"
    with (
        _listener("127.0.0.1", port, remedy) as http_at,
        _listener("127.0.0.1", smtp_port, remedy) as smtp_at,
    ):
        from actors.signing import make_shared_secret
        from web import sink as receiver

        url = f"http://127.0.0.1:{port}/"
        typer.echo(f"webhooks at {url}, mails at 127.0.0.1:{smtp_port}")
        if not secret:
            secret = [_kept(_data_dir(load()) / "sink.secret", make_shared_secret)]
            typer.echo(f"to have them sent: python cli.py endpoint add {url} --secret {secret[0]}")
        with record.open("a", encoding="utf-8") if record else contextlib.nullcontext() as lines:
            _outlive_uvicorn()
            receiver.serve(
                http_at,
                smtp_at,
                secret,
                lambda received: _show(received, receiver.line, lines),
                delay_s=delay,
            )


def _show(received: dict[str, Any], line: Callable[[dict[str, Any]], str], lines: TextIO | None) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')}  {line(received)}")
    if lines:
        print(json.dumps(received, ensure_ascii=False), file=lines, flush=True)


def main() -> None:
    """Run the command; a fault that a person can mend becomes one line and its exit code."""
    try:
        app()
    except embedded.EmbeddedError as error:
        refuse(str(error), boot.EXIT_UNAVAILABLE)
    except psycopg.OperationalError as error:
        refuse(f"the database is not available: {boot.reason(error)}", boot.EXIT_UNAVAILABLE)
    except psycopg.ProgrammingError as error:
        # The driver's words may hold a part of the URL that it could not read, the password say.
        if error.sqlstate is not None:
            raise
        refuse("DATABASE_URL cannot be read; its form is postgresql://USER:PASSWORD@HOST:PORT/DATABASE")


# --- the database of a command


def _connected() -> Settings:
    """The settings, with a database in them; exit 69 when there is none.

    With DATABASE_URL unset that is the embedded Postgres of the `up` that runs on this data folder: the
    command is then told what `up` tells its processes.
    """
    settings = load()
    if settings.database_url:
        return settings
    url = embedded.running_url(settings.data_dir)
    if url is None:
        reason = f"Posthouse does not run on {_data_dir(settings)}"
        refuse(f"{reason}: start it with `make run`, or set DATABASE_URL", boot.EXIT_UNAVAILABLE)
    return adopt(_environment(settings, url))


def _url(settings: Settings) -> str:
    return settings.database_url.get_secret_value() if settings.database_url else ""


@contextlib.contextmanager
def _ledger() -> Iterator[Conn]:
    """A connection to look at jobs with; exit 69 without a database, 78 when its schema is another."""
    with contextlib.closing(boot.reach(_url(_connected()), wait_s=0)) as conn:
        if migrations.pending(conn, migrations.steps("")):
            refuse("the schema is not this version's: run `python cli.py migrate`")
        yield conn


def _job(conn: Conn, job_id: str) -> Job:
    if (job := load_job(conn, job_id)) is None:
        refuse(f"there is no job {job_id}, or its time here is over", EXIT_INCOMPLETE)
    return job


def _require_queue(conn: Conn, name: str) -> None:
    """Exit 1 for a queue that is neither declared nor paused nor holds jobs: a slip of the pen would pause nothing."""
    known = [queue.name for queue in overview.load(conn, load()).queues]
    if name not in known:
        refuse(f"there is no queue {name}; there are {', '.join(known)}", EXIT_INCOMPLETE)


def _seconds(text: str) -> float:
    """A stretch of time as people write it; exit 2 for what is none."""
    units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
    if not re.fullmatch(r"[0-9]{1,9}[smhd]", text):
        refuse(f"--for: {text} is not a time such as 90s, 30m, 2h or 1d", EXIT_USAGE)
    return float(int(text[:-1]) * units[text[-1]])


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _data_dir(settings: Settings) -> Path:
    return settings.data_dir.expanduser().resolve()


@contextlib.contextmanager
def _database(settings: Settings, tell: Callable[[str], None]) -> Iterator[str]:
    """The URL of a database that answers; the embedded one is started for this, and stopped at the end."""
    if settings.database_url:
        boot.reach(_url(settings), settings.db_start_wait_s).close()
        yield _url(settings)
        return
    tell(f"starting Postgres on {_data_dir(settings) / 'postgres'}")
    try:
        yield embedded.start(settings.data_dir)
    finally:
        hear_no_more_signals()
        if not embedded.stop(settings.data_dir):
            tell("Postgres did not stop in time and was cut off; it recovers at its next start")


def _migrate(url: str, tell: Callable[[str], None]) -> list[str]:
    import actors  # noqa: F401 - the event types that may be recorded are declared there
    from broker import migration_steps

    try:
        applied = migrations.migrate(url, migration_steps(), lambda name: tell(f"migrating: {name}"))
    except migrations.MigrationError as error:
        refuse(str(error))
    with connect(url, name="posthouse migrate") as conn:
        events.publish_types(conn)
    return applied


def _check(settings: Settings, url: str) -> None:
    """What each worker would refuse to start for, said once and before any of them."""
    from actors import broker

    boot.check(settings, url, broker.subscriptions())


def _outlive_uvicorn() -> None:
    """When it is done uvicorn raises the signal that stopped it once more: that must not end us by it."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: None)


@contextlib.contextmanager
def _listener(host: str, port: int, remedy: str = "set WEB_HOST or WEB_PORT") -> Iterator[socket.socket]:
    """A socket that listens on *host* and *port*, before anything else is done; exit 73 when it cannot."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        refuse(f"WEB_HOST: {host} is not an address")
    with socket.socket(family, kind) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            reason = f"{host}:{port} cannot be listened on: {error.strerror}"
            refuse(f"{reason}; end what uses it, or {remedy}", EXIT_CANNOT_TAKE)
        yield listener


# --- up: what it prepares


def _programs(procfile: Path) -> dict[str, list[str]]:
    """Name and command of each process of *procfile*, programs resolved; exit 78 when it cannot be read."""
    try:
        text = procfile.read_text("utf-8")
        commands = parse_procfile(text).processes
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"{procfile} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}")
    except AssertionError:
        refuse(f"{procfile}: two processes have the same name")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or len(commands) != len(lines):
        refuse(f"{procfile}: each line must be NAME: COMMAND")
    return {name: _resolved(f"{procfile}: {name}", command) for name, command in commands.items()}


def _resolved(place: str, command: str) -> list[str]:
    """*command* in words, its program the one beside our Python, else the one on PATH."""
    try:
        program, *arguments = shlex.split(command)
    except ValueError as error:
        refuse(f"{place}: {error}")
    if program == "python":
        return [sys.executable, *arguments]
    beside_python = Path(sys.executable).parent / program
    found = str(beside_python) if beside_python.exists() else shutil.which(program)
    if found is None:
        refuse(f"{place}: there is no program {program}")
    return [found, *arguments]


@contextlib.contextmanager
def _only_here(data_dir: Path, page: str) -> Iterator[None]:
    """Hold the data folder; exit 75 when another `up` does. The lock ends with its process, in any case."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (data_dir / "up.lock").open("a+")
    except OSError as error:
        refuse(f"DATA_DIR: {data_dir} cannot be written: {error.strerror}", EXIT_CANNOT_TAKE)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            refuse(f"Posthouse already runs on {data_dir}: {file.read().strip()}", EXIT_RUNS_ALREADY)
        file.truncate(0)
        file.write(f"process {os.getpid()}, {page}")
        file.flush()
        try:
            yield
        finally:
            # Emptied, not removed: whoever opened it meanwhile would come to hold a file without a name.
            file.truncate(0)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """A signal that asks to stop ends the boot as Ctrl-C does, and is no error."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    for name in stop_signals():
        signal.signal(name, stop)
    with contextlib.suppress(KeyboardInterrupt):
        yield


def _empty(folder: Path) -> None:
    """The metric files of processes that are gone would count for ever."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)


def _environment(settings: Settings, url: str) -> dict[str, str]:
    """What processes are told beyond what we were told; what a person has set stays as it is."""
    data_dir = _data_dir(settings)
    defaults = {} if settings.database_url else _trial(data_dir)
    if sys.stdout.isatty():
        defaults["LOG_FORMAT"] = "text"
    return child_environment(
        **{name: value for name, value in defaults.items() if not is_set(name)},
        DATA_DIR=str(data_dir),
        DATABASE_URL=url,
        PROMETHEUS_MULTIPROC_DIR=str(data_dir / "metrics"),
        PYTHONUNBUFFERED="1",
    )


def _trial(data_dir: Path) -> dict[str, str]:
    """Settings for a first look on one machine, with `cli.py sink` as the outside world."""
    return {
        "OUTBOUND_ALLOW": "127.0.0.1=127.0.0.1/32:8401",
        "SMTP_URL": "smtp://127.0.0.1:8425?tls=none",
        "MAIL_FROM": "posthouse@localhost",
        "OWNER_EMAIL": "owner@localhost",
        # The embedded server gives 200, so that queues of one's own fit.
        "MAX_CONNECTIONS": "190",
        "SEAL_KEYS": _kept(data_dir / "seal.key", _seal_key),
    }


def _seal_key() -> str:
    """A new key that seals secrets at rest."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


def _kept(path: Path, make: Callable[[], str]) -> str:
    """What *make* made once and *path*, readable by us alone, keeps."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole = path.with_suffix(".new")
        whole.touch(mode=0o600)
        whole.write_text(make())
        whole.rename(path)
    return path.read_text().strip()


def _spawn(command: list[str], plan: Plan, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=plan.folder,
        env=plan.environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_end_with(os.getpid()),
    )


def _end_with(parent: int) -> Callable[[], None]:
    """For a child to call before it becomes its program: when *parent* ends, however, it is asked to stop."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it

    def ask() -> None:
        if prctl:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_INCOMPLETE)

    return ask


if __name__ == "__main__":
    main()
