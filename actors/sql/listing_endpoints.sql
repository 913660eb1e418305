-- What people may see: no secret, of the headers only the names.
SELECT
    id::text, url, description, event_types,
    ARRAY(SELECT entry ->> 'name' FROM jsonb_array_elements(headers) entry) AS header_names,
    signing, public_key, enabled, disabled_reason, disabled_at, failing_since, failures_in_row, not_before, created_at
FROM posthouse.endpoints
ORDER BY created_at, id
