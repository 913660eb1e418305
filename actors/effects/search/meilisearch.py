"""A Meilisearch server, by its official client with the sharp edges taken off (specs/integrations.md 2).

The client follows redirects (a write redirected as GET vanishes without an error), reads proxies and `.netrc`
from the environment, and changes its headers at every call. So each thread has its own session, which does
none of these.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import requests
from meilisearch import Client
from meilisearch._httprequests import HttpRequests
from meilisearch.config import Config
from meilisearch.errors import MeilisearchApiError, MeilisearchError
from meilisearch.index import Index
from meilisearch.models.task import Task, TaskInfo
from pydantic import ValidationError

from actors.effects.search import (
    Document,
    Done,
    Failed,
    Hit,
    Hits,
    Misconfigured,
    MissingIndex,
    Permanent,
    Receipt,
    Refused,
    Throttled,
    Transient,
    Waiting,
    check_ids,
    check_page,
)
from actors.effects.search.words import query_words
from actors.outcomes import retry_after_s
from outbox.db import refuse_in_transaction

TIMEOUT_S = 5
SEARCH_TIMEOUT_S = 2
ENSURE_WAIT_S = 10
MAX_DOCUMENTS = 500
MAX_BYTES = 8 * 1024 * 1024

PRIMARY_KEY = "id"
SETTINGS: dict[str, list[str]] = {
    "searchableAttributes": ["title", "tags", "body"],
    "filterableAttributes": ["kind", "lang", "tags"],
    "sortableAttributes": ["updated_at"],
}

_DOCUMENT_FAULTS = frozenset(
    {"invalid_document_id", "missing_document_id", "invalid_document_geo_field", "max_fields_limit_exceeded"}
)
_NEEDS_ROOM = frozenset({"no_space_left_on_device", "too_many_open_files", "io_error", "database_size_limit_reached"})
_KEY_FAULTS = frozenset({"missing_authorization_header", "invalid_api_key"})


class MeiliSearch:
    """See `actors.effects.search.Search`. May be shared by threads."""

    engine = "meilisearch"

    def __init__(self, url: str, key: str, index: str) -> None:
        self._url = url.rstrip("/")
        self._key = key or None
        self._uid = index
        self._local = threading.local()

    def ensure(self) -> None:
        refuse_in_transaction("search")
        try:
            with _mapped():
                self._index().fetch_info()
        except MissingIndex:
            # Not by `create_index`: the client would send that over a transport of its own.
            body = {"uid": self._uid, "primaryKey": PRIMARY_KEY}
            self._finish(self._write("indexCreation", lambda index: TaskInfo(**index.http.post("indexes", body))))
        with _mapped():
            current = self._index().get_settings()
            differs = [name for name, value in SETTINGS.items() if not _same(name, current[name], value)]
        if differs:
            self._finish(self._write("settingsUpdate", lambda index: index.update_settings(SETTINGS)))

    def upsert(self, documents: Sequence[Document], *, job: str = "") -> Receipt:
        refuse_in_transaction("search")
        check_ids([document.id for document in documents])
        if not documents:
            return Receipt()
        data, metadata = _serialised(documents), f"job:{job}"

        def add(index: Index) -> TaskInfo:
            return index.add_documents_json(data, PRIMARY_KEY, metadata=metadata)

        return Receipt(self._write("documentAdditionOrUpdate", add))

    def delete(self, ids: Sequence[str], *, job: str = "") -> Receipt:
        refuse_in_transaction("search")
        check_ids(ids)
        if not ids:
            return Receipt()
        # The client calls deleting by ids deprecated and wants a filter instead; the server does not.
        path = f"indexes/{self._uid}/documents/delete-batch?{urlencode({'customMetadata': f'job:{job}'})}"
        return Receipt(self._write("documentDeletion", lambda index: TaskInfo(**index.http.post(path, list(ids)))))

    def settle(self, receipt: Receipt) -> Done | Waiting | Failed:
        refuse_in_transaction("search")
        if receipt.task is None:
            return Done()
        try:
            with _mapped():
                return _of_task(self._index().get_task(receipt.task))
        except Permanent as error:
            if str(error).startswith("task_not_found"):
                return Failed("task_not_found", Transient("task_not_found: the server no longer knows it"))
            raise

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
        wanted = query_words(text)
        if not wanted:
            return Hits(self.engine)
        options = {
            "limit": limit,
            "offset": offset,
            "filter": [_equal(name, value) for name, value in _given(kind=kind, lang=lang, tags=tag)],
            "matchingStrategy": "all",
            "attributesToRetrieve": [PRIMARY_KEY],
            "showRankingScore": True,
        }
        with _mapped():
            hits = self._index(SEARCH_TIMEOUT_S).search(" ".join(wanted), options)["hits"]
            return Hits(self.engine, tuple(Hit(str(hit["id"]), float(hit["_rankingScore"])) for hit in hits))

    def count(self) -> int:
        refuse_in_transaction("search")
        with _mapped():
            return self._index().get_stats().number_of_documents

    def health(self) -> None:
        refuse_in_transaction("search")
        with _mapped():
            if self._index().http.get("health")["status"] != "available":
                raise Transient("the server is not available")

    def _write(self, kind: str, send: Callable[[Index], TaskInfo]) -> int:
        """Make a change and return its task. Only an answer of *kind* about our index says it was taken."""
        with _mapped():
            answer = send(self._index())
        if (answer.type, answer.index_uid) != (kind, self._uid):
            raise Misconfigured(f"a write was answered by a task of another kind or index, not by {kind}")
        return answer.task_uid

    def _finish(self, task: int) -> None:
        give_up = time.monotonic() + ENSURE_WAIT_S
        while isinstance(outcome := self.settle(Receipt(task)), Waiting):
            if time.monotonic() > give_up:
                raise Transient(f"the index is not ready after {ENSURE_WAIT_S} s")
            time.sleep(0.05)
        if isinstance(outcome, Failed) and outcome.code != "index_already_exists":
            raise outcome.error

    def _index(self, timeout_s: int = TIMEOUT_S) -> Index:
        """Made anew for every call, over this thread's session."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.trust_env = False
        index = Client(self._url, self._key, timeout_s).index(self._uid)
        index.http = index.task_handler.http = _Http(index.config, self._local.session)
        return index


