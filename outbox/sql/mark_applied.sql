-- In the step's own transaction where it has one: done and marked, or neither.
INSERT INTO posthouse.migrations (name)
VALUES (%(name)s)
ON CONFLICT DO NOTHING
