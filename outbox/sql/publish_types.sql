-- The code is the source: what it no longer declares can no longer be recorded. Nothing is written when nothing changed.
WITH declared AS (
    SELECT *
    FROM unnest(%(names)s::text[], %(descriptions)s::text[], %(exposures)s::text[]) AS d (name, description, exposure)
),
gone AS (
    DELETE FROM posthouse.event_types
    WHERE name <> ALL (%(names)s::text[])
)
INSERT INTO posthouse.event_types AS t (name, description, exposure)
SELECT name, description, exposure
FROM declared
ON CONFLICT (name) DO UPDATE
SET description = excluded.description, exposure = excluded.exposure
WHERE (t.description, t.exposure) IS DISTINCT FROM (excluded.description, excluded.exposure)
