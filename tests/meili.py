"""A stand-in for a Meilisearch server: real HTTP on loopback, faithful where Posthouse depends on it.

Tasks are strictly first in first out, a bad document fails its whole task, additions create the index, work
on an index that is missing is taken and fails later. Controls make it slow, forgetful and broken
(specs/integrations.md 3).
"""

from __future__ import annotations

import json
import re
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
ID = re.compile(r"[A-Za-z0-9_-]{1,511}")
DEFAULTS: Json = {
    "searchableAttributes": ["*"],
    "displayedAttributes": ["*"],
    "filterableAttributes": [],
    "sortableAttributes": [],
}


class Fault(Exception):
    """An error answer, or the error of a task."""

    def __init__(self, status: int, code: str, kind: str = "invalid_request") -> None:
        super().__init__(code)
        self.status = status
        self.body = {
            "message": f"says the stand-in: {code}",
            "code": code,
            "type": kind,
            "link": "https://x/y",
        }


@dataclass
class Index:
    primary_key: str | None
    settings: Json = field(default_factory=lambda: dict(DEFAULTS))
    documents: dict[str, Json] = field(default_factory=dict)


@dataclass
class Request:
    """What came in, for the tests to look at."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class Meili:
    """The server's memory and its controls."""

    def __init__(self) -> None:
        self.url = ""
        self.log: list[Request] = []
        self.indexes: dict[str, Index] = {}
        self.tasks: list[Json] = []
        self.lock = threading.RLock()
        self._work: dict[int, Any] = {}
        self._delay_s: float | None = 0.0
        self._faults: list[tuple[int, str, dict[str, str]]] = []
        self._task_faults: list[tuple[str, str]] = []
        self._bad_ids: set[str] = set()
        self._drops = 0
        self._html = 0
        self._key: str | None = None
        self._limit = 100 * 1024 * 1024
        self._redirects = False

    # Controls.

    def auto(self, delay_s: float | None = 0.0) -> None:
        """Tasks end *delay_s* after they came; None: only `step` ends them."""
        self._delay_s = delay_s

    def step(self, count: int = 1_000_000) -> None:
        with self.lock:
            for task in [task for task in self.tasks if task["status"] == "enqueued"][:count]:
                self._process(task)

    def fail_next(self, status: int, code: str, times: int = 1, **headers: str) -> None:
        self._faults += [(status, code, headers)] * times

    def fail_task(self, code: str, kind: str = "invalid_request") -> None:
        self._task_faults.append((code, kind))

    def bad_document(self, id: str) -> None:
        self._bad_ids.add(id)

    def drop_connections(self, times: int = 1) -> None:
        self._drops = times

    def html_200(self, times: int = 1) -> None:
        self._html = times

    def redirect(self, on: bool = True) -> None:
        self._redirects = on

    def require_key(self, key: str | None) -> None:
        self._key = key

    def payload_limit(self, size: int) -> None:
        self._limit = size

    def purge_tasks(self) -> None:
        with self.lock:
            for task in self.tasks:
                task["purged"] = True

    def writes(self) -> list[Request]:
        """Documents posted or deleted."""
        return [request for request in self.log if "/documents" in request.path]

    # Answers.

    def answer(self, request: Request) -> tuple[int, Any, dict[str, str]]:
        with self.lock:
            self.log.append(request)
            self._catch_up()
            if self._redirects:
                return 301, "", {"Location": f"{self.url}{request.path}?moved=1"}
            if self._faults:
                status, code, headers = self._faults.pop(0)
                kind = "internal" if status >= 500 else "invalid_request"
                return status, Fault(status, code, kind).body, headers
            if self._html:
                self._html -= 1
                return 200, "<html>a portal</html>", {"Content-Type": "text/html"}
            try:
                self._check(request)
                return *self._route(request), {}
            except Fault as fault:
                headers = {"Retry-After": "10"} if fault.status == 503 else {}
                return fault.status, fault.body, headers

    def dropped(self) -> bool:
        with self.lock:
            self._drops -= 1
            return self._drops >= 0

    def _check(self, request: Request) -> None:
        given = request.headers.get("authorization")
        if self._key is not None and request.path != "/health":
            if given is None:
                raise Fault(401, "missing_authorization_header", "auth")
            if given != f"Bearer {self._key}":
                raise Fault(403, "invalid_api_key", "auth")
        if request.method in ("POST", "PATCH", "PUT"):
            if "content-type" not in request.headers:
                raise Fault(415, "missing_content_type")
            if request.headers["content-type"] != "application/json":
                raise Fault(415, "invalid_content_type")
            if not request.body:
                raise Fault(400, "missing_payload")
        if len(request.body) > self._limit:
            raise Fault(413, "payload_too_large")

    def _route(self, request: Request) -> tuple[int, Any]:
        match [request.method, *request.path.strip("/").split("/")]:
            case ["GET", "health"]:
                return 200, {"status": "available"}
            case ["POST", "indexes"]:
                body = _parsed(request)
                return self._take(request, body["uid"], "indexCreation", body)
            case ["GET", "tasks", uid]:
                return 200, self._task(int(uid))
            case [_, "indexes", uid, *what]:
                return self._route_index(request, uid, [request.method, *what])
            case _:
                raise Fault(404, "not_found")

    def _route_index(self, request: Request, uid: str, what: list[str]) -> tuple[int, Any]:
        match what:
            case ["GET"]:
                index = self._index(uid)
                now = _now()
                return 200, {"uid": uid, "createdAt": now, "updatedAt": now, "primaryKey": index.primary_key}
            case ["DELETE"]:
                return self._take(request, uid, "indexDeletion", None)
            case ["GET", "settings"]:
                return 200, self._index(uid).settings
            case ["PATCH", "settings"]:
                return self._take(request, uid, "settingsUpdate", _parsed(request))
            case ["GET", "stats"]:
                documents = self._index(uid).documents
                return 200, {
                    "numberOfDocuments": len(documents),
                    "isIndexing": False,
                    "fieldDistribution": {},
                }
            case ["GET", "documents"]:
                found = list(self._index(uid).documents.values())
                return 200, {"results": found, "offset": 0, "limit": 20, "total": len(found)}
            case ["POST", "documents"]:
                return self._take(request, uid, "documentAdditionOrUpdate", _parsed(request))
            case ["POST", "documents", "delete-batch"]:
                return self._take(request, uid, "documentDeletion", _parsed(request))
            case ["POST", "search"]:
                return 200, self._search(self._index(uid), _parsed(request))
            case _:
                raise Fault(404, "not_found")

    def _index(self, uid: str) -> Index:
        if uid not in self.indexes:
            raise Fault(404, "index_not_found")
        return self.indexes[uid]

    def _task(self, uid: int) -> Json:
        if uid >= len(self.tasks) or self.tasks[uid].get("purged"):
            raise Fault(404, "task_not_found")
        return {key: value for key, value in self.tasks[uid].items() if key != "came"}

    # Tasks.

    def _take(self, request: Request, uid: str, kind: str, body: Any) -> tuple[int, Json]:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,400}", uid):
            raise Fault(400, "invalid_index_uid")
        task: Json = {
            "uid": len(self.tasks),
            "indexUid": uid,
            "status": "enqueued",
            "type": kind,
            "details": None,
            "error": None,
            "canceledBy": None,
            "duration": None,
            "enqueuedAt": _now(),
            "startedAt": None,
            "finishedAt": None,
            "came": time.monotonic(),
        }
        metadata = request.query.get("customMetadata")
        named = {"customMetadata": metadata[0]} if metadata else {}
        self.tasks.append(task | named)
        self._work[task["uid"]] = (body, request.query.get("primaryKey", [None])[0])
        brief = {key: task[key] for key in ("indexUid", "status", "type", "enqueuedAt")}
        return 202, {"taskUid": task["uid"], **brief, **named}

    def _catch_up(self) -> None:
        if self._delay_s is not None:
            due = time.monotonic() - self._delay_s
            for task in self.tasks:
                if task["status"] == "enqueued" and task["came"] <= due:
                    self._process(task)

    def _process(self, task: Json) -> None:
        task["startedAt"] = task["finishedAt"] = _now()
        task["duration"] = "PT0.1S"
        body, primary_key = self._work[task["uid"]]
        try:
            if self._task_faults:
                code, kind = self._task_faults.pop(0)
                raise Fault(400, code, kind)
            task["details"] = self._apply(task["indexUid"], task["type"], body, primary_key)
            task["status"] = "succeeded"
        except Fault as fault:
            task["status"], task["error"] = "failed", fault.body

    def _apply(self, uid: str, kind: str, body: Any, primary_key: str | None) -> Json:
        match kind:
            case "indexCreation":
                if uid in self.indexes:
                    raise Fault(409, "index_already_exists")
                self.indexes[uid] = Index(body.get("primaryKey"))
                return {"primaryKey": body.get("primaryKey")}
            case "settingsUpdate":
                index = self.indexes.setdefault(uid, Index(None))
                index.settings = index.settings | body
                return dict(body)
            case "documentAdditionOrUpdate":
                return self._add(uid, body, primary_key)
            case "documentDeletion":
                documents = self._index(uid).documents
                gone = [documents.pop(id) for id in body if id in documents]
                return {"providedIds": len(body), "deletedDocuments": len(gone), "originalFilter": None}
            case _:
                self._index(uid)
                del self.indexes[uid]
                return {}

    def _add(self, uid: str, body: list[Json], primary_key: str | None) -> Json:
        index = self.indexes.setdefault(uid, Index(primary_key))
        key = index.primary_key = index.primary_key or primary_key
        if key is None:
            raise Fault(400, "index_primary_key_no_candidate_found")
        for document in body:
            if key not in document:
                raise Fault(400, "missing_document_id")
            if not ID.fullmatch(str(document[key])):
                raise Fault(400, "invalid_document_id")
            if document[key] in self._bad_ids:
                raise Fault(400, "max_fields_limit_exceeded")
        index.documents |= {document[key]: document for document in body}
        return {"receivedDocuments": len(body), "indexedDocuments": len(body)}

    # Searches.

    def _search(self, index: Index, body: Json) -> Json:
        if body.get("matchingStrategy") != "all":
            raise Fault(400, "bad_request")
        allowed = set(index.settings["filterableAttributes"])
        wanted = _plain(body["q"]).split()
        scored = [
            (_score(document, wanted), document)
            for document in index.documents.values()
            if all(_passes(document, text, allowed) for text in body.get("filter") or [])
        ]
        found = sorted((pair for pair in scored if pair[0]), key=lambda pair: -pair[0])
        page = found[body["offset"] : body["offset"] + body["limit"]]
        hits = [{"id": document["id"], "_rankingScore": score} for score, document in page]
        return {"hits": hits, "query": body["q"], "limit": body["limit"], "offset": body["offset"]}


