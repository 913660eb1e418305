-- Where webhooks go, what was sent there, and what came of each attempt.

CREATE TABLE posthouse.endpoints (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    url text NOT NULL CHECK (octet_length(url) BETWEEN 1 AND 2048),
    description text NOT NULL DEFAULT '' CHECK (char_length(description) <= 200),
    event_types text[] NOT NULL CHECK (cardinality(event_types) BETWEEN 1 AND 50),
    headers jsonb NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(headers) = 'array' AND jsonb_array_length(headers) <= 20),
    signing text NOT NULL DEFAULT 'v1' CHECK (signing IN ('v1', 'v1a', 'both')),
    secret_sealed bytea NOT NULL,
    old_secrets jsonb NOT NULL DEFAULT '[]' CHECK (
        jsonb_typeof(old_secrets) = 'array'
        AND jsonb_array_length(old_secrets) <= 5
    ),
    public_key text CHECK (public_key LIKE 'whpk\_%'),
    enabled boolean NOT NULL DEFAULT true,
    disabled_reason text CHECK (disabled_reason IN ('manual', 'gone', 'failing')),
    disabled_at timestamptz,
    failing_since timestamptz,
    failures_in_row integer NOT NULL DEFAULT 0 CHECK (failures_in_row >= 0),
    failure_windows integer[] NOT NULL DEFAULT '{}',
    refusals_in_row integer NOT NULL DEFAULT 0 CHECK (refusals_in_row >= 0),
    not_before timestamptz,
    lease_token uuid,
    lease_until timestamptz,
    last_duration_ms double precision,
    version integer NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT endpoints_disabled CHECK (
        enabled = (disabled_reason IS NULL)
        AND enabled = (disabled_at IS NULL)
    ),
    CONSTRAINT endpoints_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL))
);

-- One event for one endpoint. The state people see is the job's; result outlives the pruned job.
CREATE TABLE posthouse.deliveries (
    id uuid PRIMARY KEY,
    endpoint_id uuid NOT NULL REFERENCES posthouse.endpoints (id) ON DELETE CASCADE,
    event_id uuid NOT NULL REFERENCES posthouse.events (id) ON DELETE RESTRICT,
    job_id uuid NOT NULL,
    trigger text NOT NULL DEFAULT 'auto' CHECK (trigger IN ('auto', 'manual', 'recover', 'test')),
    attempts integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    snoozes integer NOT NULL DEFAULT 0 CHECK (snoozes >= 0),
    result text CHECK (char_length(result) BETWEEN 1 AND 200),
    parked_at timestamptz,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (endpoint_id, event_id),
    CONSTRAINT deliveries_finished CHECK ((result IS NULL) = (finished_at IS NULL))
);

CREATE INDEX deliveries_event ON posthouse.deliveries (event_id);
CREATE INDEX deliveries_listing ON posthouse.deliveries (endpoint_id, created_at, id);
CREATE INDEX deliveries_parked ON posthouse.deliveries (endpoint_id, parked_at) WHERE parked_at IS NOT NULL;
CREATE INDEX deliveries_finished ON posthouse.deliveries (finished_at) WHERE finished_at IS NOT NULL;

-- Every request that was made, by number; the number of one that died with its process is missing.
CREATE TABLE posthouse.delivery_attempts (
    delivery_id uuid NOT NULL REFERENCES posthouse.deliveries (id) ON DELETE CASCADE,
    attempt_no integer NOT NULL CHECK (attempt_no >= 1),
    trigger text NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    status integer,
    error_class text,
    error text CHECK (char_length(error) <= 512),
    remote_ip inet,
    dns_ms double precision,
    connect_ms double precision,
    tls_ms double precision,
    first_byte_ms double precision,
    total_ms double precision,
    response_headers jsonb NOT NULL DEFAULT '{}',
    response_body text,
    outcome text NOT NULL CHECK (outcome IN ('delivered', 'retry', 'snooze', 'discard')),
    next_at timestamptz,
    charged boolean NOT NULL,
    stale boolean NOT NULL DEFAULT false,
    lease_token uuid NOT NULL,
    PRIMARY KEY (delivery_id, attempt_no)
);
