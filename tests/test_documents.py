"""Documents and their events; a folder of Markdown as documents."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg.sql import SQL, Identifier

from actors import corpus, documents  # noqa: F401 - corpus declares the event types
from actors.documents import Summary, import_folder
from actors.markdown import Unreadable, document_id, parse
from outbox import events
from outbox.db import Conn, Database
from tests import emptied

shared_url, database_url = emptied.shared_url, emptied.database_url


def facts(conn: Conn) -> list[tuple[str, str]]:
    """Type and subject of what was recorded, in order."""
    return [(row["type"], row["subject"]) for row in reversed(events.recent(conn, 10_000))]


def changes(conn: Conn) -> list[tuple[str, str]]:
    return [fact for fact in facts(conn) if fact[0].startswith("document.")]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def counts(summary: Summary) -> tuple[int, int, int, int, int]:
    return (
        summary.added,
        summary.changed,
        summary.unchanged,
        summary.deleted,
        len(summary.skipped),
    )


# --- the table


def test_each_change_of_a_document_records_its_event_with_id_and_version(conn: Conn) -> None:
    conn.execute("INSERT INTO posthouse.documents (id, title) VALUES ('a', 'one')")
    conn.execute("UPDATE posthouse.documents SET title = 'two' WHERE id = 'a'")
    conn.execute("DELETE FROM posthouse.documents WHERE id = 'a'")
    assert facts(conn) == [("document.created", "a"), ("document.updated", "a"), ("document.deleted", "a")]
    created, updated, deleted = [row["data"] for row in reversed(events.recent(conn))]
    assert {*created} == {"id", "version"}
    assert created["version"] < updated["version"] == deleted["version"]


def test_every_watched_column_raises_the_version(conn: Conn) -> None:
    conn.execute("INSERT INTO posthouse.documents (id) VALUES ('a')")
    for column, value in {
        "title": "x",
        "body": "x",
        "kind": "x",
        "tags": ["x"],
        "lang": "x",
        "visible": False,
    }.items():
        before = row(conn, "a")
        update(conn, column, value)
        after = row(conn, "a")
        assert after["version"] > before["version"], column
        assert after["updated_at"] > before["updated_at"], column
    assert changes(conn) == [("document.created", "a"), *[("document.updated", "a")] * 6]


def test_a_touch_of_anything_else_emits_nothing_and_keeps_the_version(conn: Conn) -> None:
    conn.execute("INSERT INTO posthouse.documents (id, title) VALUES ('a', 'one')")
    before = row(conn, "a")["version"]
    touches = {
        "updated_at": datetime.now(UTC),
        "source": "a.md",
        "content_sha256": "x",
        "title": "one",
        "version": 99,
    }
    for column, value in touches.items():
        update(conn, column, value)
        assert row(conn, "a")["version"] == before, column
    assert changes(conn) == [("document.created", "a")]


def update(conn: Conn, column: str, value: object) -> None:
    statement = SQL("UPDATE posthouse.documents SET {} = %s").format(Identifier(column))
    conn.execute(statement, [value])


def test_a_rolled_back_change_leaves_no_event(conn: Conn) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("INSERT INTO posthouse.documents (id) VALUES ('a')")
        assert len(facts(conn)) == 1
    assert facts(conn) == []


def test_a_document_made_anew_never_gets_an_old_version(conn: Conn) -> None:
    conn.execute("INSERT INTO posthouse.documents (id) VALUES ('a')")
    first = row(conn, "a")["version"]
    conn.execute("DELETE FROM posthouse.documents")
    conn.execute("INSERT INTO posthouse.documents (id, version) VALUES ('a', 1)")
    assert row(conn, "a")["version"] > first


def row(conn: Conn, id: str) -> dict[str, Any]:
    found = conn.execute("SELECT * FROM posthouse.documents WHERE id = %s", [id]).fetchone()
    assert found is not None
    return found


# --- one file


def test_front_matter_becomes_the_columns() -> None:
    front = "id: guide-1\ntitle: A  Guide\nkind: guide\ntags: [one, 2, one]\nlang: en\nvisible: false"
    page = parse(f"---\n{front}\n---\n# Not this\n".encode(), "a/guide.md")
    assert (page.id, page.title, page.kind, page.tags) == ("guide-1", "A Guide", "guide", ("one", "2"))
    assert (page.lang, page.visible, page.body) == ("en", False, "# Not this\n")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# A heading #\ntext", "A heading"),
        ("text\n\n# Later\n", "Later"),
        ("## Second level\n", "the-name"),
        ("```\n# a comment\n```\n# The heading\n", "The heading"),
        ("```\n# never closed\n", "the-name"),
        ("#hashtag", "the-name"),
        ("", "the-name"),
        ("\ufeff# After a byte order mark\r\n", "After a byte order mark"),
        ("---\n---\n# Empty front matter\n", "Empty front matter"),
        ("---\ntitle: 2024\n---\n", "2024"),
        ("---\ntitle: |\n  two\n  lines\n---\n", "two lines"),
    ],
)
def test_the_title_is_the_front_matters_or_the_first_headings_or_the_files(text: str, title: str) -> None:
    assert parse(text.encode(), "folder/the-name.md").title == title


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("---\ntitle: x\n", "does not end"),
        ("---\ntitle: [x\n---\n", "not YAML"),
        ("---\n- a\n- b\n---\n", "not a list of names"),
        ("---\njust words\n---\n", "not a list of names"),
        ("---\ntitle: [a, b]\n---\n", "title must be text"),
        ("---\ntags: {a: b}\n---\n", "tags must be"),
        ("---\nvisible: perhaps\n---\n", "visible must be"),
        ("---\ndate: 2024-13-45\n---\n", "not YAML"),
        ("---\na: !!python/object/apply:os.system [x]\n---\n", "not YAML"),
        ("---\na: " + "[" * 30_000 + "]" * 30_000 + "\n---\n", "not YAML"),
        ("---\n" + "- " * 30_000 + "x\n---\n", "not YAML"),
        ("---\na: " + "x" * 70_000 + "\n---\n", "longer than"),
    ],
)
def test_broken_front_matter_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        parse(text.encode(), "a.md")


def test_what_postgres_cannot_store_is_replaced() -> None:
    page = parse(b'---\ntitle: "a\\0b"\n---\nnul \0 here', "a.md")
    assert (page.title, page.body) == ("ab", "nul  here")


def test_an_id_is_taken_as_it_is_or_hashed() -> None:
    assert document_id("Guide_1-a") == "Guide_1-a"
    assert document_id("a.md") == hashlib.sha256(b"a.md").hexdigest()
    assert document_id("x" * 512) != "x" * 512


# --- a folder


def test_an_import_reads_the_folder_and_a_second_one_changes_nothing(tmp_path: Path, db: Database, conn: Conn) -> None:
    write(tmp_path, "a.md", "# Alpha\ntext")
    write(tmp_path, "deep/b.MD", "---\nid: bee\n---\nBody")
    write(tmp_path, "c.txt", "not this")
    write(tmp_path, ".hidden/d.md", "nor this")
    assert counts(import_folder(db.transaction, tmp_path)) == (2, 0, 0, 0, 0)
    assert row(conn, "bee")["source"] == f"{tmp_path.name}/deep/b.MD"
    assert row(conn, document_id(f"{tmp_path.name}/a.md"))["title"] == "Alpha"
    before = changes(conn)
    assert counts(import_folder(db.transaction, tmp_path)) == (0, 0, 2, 0, 0)
    assert changes(conn) == before


def test_only_what_changed_is_written_again(tmp_path: Path, db: Database, conn: Conn) -> None:
    write(tmp_path, "a.md", "# Alpha")
    write(tmp_path, "b.md", "# Beta")
    import_folder(db.transaction, tmp_path)
    write(tmp_path, "a.md", "# Alpha, again")
    assert counts(import_folder(db.transaction, tmp_path)) == (0, 1, 1, 0, 0)
    assert changes(conn)[2:] == [("document.updated", document_id(f"{tmp_path.name}/a.md"))]


def test_what_is_gone_is_deleted_only_when_asked(tmp_path: Path, db: Database, conn: Conn) -> None:
    conn.execute("INSERT INTO posthouse.documents (id) VALUES ('not-imported')")
    gone = write(tmp_path, "a.md", "---\nid: a\n---\n")
    write(tmp_path, "b.md", "---\nid: b\n---\n")
    import_folder(db.transaction, tmp_path)
    gone.unlink()
    assert counts(import_folder(db.transaction, tmp_path)) == (0, 0, 1, 0, 0)
    assert counts(import_folder(db.transaction, tmp_path, delete=True)) == (0, 0, 1, 1, 0)
    assert ids(conn) == ["b", "not-imported"]


def test_two_folders_with_the_same_file_names_keep_out_of_each_others_way(
    tmp_path: Path, db: Database, conn: Conn
) -> None:
    write(tmp_path, "one/readme.md", "# One")
    write(tmp_path, "two/readme.md", "# Two")
    import_folder(db.transaction, tmp_path / "one")
    assert counts(import_folder(db.transaction, tmp_path / "two", delete=True)) == (1, 0, 0, 0, 0)
    assert counts(import_folder(db.transaction, tmp_path / "one", collection="two", delete=True)) == (0, 1, 0, 0, 0)
    assert len(ids(conn)) == 2


def test_bad_files_are_named_and_the_rest_is_imported(tmp_path: Path, db: Database, conn: Conn) -> None:
    outside = write(tmp_path, "outside/secret.md", "secret")
    folder = tmp_path / "folder"
    write(folder, "good.md", "---\nid: good\n---\n")
    (folder / "latin1.md").write_bytes("caf\xe9".encode("latin-1"))
    write(folder, "broken.md", "---\ntitle: [\n---\n")
    write(folder, "large.md", "x" * (10 * 1024 * 1024 + 1))
    write(folder, "largest.md", "---\nid: largest\n---\n" + "x" * (10 * 1024 * 1024 - 20))
    (folder / "link.md").symlink_to(outside)
    (folder / "dangling.md").symlink_to(folder / "nothing.md")
    (folder / "linked").symlink_to(outside.parent, target_is_directory=True)
    os.mkfifo(folder / "pipe.md")
    summary = import_folder(db.transaction, folder)
    assert counts(summary) == (2, 0, 0, 0, 6)
    assert {skipped.source: skipped.reason for skipped in summary.skipped} == {
        "latin1.md": "not UTF-8 (byte 3)",
        "broken.md": "front matter is not YAML: did not find expected node content (line 3)",
        "large.md": "over 10 MiB",
        "link.md": "a link out of the folder",
        "dangling.md": "No such file or directory",
        "pipe.md": "not a file",
    }
    assert ids(conn) == ["good", "largest"]


def test_a_file_that_broke_keeps_its_document(tmp_path: Path, db: Database, conn: Conn) -> None:
    write(tmp_path, "a.md", "---\nid: a\n---\n")
    import_folder(db.transaction, tmp_path)
    write(tmp_path, "a.md", "---\nid: [\n---\n")
    assert counts(import_folder(db.transaction, tmp_path, delete=True)) == (0, 0, 0, 0, 1)
    assert ids(conn) == ["a"]


def test_a_renamed_file_with_an_id_stays_the_same_document(tmp_path: Path, db: Database, conn: Conn) -> None:
    old = write(tmp_path, "old.md", "---\nid: a\n---\n# The title")
    import_folder(db.transaction, tmp_path)
    old.rename(tmp_path / "new.md")
    import_folder(db.transaction, tmp_path, delete=True)
    assert row(conn, "a")["source"] == f"{tmp_path.name}/new.md"
    assert changes(conn) == [("document.created", "a")]


def test_a_file_with_a_new_id_leaves_no_second_document(tmp_path: Path, db: Database, conn: Conn) -> None:
    write(tmp_path, "a.md", "---\nid: first\n---\n")
    import_folder(db.transaction, tmp_path)
    write(tmp_path, "a.md", "---\nid: second\n---\n")
    assert counts(import_folder(db.transaction, tmp_path)) == (1, 0, 0, 1, 0)
    assert ids(conn) == ["second"]


def test_one_id_in_two_files_is_the_first_ones(tmp_path: Path, db: Database, conn: Conn) -> None:
    write(tmp_path, "a.md", "---\nid: same\ntitle: A\n---\n")
    write(tmp_path, "b.md", "---\nid: same\ntitle: B\n---\n")
    summary = import_folder(db.transaction, tmp_path)
    assert [(skipped.source, skipped.reason) for skipped in summary.skipped] == [
        ("b.md", f"its id same is that of {tmp_path.name}/a.md as well")
    ]
    assert row(conn, "same")["title"] == "A"


def test_a_document_of_the_applications_own_is_not_overwritten(tmp_path: Path, db: Database, conn: Conn) -> None:
    conn.execute("INSERT INTO posthouse.documents (id, title) VALUES ('mine', 'the original')")
    write(tmp_path, "a.md", "---\nid: mine\n---\n")
    summary = import_folder(db.transaction, tmp_path, delete=True)
    assert counts(summary) == (0, 0, 0, 0, 1)
    assert row(conn, "mine")["title"] == "the original"


def test_an_import_ends_with_one_event_that_counts(tmp_path: Path, db: Database, conn: Conn) -> None:
    write(tmp_path, "a.md", "# A")
    write(tmp_path, "b.md", "---\n")
    import_folder(db.transaction, tmp_path)
    (last, *_) = events.recent(conn)
    assert (last["type"], last["subject"]) == ("corpus.imported", tmp_path.name)
    assert json.dumps(last["data"], sort_keys=True) == (
        '{"added": 1, "changed": 0, "deleted": 0, "skipped": 1, "unchanged": 0}'
    )


def test_an_import_tells_how_far_it_is_and_commits_as_it_goes(
    tmp_path: Path, db: Database, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "BATCH", 2)
    for number in range(5):
        write(tmp_path, f"{number}.md", f"# {number}")
    told: list[tuple[int, int]] = []
    import_folder(db.transaction, tmp_path, tell=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]
    assert len(changes(conn)) == 5


def test_a_folder_that_is_none_is_refused(tmp_path: Path, db: Database) -> None:
    with pytest.raises(NotADirectoryError):
        import_folder(db.transaction, tmp_path / "nowhere")


def ids(conn: Conn) -> list[str]:
    return [found["id"] for found in conn.execute("SELECT id FROM posthouse.documents ORDER BY id")]
