-- Only the holder of the lease gives it back and touches the endpoint's health; not of an endpoint changed meanwhile.
UPDATE posthouse.endpoints
SET
    lease_token = NULL,
    lease_until = NULL,
    last_duration_ms = %(duration_ms)s,
    not_before = CASE
        WHEN version <> %(version)s THEN not_before
        WHEN %(charge)s = 'clear' THEN NULL
        WHEN %(pause_s)s::double precision IS NOT NULL
            THEN clock_timestamp() + %(pause_s)s::double precision * interval '1 second'
        ELSE not_before
    END,
    failing_since = CASE
        WHEN version <> %(version)s THEN failing_since
        WHEN %(charge)s = 'clear' THEN NULL
        WHEN %(charge)s = 'charged' OR (%(charge)s = 'refusal' AND refusals_in_row >= 19)
            THEN coalesce(failing_since, clock_timestamp())
        ELSE failing_since
    END,
    failures_in_row = CASE
        WHEN version <> %(version)s THEN failures_in_row
        WHEN %(charge)s = 'clear' THEN 0
        WHEN %(charge)s = 'charged' OR (%(charge)s = 'refusal' AND refusals_in_row >= 19)
            THEN failures_in_row + 1
        ELSE failures_in_row
    END,
    refusals_in_row = CASE
        WHEN version <> %(version)s THEN refusals_in_row
        WHEN %(charge)s = 'refusal' THEN refusals_in_row + 1
        WHEN %(charge)s IN ('clear', 'charged') THEN 0
        ELSE refusals_in_row
    END,
    failure_windows = CASE
        WHEN version = %(version)s AND %(charge)s = 'clear' THEN '{}'
        ELSE failure_windows
    END,
    enabled = enabled AND NOT %(gone)s,
    disabled_reason = CASE WHEN %(gone)s AND enabled THEN 'gone' ELSE disabled_reason END,
    disabled_at = CASE WHEN %(gone)s AND enabled THEN clock_timestamp() ELSE disabled_at END
WHERE id = %(id)s
  AND lease_token = %(token)s
RETURNING
    version = %(version)s
    AND (%(charge)s = 'charged' OR (%(charge)s = 'refusal' AND refusals_in_row >= 20)) AS charged
