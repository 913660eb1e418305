-- Why the lease was not given: what take_lease asks for, one by one.
SELECT
    d.result IS NOT DISTINCT FROM 'delivered' AS delivered,
    d.opened_at <= clock_timestamp() - %(expiry_s)s * interval '1 second' AS expired,
    e.enabled OR d.trigger = 'test' AS enabled,
    v.body IS NOT NULL AS has_body,
    coalesce(extract(epoch FROM e.not_before - clock_timestamp())::double precision, 0) AS wait_s,
    (
        SELECT count(*)
        FROM posthouse.deliveries other
        WHERE other.endpoint_id = e.id
          AND other.parked_at IS NOT NULL
          AND other.id <> d.id
    ) AS parked
FROM posthouse.deliveries d
JOIN posthouse.endpoints e ON e.id = d.endpoint_id
JOIN posthouse.events v ON v.id = d.event_id
WHERE d.id = %(delivery_id)s
