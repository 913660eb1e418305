-- What holds a job back on purpose: a paused queue, a full key, an empty token bucket.

ALTER TABLE dramatiq.queue
    ADD COLUMN limit_key text COLLATE "C",
    ADD COLUMN limit_running integer,
    ADD COLUMN rate_per_s double precision,
    ADD COLUMN rate_burst integer;

-- A key alone says nothing, and nothing is limited without a key. Rows that are there have none: they need no look.
ALTER TABLE dramatiq.queue
    ADD CONSTRAINT queue_limit CHECK (
        (limit_key IS NOT NULL) = (limit_running IS NOT NULL OR rate_per_s IS NOT NULL)
        AND (rate_per_s IS NULL) = (rate_burst IS NULL)
        AND limit_key <> ''
        AND limit_running >= 1
        AND rate_burst >= 1
        AND rate_per_s > 0
        AND rate_per_s < 'infinity'
    ) NOT VALID;

-- Queues that claim nothing. A pause whose time is over is as good as none.
CREATE TABLE posthouse.pauses (
    queue_name text PRIMARY KEY,
    paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_by text NOT NULL,
    reason text NOT NULL,
    until_at timestamptz
);

-- A token bucket a key, as it was at refilled_at; from full_at on it is full, as one that is not here.
CREATE TABLE posthouse.buckets (
    key text COLLATE "C" PRIMARY KEY,
    tokens double precision NOT NULL CHECK (tokens >= 0),
    refilled_at timestamptz NOT NULL,
    full_at timestamptz NOT NULL
);

-- What is in a bucket at a time. A clock that was set back fills it, as one that was set forward does: no key waits for
-- hours for what the clock will say again.
CREATE FUNCTION posthouse.tokens(
    bucket posthouse.buckets, rate_per_s double precision, burst integer, at timestamptz
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN bucket.key IS NULL THEN burst
        ELSE least(burst, bucket.tokens + abs(extract(epoch FROM at - bucket.refilled_at)) * rate_per_s)
    END
$$;

-- What a job that was put back waits for: its domain knows, the ledger does not.
CREATE VIEW posthouse.waits AS
SELECT d.job_id, 'endpoint ' || d.endpoint_id AS waits_for
FROM posthouse.deliveries d
WHERE d.parked_at IS NOT NULL;

-- Which actors a process knows; null where an older version wrote the row and did not say.
ALTER TABLE posthouse.workers ADD COLUMN actors text[];
