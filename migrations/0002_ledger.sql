-- dramatiq-pg's table becomes the ledger: the row is the job, from first enqueue to its end. Rows that are there stay.

ALTER TABLE dramatiq.queue
    ADD COLUMN actor text GENERATED ALWAYS AS (message ->> 'actor_name') STORED,
    ADD COLUMN priority integer NOT NULL DEFAULT 0,
    ADD COLUMN available_at timestamptz,
    ADD COLUMN created_at timestamptz,
    ADD COLUMN attempt integer NOT NULL DEFAULT 0,
    ADD COLUMN crashes integer NOT NULL DEFAULT 0,
    ADD COLUMN max_attempts integer,
    ADD COLUMN snoozed_s double precision NOT NULL DEFAULT 0,
    ADD COLUMN worker_id uuid,
    ADD COLUMN lease_token uuid,
    ADD COLUMN lease_until timestamptz,
    ADD COLUMN started_at timestamptz,
    ADD COLUMN claimed_at timestamptz,
    ADD COLUMN finished_at timestamptz,
    ADD COLUMN deadline_at timestamptz,
    ADD COLUMN cancel_requested_at timestamptz,
    ADD COLUMN cancel_requested_by text,
    ADD COLUMN cancel_reason text,
    ADD COLUMN stop_cause text,
    ADD COLUMN unique_key text,
    ADD COLUMN event_id uuid,
    ADD COLUMN progress jsonb,
    ADD COLUMN last_error text,
    ADD COLUMN waited_for boolean NOT NULL DEFAULT false;

