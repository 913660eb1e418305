-- The steps this database has seen.
SELECT name
FROM posthouse.migrations
ORDER BY name
