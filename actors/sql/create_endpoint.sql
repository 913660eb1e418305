-- There are never more endpoints than the setting allows: then no row is made and none comes back.
INSERT INTO posthouse.endpoints (
    id, url, description, event_types, headers, signing, secret_sealed, public_key
)
SELECT
    %(id)s, %(url)s, %(description)s, %(event_types)s, %(headers)s, %(signing)s, %(secret_sealed)s, %(public_key)s
WHERE (SELECT count(*) FROM posthouse.endpoints) < %(max_endpoints)s
RETURNING
    id::text, url, description, event_types,
    ARRAY(SELECT entry ->> 'name' FROM jsonb_array_elements(headers) entry) AS header_names,
    signing, public_key, enabled, disabled_reason, disabled_at, failing_since, failures_in_row, not_before, created_at
