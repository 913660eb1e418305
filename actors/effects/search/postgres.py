"""The full-text index inside the database: what `words` makes of a text, as tsvector and tsquery.

The literals are those of configuration `simple`; no text of a user is ever parsed as vector or query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import psycopg
from psycopg.types.json import Jsonb

from actors.effects.search import (
    Document,
    Done,
    Failed,
    Hit,
    Hits,
    Permanent,
    Receipt,
    Transient,
    Waiting,
    check_ids,
    check_page,
)
from actors.effects.search.words import TooManyWords, query, vector
from outbox.db import Conn, refuse_in_transaction, sql


class PostgresSearch:
    """See `actors.effects.search.Search`. Writes are done when the call returns."""

    engine = "postgres"

    def __init__(self, begin: Callable[[], AbstractContextManager[Conn]]) -> None:
        self._begin = begin

    def ensure(self) -> None:
        """The migrations made the table."""

    def upsert(self, documents: Sequence[Document], *, job: str = "") -> Receipt:
        refuse_in_transaction("search")
        check_ids([document.id for document in documents])
        vectors: dict[str, str] = {}
        rejected: dict[str, str] = {}
        for document in documents:
            try:
                vectors[document.id] = vector(document.title, document.tags, document.body)
            except TooManyWords as error:
                rejected[document.id] = f"too_many_words: {error}"
        if vectors:
            self._upsert_entries([document for document in documents if document.id in vectors], vectors)
        return Receipt(rejected=rejected)

    def _upsert_entries(self, documents: Sequence[Document], vectors: dict[str, str]) -> None:
        # Tags travel as JSON: unnest would flatten an array of arrays.
        given = {
            "ids": [document.id for document in documents],
            "kinds": [document.kind for document in documents],
            "langs": [document.lang for document in documents],
            "tags": [Jsonb(document.tags) for document in documents],
            "updated_at": [document.updated_at for document in documents],
            "versions": [document.version for document in documents],
            "vectors": [vectors[document.id] for document in documents],
        }
        with self._transaction() as conn:
            conn.execute(sql(__file__, "upsert_entries"), given)

    def delete(self, ids: Sequence[str], *, job: str = "") -> Receipt:
        refuse_in_transaction("search")
        check_ids(ids)
        if ids:
            with self._transaction() as conn:
                conn.execute(sql(__file__, "delete"), {"ids": list(ids)})
        return Receipt()

    def settle(self, receipt: Receipt) -> Done | Waiting | Failed:
        return Done()

    def search(
        self,
        text: str,
        *,
        limit: int = 20,
        offset: int = 0,
        kind: str | None = None,
        lang: str | None = None,
        tag: str | None = None,
    ) -> Hits:
        refuse_in_transaction("search")
        check_page(limit, offset)
        wanted = query(text)
        if not wanted:
            return Hits(self.engine)
        given = {"query": wanted, "limit": limit, "offset": offset, "kind": kind, "lang": lang, "tag": tag}
        with self._transaction() as conn:
            conn.execute(sql(__file__, "search_timeout"))
            found = conn.execute(sql(__file__, "search"), given).fetchall()
        return Hits(self.engine, tuple(Hit(row["id"], row["score"]) for row in found))

    def count(self) -> int:
        refuse_in_transaction("search")
        with self._transaction() as conn:
            row = conn.execute(sql(__file__, "count")).fetchone()
        return int(row["count"]) if row else 0

    def health(self) -> None:
        self.count()

    @contextmanager
    def _transaction(self) -> Iterator[Conn]:
        try:
            with self._begin() as conn:
                yield conn
        except psycopg.DataError as error:
            raise Permanent(f"{type(error).__name__}: {error}") from error
        except psycopg.Error as error:
            raise Transient(f"{type(error).__name__}: {error}") from error
