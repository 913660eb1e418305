"""Where it is measured: a temporary folder, in it an embedded Postgres as `make run` has it; nothing is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from psycopg import sql

from outbox import embedded
from outbox.db import connect


@dataclass(frozen=True)
class Place:
    """A *folder* to write to, and the *url* of a server."""

    folder: Path
    url: str

    def database(self, name: str) -> str:
        """The URL of an empty database; an older one of that name is gone."""
        with connect(self.url, name="bench") as conn:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix="posthouse-bench-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def server() -> Iterator[Place]:
    """An embedded Postgres in a folder of its own."""
    with folder() as made:
        data_dir = made / "data"
        try:
            yield Place(made, embedded.start(data_dir))
        finally:
            embedded.stop(data_dir)
