-- What happened, written in the transaction in which it happened.

-- The declared types, as the code has them (outbox.catalogue), for those who record from SQL.
CREATE TABLE posthouse.event_types (
    name text PRIMARY KEY,
    description text NOT NULL,
    exposure text NOT NULL CHECK (exposure IN ('internal', 'webhook'))
);

CREATE TABLE posthouse.events (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    seq bigint GENERATED ALWAYS AS IDENTITY,
    type text NOT NULL CHECK (octet_length(type) BETWEEN 1 AND 128),
    subject text NOT NULL CHECK (octet_length(subject) <= 2048),
    data jsonb NOT NULL DEFAULT '{}' CHECK (octet_length(data::text) <= 32768),
    endpoint_id uuid,
    body bytea,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    fanned_out_at timestamptz,
    jobs integer NOT NULL DEFAULT 0,
    failures integer NOT NULL DEFAULT 0,
    last_error text,
    poisoned_at timestamptz
);

CREATE INDEX events_waiting ON posthouse.events (seq) WHERE fanned_out_at IS NULL AND poisoned_at IS NULL;
CREATE INDEX events_fanned_out ON posthouse.events (fanned_out_at) WHERE fanned_out_at IS NOT NULL;
CREATE INDEX events_seq ON posthouse.events (seq);

ALTER TABLE posthouse.events SET (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 1000
);

-- For applications in any language: call it in the transaction that makes the change. Returns the event's id.
CREATE FUNCTION posthouse.record_event(type text, subject text, data jsonb DEFAULT '{}') RETURNS uuid
LANGUAGE plpgsql AS $$
DECLARE
    event_id uuid;
BEGIN
    IF NOT EXISTS (SELECT FROM posthouse.event_types t WHERE t.name = record_event.type) THEN
        RAISE EXCEPTION 'event type % is not declared', record_event.type
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Declare it with outbox.catalogue.declare and run migrate.';
    END IF;
    IF jsonb_typeof(record_event.data) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'data of event % must be a JSON object', record_event.type
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(record_event.data::text) > 16384 THEN
        RAISE EXCEPTION 'data of event % has % bytes, at most 16384 are allowed',
            record_event.type, octet_length(record_event.data::text)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Record ids and small facts, not documents.';
    END IF;
    INSERT INTO posthouse.events (type, subject, data)
    VALUES (record_event.type, record_event.subject, record_event.data)
    RETURNING id INTO event_id;
    PERFORM pg_notify('posthouse_events', '');
    RETURN event_id;
END
$$;
