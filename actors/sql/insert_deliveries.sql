-- One delivery for each endpoint and event, however often the event is fanned out.
INSERT INTO posthouse.deliveries (id, endpoint_id, event_id, job_id, trigger)
SELECT wished.id, wished.endpoint_id, %(event_id)s, wished.job_id, %(trigger)s
FROM unnest(%(ids)s::uuid[], %(endpoint_ids)s::uuid[], %(job_ids)s::uuid[]) AS wished (id, endpoint_id, job_id)
ON CONFLICT (endpoint_id, event_id) DO NOTHING
RETURNING id::text
