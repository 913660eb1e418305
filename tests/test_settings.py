"""Settings: what a person may write in the environment, and the one line they get for a mistake."""

import json

import pytest

import settings


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **told: str) -> str:
    """The one line with which *told* is refused."""
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        settings.load()
    said = capsys.readouterr()
    assert end.value.code == 78
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


def loaded(monkeypatch: pytest.MonkeyPatch, **told: str) -> settings.Settings:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return settings.load()


def test_nothing_needs_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    told = loaded(monkeypatch)
    assert told.database_url is None
    assert list(told.queues) == ["index", "notify", "webhook", "maintenance", "fetch", "tasks"]


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, DATABASE_URL="", LEASE_S="").lease_s == 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE_S", "soon"),
        ("LEASE_S", "0"),
        ("LEASE_S", "nan"),
        ("CONTROL_INTERVAL_S", "-1"),
        ("POLL_INTERVAL_S", "inf"),
        ("MAX_CONNECTIONS", "many"),
        ("MAX_CONNECTIONS", "1.5"),
        ("WEB_PORT", "65536"),
        ("DATABASE_URL", "mysql://somewhere/else"),
        ("DATABASE_LISTEN_URL", "somewhere"),
        ("MEILI_URL", "localhost:7700"),
        ("OUTBOUND_PORTS", "443,https"),
        ("LOG_FORMAT", "xml"),
        ("SHUTDOWN_GRACE_S", "-3"),
        ("WEBHOOK_ALLOW_HTTP", "perhaps"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it_and_exit_78(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    assert name in refused(monkeypatch, capsys, **{name: value})


def test_two_bad_values_are_both_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(monkeypatch, capsys, LEASE_S="soon", WEB_PORT="high")
    assert "LEASE_S" in line
    assert "WEB_PORT" in line


@pytest.mark.parametrize(
    "queues",
    [
        "{not json",
        "[]",
        '"index"',
        '{"index": 4}',
        '{"index": null}',
        '{"index": {"threads": 0}}',
        '{"index": {"threads": "many"}}',
        '{"new": {"threads": 2}}',
        '{"new": {"threads": 2, "time_limit_s": 0}}',
        '{"new": {"threads": 2, "time_limit_s": 86401}}',
        '{"new": {"threads": 2, "time_limit_s": 60, "thread": 1}}',
        '{"1st": {"threads": 2, "time_limit_s": 60}}',
        '{"": {"threads": 2, "time_limit_s": 60}}',
        json.dumps({"é" * 32: {"threads": 2, "time_limit_s": 60}}),
        json.dumps({"x" * 41: {"threads": 2, "time_limit_s": 60}}),
    ],
)
def test_bad_queues_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], queues: str
) -> None:
    assert "QUEUES" in refused(monkeypatch, capsys, QUEUES=queues)


def test_queues_change_shipped_ones_and_add_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"index": {"threads": 2}, "x" * 40: {"threads": 3, "time_limit_s": 9, "awaited": True}}
    queues = loaded(monkeypatch, QUEUES=json.dumps(given)).queues
    assert queues["index"] == settings.QueueSettings(threads=2, time_limit_s=30, awaited=True)
    assert queues["x" * 40] == settings.QueueSettings(threads=3, time_limit_s=9, awaited=True)
    assert queues["tasks"] == settings.QUEUES["tasks"]


@pytest.mark.parametrize(
    "told",
    [
        {"LEASE_S": "14", "CONTROL_INTERVAL_S": "5"},
        {"SHUTDOWN_GRACE_S": "27"},
        {"WEBHOOK_HTTP_TIMEOUT_S": "15"},
        {"WEBHOOK_TIME_LIMIT_S": "20"},
    ],
)
def test_a_combination_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: dict[str, str]
) -> None:
    assert next(iter(told)).lower() in refused(monkeypatch, capsys, **told)


def test_no_refusal_repeats_a_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(monkeypatch, capsys, DATABASE_URL="mysql://me:hunter2@db/app", LEASE_S="soon")
    assert "hunter2" not in line
    assert "hunter2" not in repr(loaded(monkeypatch, DATABASE_URL="postgresql://me:hunter2@db/app", LEASE_S="20"))