def _passes(document: Json, text: str, allowed: set[str]) -> bool:
    parts = re.fullmatch(r'(\w+) = "((?:[^"\\]|\\.)*)"', text)
    if parts is None or parts[1] not in allowed:
        raise Fault(400, "invalid_search_filter")
    value = re.sub(r"\\(.)", r"\1", parts[2])
    held = document[parts[1]]
    return value in held if isinstance(held, list) else value == held


def _score(document: Json, wanted: list[str]) -> float:
    title, rest = _plain(document["title"]), _plain(" ".join([*document["tags"], document["body"]]))
    scores = [
        1.0 if _has(title, word, is_last) else 0.1 if _has(rest, word, is_last) else 0.0
        for word, is_last in ((word, word is wanted[-1]) for word in wanted)
    ]
    return min(scores, default=0.0)


def _has(text: str, word: str, is_prefix: bool) -> bool:
    if word > "\u3000":
        return word in text
    return any(found.startswith(word) if is_prefix else found == word for found in re.findall(r"\w+", text))


def _plain(text: str) -> str:
    apart = unicodedata.normalize("NFKD", text.casefold())
    return unicodedata.normalize("NFKC", "".join(c for c in apart if not unicodedata.combining(c)))


def _parsed(request: Request) -> Any:
    try:
        return json.loads(request.body, parse_constant=lambda name: _refuse(name))
    except ValueError:
        raise Fault(400, "malformed_payload") from None


def _refuse(name: str) -> None:
    raise ValueError(name)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@contextmanager
def serve() -> Iterator[Meili]:
    """A server on a free port of loopback."""
    meili = Meili()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, parts.path, parse_qs(parts.query), headers, body)
            if meili.dropped():
                self.close_connection = True
                return
            status, answer, more = meili.answer(request)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in ({"Content-Type": "application/json"} | more).items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    meili.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield meili
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
