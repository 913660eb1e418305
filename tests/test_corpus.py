"""From a committed change to the index: leases, batches, slow tasks, documents nobody can index."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import settings
from actors import corpus, indexing
from actors.effects.search import Receipt, Search, Transient
from actors.effects.search.meilisearch import MeiliSearch
from actors.effects.search.postgres import PostgresSearch
from middleware.failures import Discard, Snooze
from outbox.db import Conn, Database
from outbox.relay import relay
from tests import emptied
from tests.meili import Meili, serve

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


@pytest.fixture(params=["postgres", "meilisearch"])
def engine(request: pytest.FixtureRequest, db: Database) -> Search:
    if request.param == "postgres":
        return PostgresSearch(db.transaction)
    search: Search = request.getfixturevalue("client")
    return search


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job gives up waiting for a task at once."""
    monkeypatch.setattr(indexing, "POLL_TOTAL_S", 0.02)


@pytest.fixture
def process(db: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The actors' own process-wide things, on the test's database."""
    monkeypatch.setattr(corpus, "transaction", db.transaction)
    corpus.engine.cache_clear()
    yield
    corpus.engine.cache_clear()


def write(conn: Conn, *ids: str, title: str = "word", visible: bool = True) -> None:
    for id in ids:
        conn.execute(
            "INSERT INTO posthouse.documents (id, title, visible) VALUES (%s, %s, %s)"
            " ON CONFLICT (id) DO UPDATE SET title = excluded.title, visible = excluded.visible",
            [id, title, visible],
        )


def remove(conn: Conn, id: str) -> None:
    conn.execute("DELETE FROM posthouse.documents WHERE id = %s", [id])


def found(search: Search, text: str) -> list[str]:
    return sorted(hit.id for hit in search.search(text, limit=100).hits)


def states(conn: Conn) -> dict[str, Any]:
    return {row["subject"]: row for row in conn.execute("SELECT * FROM posthouse.index_state")}


# --- the plain road, on both engines


def test_a_row_is_indexed_as_it_is_now(engine: Search, db: Database, conn: Conn) -> None:
    write(conn, "a", title="first")
    indexing.index(db.transaction, engine, "a")
    assert found(engine, "first") == ["a"]
    write(conn, "a", title="second")
    indexing.index(db.transaction, engine, "a")
    assert (found(engine, "first"), found(engine, "second")) == ([], ["a"])
    assert engine.count() == 1


def test_a_hidden_or_deleted_row_leaves_the_index(engine: Search, db: Database, conn: Conn) -> None:
    write(conn, "hidden", "gone")
    index_all(db, engine, "hidden", "gone")
    write(conn, "hidden", visible=False)
    remove(conn, "gone")
    index_all(db, engine, "hidden", "gone")
    assert found(engine, "word") == []
    assert [*states(conn)] == ["hidden"]
    write(conn, "hidden", "gone")
    index_all(db, engine, "hidden", "gone")
    assert found(engine, "word") == ["gone", "hidden"]


def test_no_lease_is_left_behind(engine: Search, db: Database, conn: Conn) -> None:
    write(conn, *(f"d{number}" for number in range(10)))
    indexing.index(db.transaction, engine, "d0")
    assert {state["lease_token"] for state in states(conn).values()} == {None}


def index_all(db: Database, search: Search, *subjects: str) -> None:
    for subject in subjects:
        indexing.index(db.transaction, search, subject)


# --- as one batch


def test_two_hundred_changes_are_one_post_and_each_job_finds_its_own_done(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    subjects = [f"d{number:03}" for number in range(450)]
    write(conn, *subjects)
    index_all(db, client, *subjects)
    assert client.count() == 450
    assert len(meili.writes()) == 3


def test_what_is_deleted_together_leaves_the_index_together(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    subjects = [f"d{number:03}" for number in range(300)]
    write(conn, "stays", *subjects)
    index_all(db, client, "stays", *subjects)
    meili.log.clear()
    conn.execute("DELETE FROM posthouse.documents WHERE id <> 'stays'")
    index_all(db, client, *subjects)
    assert found(client, "word") == ["stays"]
    assert len(meili.writes()) == 2
    assert [*states(conn)] == ["stays"]


def test_a_batch_takes_no_more_text_than_fits_into_one_post(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    subjects = [f"d{number:02}" for number in range(60)]
    write(conn, *subjects)
    conn.execute("UPDATE posthouse.documents SET body = repeat('x', 200000)")
    index_all(db, client, *subjects)
    assert client.count() == 60
    assert 2 <= len(meili.writes()) <= 4
    assert max(len(request.body) for request in meili.writes()) <= 8 * 1024 * 1024


def test_a_job_that_is_run_again_sends_nothing(client: MeiliSearch, meili: Meili, db: Database, conn: Conn) -> None:
    write(conn, "a")
    index_all(db, client, "a", "a", "never-existed", "a")
    assert len(meili.writes()) == 1


# --- leases


def test_a_subject_in_other_hands_is_left_for_a_second(engine: Search, db: Database, conn: Conn) -> None:
    write(conn, "a")
    lease = indexing.take(db.transaction, "a")
    assert lease is not None
    with pytest.raises(Snooze) as snoozed:
        indexing.index(db.transaction, engine, "a")
    assert 1 <= snoozed.value.seconds <= 2
    indexing.release(conn, lease.token)
    indexing.index(db.transaction, engine, "a")
    assert found(engine, "word") == ["a"]


def test_a_batch_leaves_out_what_others_hold(engine: Search, db: Database, conn: Conn) -> None:
    write(conn, "a", "b", "c")
    held = indexing.take(db.transaction, "c")
    assert held is not None
    lease = indexing.take(db.transaction, "a")
    assert lease is not None
    assert lease.subjects == ["a", "b"]


def test_a_holder_that_let_its_lease_run_out_writes_nothing_down(client: MeiliSearch, db: Database, conn: Conn) -> None:
    write(conn, "a", title="old")

    class Slow(MeiliSearch):
        def upsert(self, *args: Any, **kwargs: Any) -> Receipt:
            receipt = super().upsert(*args, **kwargs)
            conn.execute("UPDATE posthouse.index_state SET lease_until = clock_timestamp() - interval '1 second'")
            write(conn, "a", title="new")
            indexing.index(db.transaction, client, "a")
            return receipt

    slow = Slow(client._url, "", "posthouse")
    slow_version = version(conn, "a")
    indexing.index(db.transaction, slow, "a")
    assert states(conn)["a"]["indexed_version"] == version(conn, "a") > slow_version
    assert found(client, "new") == ["a"]


def version(conn: Conn, id: str) -> int:
    row = conn.execute("SELECT version FROM posthouse.documents WHERE id = %s", [id]).fetchone()
    return int(row["version"]) if row else 0


def test_a_row_that_moved_on_meanwhile_is_enqueued_once_more(client: MeiliSearch, db: Database, conn: Conn) -> None:
    write(conn, "a", "b")

    class Slow(MeiliSearch):
        def settle(self, receipt: Receipt) -> Any:
            write(conn, "a", title="moved on")
            remove(conn, "b")
            return super().settle(receipt)

    indexing.index(db.transaction, Slow(client._url, "", "posthouse"), "a")
    jobs = conn.execute("SELECT actor, message -> 'args' AS args FROM dramatiq.queue ORDER BY args").fetchall()
    assert [(job["actor"], job["args"]) for job in jobs] == [("corpus.index", ["a"]), ("corpus.index", ["b"])]
    index_all(db, client, "a", "b")
    assert (found(client, "moved"), found(client, "word")) == (["a"], [])


def test_random_changes_under_four_workers_end_with_the_index_equal_to_the_rows(
    engine: Search, db: Database, conn: Conn
) -> None:
    generator = random.Random(7)

    def work(subject: str) -> None:
        for _ in range(200):
            try:
                indexing.index(db.transaction, engine, subject)
                return
            except Snooze:
                pass

    with ThreadPoolExecutor(4) as pool:
        for turn in range(60):
            subject = generator.choice("abc")
            if generator.random() < 0.3:
                remove(conn, subject)
            else:
                write(conn, subject, title=f"turn{turn}", visible=generator.random() < 0.8)
            pool.submit(work, subject)
    index_all(db, engine, "a", "b", "c")
    rows = conn.execute("SELECT id, title FROM posthouse.documents WHERE visible").fetchall()
    assert engine.count() == len(rows)
    for row in rows:
        assert found(engine, row["title"]) == [row["id"]]


# --- tasks that take their time, or fail


@pytest.mark.usefixtures("impatient")
def test_a_paused_server_gets_one_post_and_is_asked_again_ever_later(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    write(conn, "a", "b")
    meili.auto(None)
    waits = []
    for _ in range(6):
        with pytest.raises(Snooze) as snoozed:
            indexing.index(db.transaction, client, "a")
        waits.append(snoozed.value.seconds)
    assert waits == [2, 4, 8, 16, 30, 30]
    assert len(meili.writes()) == 1
    assert {request.path for request in meili.log if "/tasks/" in request.path} == {"/tasks/2"}
    meili.step()
    index_all(db, client, "b", "a")
    assert len(meili.writes()) == 1
    assert found(client, "word") == ["a", "b"]


@pytest.mark.usefixtures("impatient")
def test_a_change_while_the_task_waits_is_indexed_after_it(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    write(conn, "a", title="old")
    meili.auto(None)
    with pytest.raises(Snooze):
        indexing.index(db.transaction, client, "a")
    write(conn, "a", title="new")
    meili.auto(0)
    indexing.index(db.transaction, client, "a")
    assert found(client, "new") == ["a"]


def test_a_task_that_fails_after_the_202_is_no_success_and_is_posted_anew(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    write(conn, "a")
    meili.fail_task("internal", "internal")
    with pytest.raises(Transient, match="internal"):
        indexing.index(db.transaction, client, "a")
    assert states(conn)["a"]["indexed_version"] is None
    indexing.index(db.transaction, client, "a")
    assert found(client, "word") == ["a"]


@pytest.mark.usefixtures("impatient")
def test_a_task_the_server_forgot_is_posted_anew(client: MeiliSearch, meili: Meili, db: Database, conn: Conn) -> None:
    write(conn, "a")
    meili.auto(None)
    with pytest.raises(Snooze):
        indexing.index(db.transaction, client, "a")
    meili.purge_tasks()
    with pytest.raises(Transient, match="task_not_found"):
        indexing.index(db.transaction, client, "a")
    meili.auto(0)
    indexing.index(db.transaction, client, "a")
    assert found(client, "word") == ["a"]


def test_a_server_that_is_down_for_three_attempts_gets_the_change_when_it_is_back(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    write(conn, "a")
    meili.drop_connections(3)
    for _ in range(3):
        with pytest.raises(Transient):
            indexing.index(db.transaction, client, "a")
    indexing.index(db.transaction, client, "a")
    assert found(client, "word") == ["a"]


def test_an_index_that_is_gone_is_made_again(client: MeiliSearch, meili: Meili, db: Database, conn: Conn) -> None:
    write(conn, "a")
    indexing.index(db.transaction, client, "a")
    meili.indexes.clear()
    remove(conn, "a")
    with pytest.raises(Transient, match="index_not_found"):
        indexing.index(db.transaction, client, "a")
    indexing.index(db.transaction, client, "a")
    assert states(conn) == {}
    assert meili.indexes["posthouse"].settings["filterableAttributes"] == ["kind", "lang", "tags"]


# --- documents nobody can index


def test_one_bad_document_among_thirty_is_rejected_alone(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    subjects = [f"d{number:02}" for number in range(30)]
    write(conn, *subjects)
    meili.bad_document("d17")
    indexing.index(db.transaction, client, "d00")
    assert found(client, "word") == [subject for subject in subjects if subject != "d17"]
    assert "max_fields_limit_exceeded" in states(conn)["d17"]["rejected"]
    with pytest.raises(Discard, match="max_fields_limit_exceeded"):
        indexing.index(db.transaction, client, "d17")
    posts = len(meili.writes())
    index_all(db, client, *(subject for subject in subjects if subject != "d17"))
    assert len(meili.writes()) == posts


def test_a_mended_document_is_no_longer_rejected(client: MeiliSearch, meili: Meili, db: Database, conn: Conn) -> None:
    write(conn, "a")
    meili.bad_document("a")
    with pytest.raises(Discard):
        indexing.index(db.transaction, client, "a")
    meili._bad_ids.clear()
    write(conn, "a", title="mended")
    indexing.index(db.transaction, client, "a")
    assert (found(client, "mended"), states(conn)["a"]["rejected"]) == (["a"], None)


def test_a_batch_too_large_for_the_server_is_halved_until_it_fits(
    client: MeiliSearch, meili: Meili, db: Database, conn: Conn
) -> None:
    write(conn, "a", "b", "c", "d")
    conn.execute("UPDATE posthouse.documents SET body = repeat('x', CASE id WHEN 'c' THEN 9000 ELSE 2000 END)")
    meili.payload_limit(5_000)
    indexing.index(db.transaction, client, "a")
    assert found(client, "word") == ["a", "b", "d"]
    assert "payload_too_large" in states(conn)["c"]["rejected"]


# --- the actor and the search


@pytest.mark.usefixtures("process")
def test_fifty_changes_of_one_document_in_one_pass_are_one_job(conn: Conn, db: Database) -> None:
    for turn in range(50):
        write(conn, "a", title=f"turn {turn}")
    relay(db.transaction, corpus.index.options["subscriptions"])
    jobs = conn.execute("SELECT actor, queue_name, message -> 'args' AS args FROM dramatiq.queue").fetchall()
    assert [(job["actor"], job["queue_name"], job["args"]) for job in jobs] == [("corpus.index", "index", ["a"])]
    corpus.index("a")
    assert [hit.title for hit in corpus.search("turn").found] == ["turn 49"]


@pytest.mark.usefixtures("process")
def test_a_wrong_key_snoozes_and_a_right_one_completes(
    conn: Conn, meili: Meili, monkeypatch: pytest.MonkeyPatch
) -> None:
    meili.require_key("right")
    write(conn, "a")
    for key, ends_well in (("wrong", False), ("right", True)):
        monkeypatch.setenv("MEILI_URL", meili.url)
        monkeypatch.setenv("MEILI_API_KEY", key)
        settings.load.cache_clear()
        if ends_well:
            corpus.index("a")
            assert corpus.search("word").engine == "meilisearch"
        else:
            with pytest.raises(Snooze) as snoozed:
                corpus.index("a")
            assert snoozed.value.seconds == 300
            with pytest.raises(corpus.SearchUnavailable):
                corpus.search("word")


@pytest.mark.usefixtures("process")
def test_a_throttling_server_is_left_alone_and_a_refusing_one_for_good(
    conn: Conn, meili: Meili, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEILI_URL", meili.url)
    settings.load.cache_clear()
    write(conn, "a")
    corpus.engine()
    meili.fail_next(429, "too_many_requests", Retry_After="17")
    with pytest.raises(Snooze) as snoozed:
        corpus.index("a")
    assert snoozed.value.seconds == 17
    meili.fail_next(400, "bad_request")
    with pytest.raises(Discard, match="bad_request"):
        corpus.index("a")


@pytest.mark.usefixtures("process")
def test_a_stale_index_never_shows_what_is_gone_or_hidden(conn: Conn, db: Database) -> None:
    write(conn, "a", "b", "c")
    index_all(db, PostgresSearch(db.transaction), "a", "b", "c")
    remove(conn, "a")
    write(conn, "b", visible=False)
    write(conn, "c", title="word as it is now")
    answer = corpus.search("word")
    assert answer.engine == "postgres"
    assert [(hit.id, hit.title) for hit in answer.found] == [("c", "word as it is now")]


@pytest.mark.usefixtures("process")
def test_a_found_document_shows_where_it_was_hit(conn: Conn) -> None:
    write(conn, "a", title="The title")
    conn.execute("UPDATE posthouse.documents SET body = repeat('lorem ', 100) || '<b>needle</b>'")
    corpus.index("a")
    (hit,) = corpus.search("need").found
    assert "<b>needle</b>" in hit.snippet
