-- Nobody can move the server's clock; so all that is stored about time moves into the past, by the same span.
WITH shift AS (
    SELECT %(seconds)s * interval '1 second' AS span
),
queue AS (
    UPDATE dramatiq.queue
    SET available_at = available_at - span,
        created_at = created_at - span,
        mtime = mtime - span,
        started_at = started_at - span,
        claimed_at = claimed_at - span,
        lease_until = lease_until - span,
        finished_at = finished_at - span,
        deadline_at = deadline_at - span,
        cancel_requested_at = cancel_requested_at - span
    FROM shift
),
attempts AS (
    UPDATE posthouse.attempts
    SET started_at = started_at - span,
        ended_at = ended_at - span
    FROM shift
),
events AS (
    UPDATE posthouse.events
    SET created_at = created_at - span,
        fanned_out_at = fanned_out_at - span,
        poisoned_at = poisoned_at - span
    FROM shift
),
workers AS (
    UPDATE posthouse.workers
    SET started_at = started_at - span,
        seen_at = seen_at - span
    FROM shift
),
pauses AS (
    UPDATE posthouse.pauses
    SET paused_at = paused_at - span,
        until_at = until_at - span
    FROM shift
),
buckets AS (
    UPDATE posthouse.buckets
    SET refilled_at = refilled_at - span,
        full_at = full_at - span
    FROM shift
),
rate_limits AS (
    UPDATE posthouse.rate_limits
    SET expires_at = expires_at - span
    FROM shift
),
endpoints AS (
    UPDATE posthouse.endpoints
    SET created_at = created_at - span,
        updated_at = updated_at - span,
        disabled_at = disabled_at - span,
        failing_since = failing_since - span,
        not_before = not_before - span,
        lease_until = lease_until - span
    FROM shift
),
deliveries AS (
    UPDATE posthouse.deliveries
    SET created_at = created_at - span,
        opened_at = opened_at - span,
        parked_at = parked_at - span,
        finished_at = finished_at - span
    FROM shift
),
delivery_attempts AS (
    UPDATE posthouse.delivery_attempts
    SET started_at = started_at - span,
        ended_at = ended_at - span,
        next_at = next_at - span
    FROM shift
),
mails AS (
    UPDATE posthouse.mails
    SET sent_at = sent_at - span
    FROM shift
),
index_state AS (
    UPDATE posthouse.index_state
    SET lease_until = lease_until - span
    FROM shift
)
SELECT
