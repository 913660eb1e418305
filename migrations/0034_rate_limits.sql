-- Dramatiq's rate limiters and barriers: a counter a key, which counts as absent once its time is over.
CREATE TABLE posthouse.rate_limits (
    key text PRIMARY KEY,
    value bigint NOT NULL,
    expires_at timestamptz NOT NULL
);

CREATE INDEX rate_limits_expiry ON posthouse.rate_limits (expires_at);
