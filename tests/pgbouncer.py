"""A real PgBouncer before the tests' server. Where there is none, the tests that need it are skipped (`needed`)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import psycopg
import pytest

from outbox.embedded_account import account_for
from tests.conftest import DATA_DIR
from tests.workers import until

#: What tests/pgbouncer.sh has unpacked for `make test`.
UNPACKED = Path(sys.prefix, "pgbouncer", "usr")
PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:{UNPACKED}/sbin")

needed = pytest.mark.skipif(PROGRAM is None, reason="no pgbouncer here: `make test` fetches it where Debian's apt does")

CONF = """\
[databases]
* = host={server} user=postgres
[pgbouncer]
listen_addr =
unix_socket_dir = {folder}
listen_port = 6432
auth_type = any
pool_mode = {mode}
default_pool_size = {servers}
max_client_conn = 200
query_wait_timeout = 20
log_connections = 0
log_disconnections = 0
"""


@contextmanager
def pgbouncer(url: str, *, mode: str = "transaction", servers: int = 4) -> Iterator[str]:
    """The URL of the same database through a PgBouncer of its own, which has *servers* connections for everybody."""
    account = account_for(DATA_DIR / "postgres")
    folder = Path(tempfile.mkdtemp(dir=DATA_DIR))
    os.chown(folder, account.uid, account.gid)
    (server,) = parse_qs(urlsplit(url).query)["host"]
    conf = folder / "pgbouncer.ini"
    conf.write_text(CONF.format(server=server, folder=folder, mode=mode, servers=servers))
    libraries = ":".join(map(str, UNPACKED.glob("lib/*-linux-gnu*")))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(PROGRAM), str(conf)],
            env={"LD_LIBRARY_PATH": libraries},
            stdout=log,
            stderr=log,
            **account.become,  # type: ignore[call-overload]
        )
    pooled = urlsplit(url)._replace(query=f"host={quote(str(folder), safe='')}&port=6432").geturl()
    try:
        until(lambda: _answers(pooled), 10, f"PgBouncer: {(folder / 'log').read_text()}")
        yield pooled
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(10)
        shutil.rmtree(folder)


def _answers(url: str) -> bool:
    with suppress(psycopg.OperationalError), psycopg.connect(url):
        return True
    return False
