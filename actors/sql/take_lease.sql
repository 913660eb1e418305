-- One request in flight an endpoint: only a free, enabled one whose pause is over gives out its lease.
WITH taken AS (
    UPDATE posthouse.endpoints e
    SET
        lease_token = gen_random_uuid(),
        lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
    FROM posthouse.deliveries d
    JOIN posthouse.events v ON v.id = d.event_id
    WHERE d.id = %(delivery_id)s
      AND e.id = d.endpoint_id
      AND d.result IS DISTINCT FROM 'delivered'
      AND d.opened_at > clock_timestamp() - %(expiry_s)s * interval '1 second'
      AND v.body IS NOT NULL
      AND (e.enabled OR d.trigger = 'test')
      AND (e.lease_until IS NULL OR e.lease_until <= clock_timestamp())
      AND (e.not_before IS NULL OR e.not_before <= clock_timestamp())
    RETURNING
        e.id, e.lease_token, e.version, e.url, e.headers, e.secret_sealed, e.old_secrets, v.id AS event_id, v.body
)
UPDATE posthouse.deliveries d
SET
    attempts = d.attempts + 1,
    parked_at = NULL,
    result = NULL,
    finished_at = NULL
FROM taken
WHERE d.id = %(delivery_id)s
RETURNING
    d.id::text AS delivery_id,
    taken.id::text AS endpoint_id,
    taken.event_id::text,
    taken.lease_token::text AS token,
    taken.version,
    taken.url,
    taken.body,
    taken.headers,
    taken.secret_sealed,
    taken.old_secrets,
    d.trigger,
    d.attempts AS attempt_no,
    d.snoozes,
    clock_timestamp() AS now
