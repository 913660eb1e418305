-- Every request that came to an end has its row, a stale one too.
INSERT INTO posthouse.delivery_attempts (
    delivery_id, attempt_no, trigger, started_at, ended_at, status, error_class, error, remote_ip,
    dns_ms, connect_ms, tls_ms, first_byte_ms, total_ms, response_headers, response_body,
    outcome, next_at, charged, stale, lease_token
)
VALUES (
    %(delivery_id)s, %(attempt_no)s, %(trigger)s, %(started_at)s, clock_timestamp(), %(status)s, %(error_class)s,
    %(error)s, %(remote_ip)s, %(dns_ms)s, %(connect_ms)s, %(tls_ms)s, %(first_byte_ms)s, %(total_ms)s,
    %(response_headers)s, %(response_body)s, %(outcome)s,
    clock_timestamp() + %(next_in_s)s::double precision * interval '1 second', %(charged)s, %(stale)s, %(lease_token)s
)
