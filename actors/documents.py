"""A folder of Markdown as documents: what changed is written, what cannot be read is named and skipped."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from psycopg.types.json import Jsonb

from actors.markdown import Page, Unreadable, parse
from outbox import events
from outbox.db import Conn, sql

MAX_FILE_BYTES = 10 * 1024 * 1024
BATCH = 200
BATCH_BYTES = 16 * 1024 * 1024
SUFFIXES = {".md", ".markdown"}

Begin = Callable[[], AbstractContextManager[Conn]]


@dataclass(frozen=True)
class Skipped:
    """A file that did not become a document, and why."""

    source: str
    reason: str


@dataclass
class Summary:
    """What an import did, in files."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    deleted: int = 0
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class _Known:
    id: str
    sha256: str


def import_folder(
    begin: Begin,
    folder: Path,
    *,
    collection: str = "",
    delete: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Make the documents of *collection* what the Markdown files below *folder* say, 200 a transaction.

    A collection is what one folder fills, by default called as the folder is; other collections are not touched.

    Files that are as they were are left alone. At its end one event `corpus.imported` is recorded.

    *delete*: documents of the collection whose file is gone go too. *tell* hears how many files are done, of how many.
    Idempotent by the hash of each file. Raises NotADirectoryError, and ValueError for a collection with a slash.
    """
    if not folder.is_dir():
        raise NotADirectoryError(folder)
    collection = collection or _shown(folder.resolve().name)[:100] or "root"
    if "/" in collection:
        raise ValueError("a collection's name has no slash")
    summary = Summary()
    files = list(_scan(folder, summary))
    with begin() as conn:
        importing = _Import(folder, collection, summary, _known(conn, collection))
    done = 0
    for batch in _batches(folder, files):
        pages = [page for source in batch if (page := importing.read(source))]
        if pages:
            with begin() as conn:
                importing.write(conn, pages)
        done += len(batch)
        tell(done, len(files))
    with begin() as conn:
        if delete:
            there = [*files, *(skipped.source for skipped in summary.skipped)]
            summary.deleted += delete_gone(conn, collection, [f"{collection}/{source}" for source in there])
        _record(conn, collection, summary)
    return summary


class _Import:
    """One run: what the database had, which ids are taken by now."""

    def __init__(self, folder: Path, collection: str, summary: Summary, known: dict[str, _Known]) -> None:
        self._folder = folder
        self._collection = collection
        self._summary = summary
        self._known = known
        self._taken: dict[str, str] = {}

    def read(self, path: str) -> Page | None:
        """The page in the file at *path*; None when it is as it was, or when it is skipped."""
        source = f"{self._collection}/{path}"
        try:
            data = _content(self._folder / path)
            known = self._known.get(source)
            unchanged = known is not None and known.sha256 == hashlib.sha256(data).hexdigest()
            if known and unchanged:
                self._take(known.id, source)
                self._summary.unchanged += 1
                return None
            page = parse(data, source)
            self._take(page.id, source)
        except (OSError, Unreadable) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._summary.skipped.append(Skipped(path, reason))
            return None
        return page

    def _take(self, id: str, source: str) -> None:
        first = self._taken.setdefault(id, source)
        if first != source:
            raise Unreadable(f"its id {id} is that of {first} as well")

    def write(self, conn: Conn, pages: Sequence[Page]) -> None:
        """Put *pages* into the caller's transaction; a document with a new id leaves its old one behind."""
        before = {known.id for page in pages if (known := self._known.get(page.source)) and known.id != page.id}
        self._summary.deleted += delete_documents(conn, [id for id in before if id not in self._taken])
        written = upsert_documents(conn, pages)
        for page in pages:
            match written.get(page.id):
                case True:
                    self._summary.added += 1
                case False:
                    self._summary.changed += 1
                case None:
                    reason = f"document {page.id} was not imported, and stays as it is"
                    self._summary.skipped.append(Skipped(page.source.partition("/")[2], reason))


def _scan(folder: Path, summary: Summary) -> Iterator[str]:
    """Relative paths of the Markdown files, sorted. Links out of it are skipped, hidden names passed by."""
    root = folder.resolve()
    for place, folders, names in os.walk(root, onerror=lambda error: _note(summary, root, error)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if path.suffix.lower() not in SUFFIXES or name.startswith("."):
                continue
            source = path.relative_to(root).as_posix()
            if not source.isprintable() or _shown(source) != source:
                summary.skipped.append(Skipped(_shown(source), "its name is not printable UTF-8"))
            elif path.is_symlink() and not path.resolve().is_relative_to(root):
                summary.skipped.append(Skipped(source, "a link out of the folder"))
            else:
                yield source


def _note(summary: Summary, root: Path, error: OSError) -> None:
    place = _shown(os.path.relpath(error.filename or root, root))
    summary.skipped.append(Skipped(place, error.strerror or "cannot be read"))


def _shown(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name.encode("utf-8", "replace").decode())


def _batches(folder: Path, files: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for source in files:
        size += min(_size(folder / source), MAX_FILE_BYTES)
        batch.append(source)
        if len(batch) == BATCH or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _content(path: Path) -> bytes:
    """The file's bytes. Raises OSError, and Unreadable when it is none or over 10 MiB."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Unreadable("not a file")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise Unreadable(f"over {MAX_FILE_BYTES // 1024 // 1024} MiB")
    return data


def _known(conn: Conn, collection: str) -> dict[str, _Known]:
    found = conn.execute(sql(__file__, "known_sources"), {"collection": collection})
    return {row["source"]: _Known(row["id"], row["content_sha256"]) for row in found}


def upsert_documents(conn: Conn, pages: Sequence[Page]) -> dict[str, bool]:
    """Write *pages*; by id, whether it is new. A missing id is that of a document that was not imported."""
    given = {
        "ids": [page.id for page in pages],
        "sources": [page.source for page in pages],
        "hashes": [page.sha256 for page in pages],
        "kinds": [page.kind for page in pages],
        "titles": [page.title for page in pages],
        "bodies": [page.body for page in pages],
        "tags": [Jsonb(page.tags) for page in pages],
        "langs": [page.lang for page in pages],
        "visible": [page.visible for page in pages],
    }
    return {row["id"]: row["is_new"] for row in conn.execute(sql(__file__, "upsert_documents"), given)}


def delete_documents(conn: Conn, ids: Sequence[str]) -> int:
    """Delete imported documents by id; how many there were."""
    return conn.execute(sql(__file__, "delete_documents"), {"ids": ids}).rowcount if ids else 0


def delete_gone(conn: Conn, collection: str, sources: Sequence[str]) -> int:
    """Delete every document of *collection* that is not one of *sources*; how many there were."""
    return conn.execute(sql(__file__, "delete_gone"), {"collection": collection, "sources": sources}).rowcount


def _record(conn: Conn, collection: str, summary: Summary) -> None:
    counts = {
        "added": summary.added,
        "changed": summary.changed,
        "unchanged": summary.unchanged,
        "deleted": summary.deleted,
        "skipped": len(summary.skipped),
    }
    events.record(conn, "corpus.imported", collection, counts)
