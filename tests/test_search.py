"""The contract of both search engines, and what only one of them can get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.effects.search import (
    Document,
    Done,
    Failed,
    Misconfigured,
    MissingIndex,
    Permanent,
    Receipt,
    Refused,
    Search,
    Throttled,
    Transient,
    Waiting,
    document,
)
from actors.effects.search.meilisearch import MeiliSearch, classify
from actors.effects.search.postgres import PostgresSearch
from actors.effects.search.words import TooManyWords, normalise, query, snippet, vector
from outbox.db import Conn, Database, NetworkInTransaction
from tests import emptied
from tests.meili import Index, Meili, serve

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def doc(id: str, title: str = "", body: str = "", **fields: Any) -> Document:
    given: dict[str, Any] = {
        "kind": "page",
        "tags": (),
        "lang": "",
        "updated_at": NOON,
        "version": 1,
    } | fields
    return document(id, title=title, body=body, **given)


shared_url, database_url = emptied.shared_url, emptied.database_url


@pytest.fixture
def meili() -> Iterator[Meili]:
    with serve() as server:
        yield server


@pytest.fixture
def client(meili: Meili) -> MeiliSearch:
    engine = MeiliSearch(meili.url, "", "posthouse")
    engine.ensure()
    meili.log.clear()
    return engine


@pytest.fixture
def full_text(db: Database) -> PostgresSearch:
    return PostgresSearch(db.transaction)


@pytest.fixture(params=["postgres", "meilisearch"])
def engine(request: pytest.FixtureRequest) -> Search:
    name = {"postgres": "full_text", "meilisearch": "client"}[request.param]
    search: Search = request.getfixturevalue(name)
    return search


def put(search: Search, *documents: Document) -> None:
    assert settled(search, search.upsert(documents)) == Done()


def settled(search: Search, receipt: Receipt) -> Done | Failed | Waiting:
    while isinstance(outcome := search.settle(receipt), Waiting):
        pass
    return outcome


def found(search: Search, text: str, **options: Any) -> list[str]:
    return [hit.id for hit in search.search(text, **options).hits]


# --- both engines


def test_a_search_finds_what_was_put_in_and_no_more(engine: Search) -> None:
    put(engine, doc("a", "Relay horses", "Post houses changed them."), doc("b", "Other", "Nothing"))
    assert found(engine, "horses") == ["a"]
    assert found(engine, "post changed") == ["a"]
    assert found(engine, "post missing") == []
    assert found(engine, "Nothing horses") == []
    assert engine.search("horses").engine == engine.engine
    assert engine.count() == 2
    engine.health()


def test_only_the_last_word_is_a_prefix(engine: Search) -> None:
    put(engine, doc("a", "Relay horses"))
    assert found(engine, "relay hor") == ["a"]
    assert found(engine, "rel horses") == []


def test_an_upsert_replaces_the_whole_document(engine: Search) -> None:
    put(engine, doc("a", "first", "body"))
    put(engine, doc("a", "second", version=2))
    assert found(engine, "first") == found(engine, "body") == []
    assert found(engine, "second") == ["a"]
    assert engine.count() == 1


def test_a_deleted_document_is_not_found_and_unknown_ids_are_no_error(engine: Search) -> None:
    put(engine, doc("a", "word"), doc("b", "word"))
    assert settled(engine, engine.delete(["a", "unknown"])) == Done()
    assert found(engine, "word") == ["b"]


def test_a_title_hit_ranks_above_any_body_hit(engine: Search) -> None:
    put(
        engine,
        doc("body", "other", "needle " * 400, updated_at=NOON + timedelta(1)),
        doc("title", "a needle"),
    )
    assert found(engine, "needle") == ["title", "body"]


def test_filters_are_equality_and_take_any_text(engine: Search) -> None:
    odd = 'a "quoted" \\ \' thing'
    put(
        engine,
        doc("a", "word", kind="guide", lang="en", tags=("x", odd)),
        doc("b", "word", kind=odd, lang="de", tags=("y",)),
    )
    assert found(engine, "word", kind="guide") == ["a"]
    assert found(engine, "word", kind=odd) == ["b"]
    assert found(engine, "word", lang="de") == ["b"]
    assert found(engine, "word", tag=odd) == ["a"]
    assert found(engine, "word", kind="guide", tag="y") == []
    assert found(engine, "word", kind='guide" OR kind = "page') == []


def wide(text: str) -> str:
    """*text* in the full-width forms of East Asian typesetting."""
    return "".join("\u3000" if c == " " else chr(ord(c) + 0xFEE0) for c in text)


@pytest.mark.parametrize(
    ("text", "searches"),
    [
        ("Straße nach Köln", ["strasse", "STRASSE koln"]),
        ("ÉCOLE normale", ["ecole", "école"]),
        (wide("FULL width 123"), ["full width", "123"]),
        ("東京都の天気", ["東京", "天気", "京"]),
        ("Ξενοδοχείο Ёлка", ["ξενοδοχειο", "елка"]),
    ],
)
def test_case_width_and_accents_do_not_matter(engine: Search, text: str, searches: list[str]) -> None:
    put(engine, doc("a", text), doc("b", "something else"))
    assert [found(engine, search) for search in searches] == [["a"]] * len(searches)


def test_no_text_is_query_syntax(engine: Search) -> None:
    put(engine, doc("a", "plain words"))
    for text in [
        "' | !",
        ":*",
        '"',
        "\0",
        "",
        " ",
        "x" * 10_000,
        "\\",
        "a & b | !c <-> d:*",
        "\ud800",
    ]:
        assert found(engine, text) == [], text
    assert found(engine, '"plain" -words') == ["a"]


def test_a_page_of_hits_has_its_limits(engine: Search) -> None:
    put(engine, *[doc(f"d{number}", "word") for number in range(5)])
    assert len(found(engine, "word", limit=2)) == 2
    assert len(found(engine, "word", limit=100, offset=4)) == 1
    for limit, offset in ((0, 0), (101, 0), (1, -1), (1, 1_001)):
        with pytest.raises(ValueError, match="must be"):
            engine.search("word", limit=limit, offset=offset)


@pytest.mark.parametrize("id", ["", "a/b", "a?b", "a b", "ä", "x" * 512, "a\n"])
def test_an_id_the_engine_could_misread_is_refused_before_any_request(engine: Search, id: str) -> None:
    with pytest.raises(Refused, match="invalid_document_id"):
        engine.upsert([doc(id)])
    with pytest.raises(Refused, match="invalid_document_id"):
        engine.delete([id])


def test_an_empty_batch_is_done(engine: Search) -> None:
    assert engine.settle(engine.upsert([])) == engine.settle(engine.delete([])) == Done()


def test_no_engine_is_called_inside_a_transaction(engine: Search, db: Database) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.upsert([doc("a")]),
        lambda: engine.delete(["a"]),
        lambda: engine.search("a"),
        lambda: engine.count(),
        lambda: engine.health(),
    ]
    for call in calls:
        with pytest.raises(NetworkInTransaction), db.transaction():
            call()


def test_long_texts_are_cut_and_flagged() -> None:
    long = doc("a", "t" * 1_001, "b" * 200_001, tags=["g" * 101] * 101)
    assert (len(long.title), len(long.body), len(long.tags), len(long.tags[0])) == (1_000, 200_000, 100, 100)
    assert long.truncated
    assert not doc("a", "t" * 1_000, "b" * 200_000, tags=["g" * 100] * 100).truncated
    assert doc("a", "nul \0 here").title == "nul  here"


# --- words


@given(st.text(max_size=600))
def test_any_text_becomes_literals_postgres_can_read(text: str) -> None:
    assert not {*query(text)} & {"\\", "\0", "(", ")", "!", "|"}
    assert vector(text, [text], text).count("'") % 2 == 0
    assert normalise(normalise(text)) == normalise(text)
    assert "\n" not in snippet(text, text)


def test_a_body_of_too_many_words_is_halved_and_in_the_end_refused() -> None:
    many = " ".join(f"word{number}" for number in range(100_000))
    literal = vector("the title", (), many)
    assert "'word0':" in literal
    assert "'word99999':" not in literal
    with pytest.raises(TooManyWords):
        vector("", [f"{number:08}{'x' * 1000}" for number in range(2_000)], "")


def test_a_word_too_long_for_the_index_is_left_out() -> None:
    assert vector("x" * 2_047 + " short", (), "") == "'short':1A"


def test_a_snippet_shows_the_first_hit() -> None:
    text = "Lorem ipsum. " * 50 + "The NÉEDLE is here.\n\x1b[31mRed " + "dolor " * 100
    shown = snippet(text, "needl")
    assert "The NÉEDLE is here." in shown
    assert shown.startswith("…")
    assert shown.endswith("…")
    assert "\x1b" not in shown
    assert snippet("前の文。東京都の天気", "天気") == "前の文。東京都の天気"
    assert snippet("No hit at all", "zzz") == "No hit at all"


# --- PostgreSQL


def test_what_is_found_does_not_depend_on_the_databases_locale(full_text: PostgresSearch, conn: Conn) -> None:
    (locale,) = conn.execute("SELECT datcollate FROM pg_database WHERE datname = current_database()")
    put(full_text, doc("a", "ÉCOLE 東京"))
    assert (found(full_text, "école"), found(full_text, "京")) == (["a"], ["a"]), locale


def test_an_older_version_never_replaces_a_newer_one(full_text: PostgresSearch) -> None:
    put(full_text, doc("a", "newer", version=2))
    put(full_text, doc("a", "older", version=1))
    assert found(full_text, "newer") == ["a"]


def test_sixty_thousand_distinct_words_are_indexed(full_text: PostgresSearch) -> None:
    # Of four bytes a character, so that the whole would not fit into one entry.
    body = " ".join(chr(0x10480 + number % 30) * 2 + str(number) for number in range(60_000))
    put(full_text, doc("a", "long", body))
    assert found(full_text, "long") == ["a"]


def test_a_document_that_can_never_fit_is_rejected_alone(full_text: PostgresSearch) -> None:
    huge = replace(doc("b"), tags=tuple(f"{number:08}{'x' * 1_000}" for number in range(2_000)))
    receipt = full_text.upsert([doc("a", "fine"), huge])
    assert [*receipt.rejected] == ["b"]
    assert receipt.rejected["b"].startswith("too_many_words")
    assert found(full_text, "fine") == ["a"]


def test_ties_are_ordered_by_the_latest_change_then_by_id(full_text: PostgresSearch) -> None:
    later = NOON + timedelta(hours=1)
    put(full_text, doc("c", "word"), doc("a", "word"), doc("b", "word", updated_at=later))
    assert found(full_text, "word") == ["b", "a", "c"]


def test_searches_read_the_live_generation_only(full_text: PostgresSearch, conn: Conn) -> None:
    put(full_text, doc("a", "word"))
    conn.execute("UPDATE posthouse.search_state SET live_generation = 2")
    assert found(full_text, "word") == []


def test_a_database_that_is_away_is_transient(database_url: str) -> None:
    gone = Database(database_url.replace("shared_", "no_such_"), name="test", max_size=1, wait_s=0.3)
    with pytest.raises(Transient):
        PostgresSearch(gone.transaction).search("word")
    gone.close()


# --- Meilisearch


def test_ensure_makes_the_index_then_its_settings_and_then_nothing(meili: Meili) -> None:
    engine = MeiliSearch(meili.url, "", "posthouse")
    engine.ensure()
    assert [task["type"] for task in meili.tasks] == ["indexCreation", "settingsUpdate"]
    assert meili.indexes["posthouse"].primary_key == "id"
    engine.ensure()
    assert len(meili.tasks) == 2
    meili.indexes["posthouse"].settings["searchableAttributes"] = ["body", "title", "tags"]
    engine.ensure()
    assert [task["type"] for task in meili.tasks[2:]] == ["settingsUpdate"]


def test_a_failed_settings_task_is_an_error(meili: Meili) -> None:
    meili.indexes["posthouse"] = Index("id")
    meili.fail_task("invalid_settings_sortable_attributes")
    with pytest.raises(Permanent, match="invalid_settings"):
        MeiliSearch(meili.url, "", "posthouse").ensure()


def test_a_write_carries_its_job_and_its_primary_key(client: MeiliSearch, meili: Meili) -> None:
    client.upsert([doc("a", "ünï")], job="j-1")
    client.delete(["a"], job="j-2")
    added, deleted = meili.writes()
    assert added.query == {"primaryKey": ["id"], "customMetadata": ["job:j-1"]}
    assert deleted.path.endswith("/delete-batch")
    assert deleted.query == {"customMetadata": ["job:j-2"]}
    assert meili.tasks[-1]["customMetadata"] == "job:j-2"


def test_an_empty_batch_sends_nothing(client: MeiliSearch, meili: Meili) -> None:
    client.upsert([])
    client.delete([])
    client.search("' | !")
    assert meili.log == []


def test_a_task_under_way_is_waiting_and_then_done(client: MeiliSearch, meili: Meili) -> None:
    meili.auto(None)
    receipt = client.upsert([doc("a")])
    assert client.settle(receipt) == Waiting()
    meili.step()
    assert client.settle(receipt) == Done()


@pytest.mark.parametrize(
    ("code", "kind", "error"),
    [
        ("invalid_document_id", "invalid_request", Refused),
        ("max_fields_limit_exceeded", "invalid_request", Refused),
        ("index_not_found", "invalid_request", MissingIndex),
        ("index_primary_key_already_exists", "invalid_request", Misconfigured),
        ("no_space_left_on_device", "system", Transient),
        ("internal", "internal", Transient),
        ("bad_request", "invalid_request", Permanent),
    ],
)
def test_a_failed_task_is_told_by_its_code(
    client: MeiliSearch, meili: Meili, code: str, kind: str, error: type[Exception]
) -> None:
    meili.fail_task(code, kind)
    outcome = client.settle(client.upsert([doc("a")]))
    assert isinstance(outcome, Failed)
    assert (outcome.code, type(outcome.error)) == (code, error)
    assert code in str(outcome.error)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (500, "internal", Transient),
        (500, "database_size_limit_reached", Transient),
        (503, "whatever", Transient),
        (408, "timeout", Transient),
        (429, "too_many_requests", Throttled),
        (401, "missing_authorization_header", Misconfigured),
        (403, "invalid_api_key", Misconfigured),
        (413, "payload_too_large", Refused),
        (422, "io_error", Transient),
        (400, "invalid_index_uid", Permanent),
        (404, "index_not_found", MissingIndex),
        (415, "missing_content_type", Permanent),
    ],
)
def test_an_error_answer_is_told_by_its_code(
    client: MeiliSearch, meili: Meili, status: int, code: str, error: type[Exception]
) -> None:
    meili.fail_next(status, code)
    with pytest.raises(error) as raised:
        client.upsert([doc("a")])
    assert raised.type is error


def test_a_throttled_search_says_for_how_long(client: MeiliSearch, meili: Meili) -> None:
    meili.fail_next(503, "too_many_search_requests", Retry_After="7")
    with pytest.raises(Throttled) as raised:
        client.search("word")
    assert raised.value.after_s == 7


def test_broken_answers_are_transient_and_nothing_foreign_escapes(client: MeiliSearch, meili: Meili) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.upsert([doc("a")]),
        lambda: client.delete(["a"]),
        lambda: client.search("word"),
        lambda: client.settle(Receipt(1)),
        client.count,
        client.health,
        client.ensure,
    ]
    for call in calls:
        for breakage in (meili.html_200, meili.drop_connections):
            breakage()
            with pytest.raises(Transient):
                call()


def test_a_server_that_is_not_there_is_transient() -> None:
    with pytest.raises(Transient):
        MeiliSearch("http://127.0.0.1:1", "", "posthouse").upsert([doc("a")])


def test_a_redirect_is_never_followed_and_the_write_is_not_reported_as_done(client: MeiliSearch, meili: Meili) -> None:
    meili.redirect()
    for call in (lambda: client.upsert([doc("a")]), client.health, lambda: client.search("word")):
        with pytest.raises(Misconfigured, match="301"):
            call()
    assert [request.method for request in meili.log] == ["POST", "GET", "POST"]


def test_an_answer_about_another_index_is_no_success(client: MeiliSearch, meili: Meili) -> None:
    take = meili._take
    meili._take = lambda request, uid, kind, body: take(request, "another", kind, body)  # type: ignore[method-assign]
    with pytest.raises(Misconfigured, match="another kind or index"):
        client.upsert([doc("a")])


def test_the_key_is_sent_and_a_wrong_one_is_a_configuration_fault(meili: Meili) -> None:
    meili.require_key("right")
    MeiliSearch(meili.url, "right", "posthouse").ensure()
    for key in ("wrong", ""):
        with pytest.raises(Misconfigured):
            MeiliSearch(meili.url, key, "posthouse").upsert([doc("a")])


def test_proxies_and_netrc_are_not_read(
    meili: Meili, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    MeiliSearch(meili.url, "the-key", "posthouse").health()
    assert meili.log[-1].headers["authorization"] == "Bearer the-key"


def test_a_purged_task_is_to_be_posted_anew(client: MeiliSearch, meili: Meili) -> None:
    receipt = client.upsert([doc("a")])
    meili.purge_tasks()
    outcome = client.settle(receipt)
    assert isinstance(outcome, Failed)
    assert (outcome.code, type(outcome.error)) == ("task_not_found", Transient)


def test_too_much_at_once_is_refused_before_it_is_sent(client: MeiliSearch, meili: Meili) -> None:
    with pytest.raises(Refused, match="payload_too_large"):
        client.upsert([doc(f"d{number}") for number in range(501)])
    with pytest.raises(Refused, match="payload_too_large"):
        client.upsert([doc(f"d{number}", body="x" * 200_000) for number in range(45)])
    assert meili.log == []


def test_under_threads_every_request_says_what_it_carries(client: MeiliSearch, meili: Meili) -> None:
    def work(number: int) -> None:
        for turn in range(50):
            client.upsert([doc(f"t{number}-{turn}", "word")])
            client.search("word")
            client.count()
            client.delete([f"t{number}-{turn}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    posts = [request for request in meili.log if request.method == "POST"]
    assert {request.headers.get("content-type") for request in posts} == {"application/json"}
    assert len(meili.log) == 800


def test_the_error_table_prefers_the_code_to_everything() -> None:
    assert isinstance(classify("invalid_document_id", "internal", 500, ""), Refused)
    assert isinstance(classify("index_primary_key_no_candidate_found", "invalid_request", 400, ""), Misconfigured)