class _Http(HttpRequests):
    """The client's transport, over a session that follows no redirect."""

    def __init__(self, config: Config, session: requests.Session) -> None:
        super().__init__(config)
        if not config.api_key:
            del self.headers["Authorization"]
        self._session = session

    def send_request(self, http_method: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        def send(url: str, **options: Any) -> requests.Response:
            answer = self._session.request(send.__name__, url, allow_redirects=False, **options)
            if 300 <= answer.status_code < 400:
                raise Misconfigured(f"the server answers {answer.status_code}: MEILI_URL must not be redirected")
            return answer

        send.__name__ = http_method.__name__
        return super().send_request(send, path, *args, **kwargs)


def _serialised(documents: Sequence[Document]) -> bytes:
    if len(documents) > MAX_DOCUMENTS:
        raise Refused(f"payload_too_large: {len(documents)} documents, at most {MAX_DOCUMENTS} are sent at once")
    try:
        data = json.dumps([_fields(document) for document in documents], allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise Refused(f"malformed_payload: {error}") from error
    if len(data) > MAX_BYTES:
        raise Refused(f"payload_too_large: {len(data):,} bytes, at most {MAX_BYTES:,} are sent at once")
    return data


def _fields(document: Document) -> dict[str, Any]:
    return {
        "id": document.id,
        "kind": document.kind,
        "title": document.title,
        "body": document.body,
        "tags": document.tags,
        "lang": document.lang,
        "updated_at": document.updated_at.timestamp(),
        "version": document.version,
        "truncated": document.truncated,
    }


def _equal(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name} = "{escaped}"'


def _given(**filters: str | None) -> list[tuple[str, str]]:
    return [(name, value) for name, value in filters.items() if value is not None]


def _same(name: str, current: list[str], wanted: list[str]) -> bool:
    # What is searched first counts first; the others are sets to the server.
    return current == wanted if name == "searchableAttributes" else set(current) == set(wanted)


def _of_task(task: Task) -> Done | Waiting | Failed:
    match task.status:
        case "succeeded":
            return Done()
        case "enqueued" | "processing":
            return Waiting()
        case "failed":
            fault = task.error or {}
            code = str(fault.get("code"))
            return Failed(code, classify(code, str(fault.get("type")), 400, f"{code}: {fault.get('message')}"))
        case status:
            return Failed(status, Transient(f"the task was {status}"))


def classify(code: str, kind: str, status: int, text: str) -> Transient | Permanent | Misconfigured:
    """What an error answer, or a task's error (*status* 400), means: by *code*, never by message (2.5)."""
    if code in _DOCUMENT_FAULTS or code == "payload_too_large" or status == 413:
        return Refused(text)
    if code == "index_not_found":
        return MissingIndex(text)
    if code in _KEY_FAULTS or code.startswith("index_primary_key_") or status in (401, 403):
        return Misconfigured(text)
    if code in _NEEDS_ROOM or kind in ("internal", "system") or status in (408, 429) or status >= 500:
        return Transient(text)
    return Permanent(text)


@contextmanager
def _mapped() -> Iterator[None]:
    """Whatever the client lets out, as one of ours."""
    try:
        yield
    except MeilisearchApiError as error:
        raise _of_answer(error) from error
    except (MeilisearchError, requests.RequestException, ValidationError) as error:
        raise Transient(f"{type(error).__name__}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Transient(f"the answer cannot be read: {type(error).__name__}: {error}") from error


def _of_answer(error: MeilisearchApiError) -> Transient | Permanent | Misconfigured:
    text = f"{error.code or error.status_code}: {str(error.message)[:500]}"
    if error.status_code == 429 or error.code == "too_many_search_requests":
        return Throttled(text, _retry_after_s(error))
    return classify(str(error.code), str(error.type), error.status_code, text)


def _retry_after_s(error: MeilisearchApiError) -> float:
    answer = getattr(error.__cause__, "response", None)
    value = answer.headers.get("Retry-After") if answer is not None else None
    return retry_after_s(value, datetime.now(UTC)) or 10