-- The stock producer's delay, in milliseconds since 1970; null where there is none or it is not a number.
CREATE FUNCTION posthouse.eta(message jsonb) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN message #>> '{options,eta}' ~ '^[0-9]{1,14}(\.[0-9]+)?$'
            THEN to_timestamp((message #>> '{options,eta}')::double precision / 1000)
    END
$$;

-- A message as the queue without its delay suffix sees it; Dramatiq finds the consumer by the name inside.
CREATE FUNCTION posthouse.undelayed(message jsonb, queue_name text) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN jsonb_typeof(message) IS DISTINCT FROM 'object' THEN message
        WHEN jsonb_typeof(message -> 'options') = 'object'
            THEN jsonb_set(message #- '{options,eta}', '{queue_name}', to_jsonb(queue_name))
        ELSE jsonb_set(message, '{queue_name}', to_jsonb(queue_name))
    END
$$;

UPDATE dramatiq.queue
SET available_at = coalesce(posthouse.eta(message), mtime, clock_timestamp()),
    created_at = coalesce(mtime, clock_timestamp()),
    queue_name = regexp_replace(queue_name, '\.DQ$', ''),
    message = posthouse.undelayed(message, regexp_replace(queue_name, '\.DQ$', '')),
    state = coalesce(state, 'queued'),
    finished_at = CASE WHEN state IN ('done', 'rejected') THEN coalesce(mtime, clock_timestamp()) END,
    last_error = CASE WHEN state = 'rejected' THEN 'rejected before the upgrade' END,
    lease_token = CASE WHEN state = 'consumed' THEN gen_random_uuid() END,
    lease_until = CASE WHEN state = 'consumed' THEN clock_timestamp() + interval '20 seconds' END;

ALTER TABLE dramatiq.queue
    ALTER COLUMN state SET NOT NULL,
    ALTER COLUMN state SET DEFAULT 'queued',
    ALTER COLUMN available_at SET NOT NULL,
    ALTER COLUMN created_at SET NOT NULL,
    ADD CONSTRAINT queue_lease CHECK (
        (state = 'consumed') = (lease_token IS NOT NULL)
        AND (lease_token IS NULL) = (lease_until IS NULL)
    ),
    ADD CONSTRAINT queue_finished CHECK ((state IN ('done', 'rejected')) = (finished_at IS NOT NULL)),
    ADD CONSTRAINT queue_counts CHECK (attempt >= 0 AND crashes >= 0 AND max_attempts >= 1 AND snoozed_s >= 0),
    ADD CONSTRAINT queue_cancel CHECK (
        cancel_requested_at IS NOT NULL
        OR (cancel_requested_by IS NULL AND cancel_reason IS NULL)
    ),
    ADD CONSTRAINT queue_stop CHECK (
        stop_cause IS NULL
        OR (
            state = 'rejected'
            AND stop_cause IN ('cancel_requested', 'deadline_exceeded', 'superseded', 'target_deleted')
        )
    );

-- Few dead tuples and a vacuum that keeps up: every job is written three times and then deleted.
ALTER TABLE dramatiq.queue SET (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 1
);

-- A row the ledger did not write (it always sets available_at): give it what a job has. An id that is there already
-- stays as it is, so the stock producer's upsert, repeated after a lost reply, changes nothing.
CREATE FUNCTION posthouse.adopt_job() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM dramatiq.queue WHERE message_id = NEW.message_id) THEN
        RETURN NULL;
    END IF;
    NEW.available_at := coalesce(posthouse.eta(NEW.message), clock_timestamp());
    NEW.created_at := coalesce(NEW.created_at, clock_timestamp());
    NEW.queue_name := regexp_replace(NEW.queue_name, '\.DQ$', '');
    NEW.message := posthouse.undelayed(NEW.message, NEW.queue_name);
    NEW.state := coalesce(NEW.state, 'queued');
    IF NEW.state = 'consumed' THEN
        NEW.lease_token := coalesce(NEW.lease_token, gen_random_uuid());
        NEW.lease_until := coalesce(NEW.lease_until, clock_timestamp() + interval '20 seconds');
    ELSIF NEW.state IN ('done', 'rejected') THEN
        NEW.finished_at := coalesce(NEW.finished_at, NEW.mtime, clock_timestamp());
    END IF;
    IF octet_length(NEW.queue_name) <= 40 THEN
        PERFORM pg_notify('posthouse_q_' || NEW.queue_name, '');
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER queue_adopt
BEFORE INSERT ON dramatiq.queue
FOR EACH ROW WHEN (NEW.available_at IS NULL)
EXECUTE FUNCTION posthouse.adopt_job();

-- Two stock upserts of one id at once both pass queue_adopt: the second one's update is dropped here. The ledger never
-- puts a job back without moving its lease or due time, and never rewrites a waiting job's message.
CREATE FUNCTION posthouse.keep_job() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RETURN NULL;
END
$$;

CREATE TRIGGER queue_keep
BEFORE UPDATE ON dramatiq.queue
FOR EACH ROW WHEN (
    NEW.state = 'queued'
    AND NEW.available_at = OLD.available_at
    AND NEW.lease_token IS NOT DISTINCT FROM OLD.lease_token
    AND (
        OLD.state <> 'queued'
        OR NEW.queue_name <> OLD.queue_name
        OR NEW.message IS DISTINCT FROM OLD.message
    )
)
EXECUTE FUNCTION posthouse.keep_job();

-- Every attempt that did not simply succeed; a success is on the job itself.
CREATE TABLE posthouse.attempts (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id uuid NOT NULL REFERENCES dramatiq.queue (message_id) ON DELETE CASCADE,
    attempt integer NOT NULL,
    worker_id uuid,
    started_at timestamptz,
    ended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    outcome text NOT NULL CHECK (outcome IN ('failed', 'discarded', 'timed out', 'worker lost', 'cancelled')),
    error_class text,
    error text,
    traceback text
);

CREATE INDEX attempts_job ON posthouse.attempts (job_id, id);

-- The processes that work; for people and the keeper. Nothing that decides ownership reads it.
CREATE TABLE posthouse.workers (
    id uuid PRIMARY KEY,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    queues text[] NOT NULL,
    threads integer NOT NULL,
    running integer NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The six states people see.
CREATE FUNCTION posthouse.shown_state(state dramatiq.state, attempt integer, stop_cause text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE state
        WHEN 'queued' THEN CASE WHEN attempt > 0 THEN 'retryable' ELSE 'pending' END
        WHEN 'consumed' THEN 'running'
        WHEN 'done' THEN 'completed'
        ELSE CASE WHEN stop_cause IS NULL THEN 'discarded' ELSE 'cancelled' END
    END
$$;
