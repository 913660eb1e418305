"""The plans of the hot statements, as they are run, over a million ended and two hundred thousand delayed jobs (line 24).

The server itself tells the plan of each statement of each function, first with the parameters and later without them, on
sessions like those of a process: the claim loop's, the control thread's, the pool's. What a statement reads may depend on
what it handles, never on what the table holds beside that, whatever the planner was last told of the table.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from middleware import leases
from outbox import controls, explain, jobs, keeping
from outbox.db import Conn, connect
from outbox.jobs import Claim, NewJob, Settlement
from tests import emptied

shared_url = emptied.shared_url

ENDED, DELAYED = 1_000_000, 200_000
WORKER, OTHER = str(uuid.uuid4()), str(uuid.uuid4())
MESSAGE = '{"actor_name": "a", "args": [1, 2, 3], "kwargs": {}, "options": {}}'
#: A prepared statement is planned without its parameters after so many runs at most: five of the driver, five of the server.
TIMES = 12


@dataclass
class Plan:
    """What the server did for one statement."""

    text: str
    root: dict[str, Any]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(_nodes(self.root))

    @property
    def scans(self) -> list[dict[str, Any]]:
        """Where it read jobs."""
        return [node for node in self.nodes if node.get("Relation Name") == "queue" and "Scan" in node["Node Type"]]

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def blocks(self) -> int:
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])

    @property
    def rows(self) -> float:
        """The most jobs that one scan read, kept and thrown away."""
        return max((self._read(node) for node in self.scans), default=0)

    def _read(self, node: Mapping[str, Any]) -> float:
        each = node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        return float(each * node["Actual Loops"])


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _nodes(part)


class Session:
    """A connection that keeps the plans of what it runs."""

    def __init__(self, url: str, session: Mapping[str, str] = MappingProxyType({})) -> None:
        self.conn = connect(url, name="posthouse plans", session=session)
        self.plans: list[Plan] = []
        self.conn.execute("LOAD 'auto_explain'")
        for name in ("analyze", "buffers"):
            self.conn.execute(f"SET auto_explain.log_{name} = on".encode())
        self.conn.execute("SET auto_explain.log_format = json")
        self.conn.execute("SET auto_explain.log_level = notice")
        self.conn.add_notice_handler(self._told)

    def _told(self, notice: psycopg.errors.Diagnostic) -> None:
        text = notice.message_primary or ""
        if "plan:" in text:
            plan = json.loads(text.split("plan:", 1)[1])
            self.plans.append(Plan(plan["Query Text"], plan["Plan"]))

    def plans_of(self, do: Callable[[Conn], object]) -> list[Plan]:
        self.plans.clear()
        self.conn.execute("SET auto_explain.log_min_duration = 0")
        try:
            do(self.conn)
        finally:
            self.conn.execute("SET auto_explain.log_min_duration = -1")
        return [plan for plan in self.plans if "auto_explain" not in plan.text]
