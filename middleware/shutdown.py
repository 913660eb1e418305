"""Stopping a worker process: seven steps in one budget, counted from the signal."""

from __future__ import annotations

import time

import structlog

from middleware.time_limits import standing
from middleware.worker import EXIT_CUT, EXIT_PANIC, WorkerProcess

log = structlog.get_logger("posthouse.shutdown")

#: Jobs that are asked to stop unwind in this time, or keep running until the process ends.
INTERRUPT_S = 2.0
#: Kept at the end of the budget for the last settles and the joins.
LAST_S = 2.0
TICK_S = 0.05


def stop(process: WorkerProcess) -> int:
    """Stop *process* in order and return its exit code: 0, 75 when work was cut, 1 when a thread of ours had panicked.

    The relay first; no claim from now on, unstarted jobs back at once; running jobs get their grace, with their leases
    renewed; then they are asked to stop, and those that unwind go back uncharged; the others keep their lease and are
    rescued elsewhere; then the threads, the pools last.
    """
    began = time.monotonic()
    stop_by, grace_by = process.stop_by, process.grace_by
    log.info("shutdown.started", jobs=len(process.loop.running), budget_s=round(stop_by - began, 1))
    process.lifecycle.stop()
    process.relay.ring()
    process.loop.stop_claiming()
    while process.loop.running and time.monotonic() < grace_by and not process.hurry:
        time.sleep(TICK_S)
    for guard in standing():
        guard.release()
    process.loop.close()
    unwound_by = min(time.monotonic() + INTERRUPT_S, stop_by - LAST_S)
    while process.loop.running and time.monotonic() < unwound_by:
        time.sleep(TICK_S)
    while process.loop.unsettled and time.monotonic() < stop_by - LAST_S:
        time.sleep(TICK_S)
    cut = process.loop.running
    for claim in cut:
        log.warning("job.left_running", job_id=claim.id, queue=claim.queue)
    process.loop.forget(process.loop.held().values())
    process.control.close()
    stuck = process.lifecycle.join(max(0.5, stop_by - time.monotonic()))
    if not stuck:
        process.database.close()
    elapsed_ms = round((time.monotonic() - began) * 1000)
    if stuck:
        log.warning("shutdown.timed_out", names=stuck, elapsed_ms=elapsed_ms)
    else:
        log.info("shutdown.complete", elapsed_ms=elapsed_ms)
    if cut or stuck:
        return EXIT_CUT
    return EXIT_PANIC if process.lifecycle.panics else 0
