"""The connections all declared processes may use, added up at boot against what the server gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outbox.db import Conn, sql
from settings import QueueSettings

#: Beside its actors' threads a worker process uses one for claim, settle and LISTEN, one for control, one to relay.
PER_PROCESS = 3
RELAY, SCHEDULER, WEB = 3, 1, 3


@dataclass(frozen=True)
class Line:
    name: str
    connections: int


def lines(queues: Mapping[str, QueueSettings]) -> list[Line]:
    """What each declared process set uses at most."""
    return [
        *(Line(name, queue.processes * (queue.threads + PER_PROCESS)) for name, queue in queues.items()),
        Line("relay", RELAY),
        Line("scheduler", SCHEDULER),
        Line("web", WEB),
    ]


def problem(queues: Mapping[str, QueueSettings], max_connections: int, server: int) -> str | None:
    """Why these processes must not start, with the sum as a table; None when it adds up (DESIGN.md 5).

    *server*: the connections the server can give this role.
    """
    budget = lines(queues)
    total = sum(line.connections for line in budget)
    table = "\n".join(f"  {line.name:<20}{line.connections:>6}" for line in budget) + f"\n  {'sum':<20}{total:>6}"
    if total * 2 > max_connections:
        return (
            f"the processes need {total} connections, but half of MAX_CONNECTIONS={max_connections} is "
            f"{max_connections // 2}: lower QUEUES or raise MAX_CONNECTIONS\n{table}"
        )
    if max_connections > server:
        return (
            f"MAX_CONNECTIONS={max_connections} is more than the {server} this server can give this role: "
            f"lower MAX_CONNECTIONS or raise max_connections\n{table}"
        )
    return None


def server_limit(conn: Conn) -> int:
    """Connections the server can give this role: its own, less the reserved ones, within role and database limits."""
    row = conn.execute(sql(__file__, "server_limit")).fetchone()
    return int(row["connections"]) if row else 0
