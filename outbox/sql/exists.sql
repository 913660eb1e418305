-- Whether a table of that name is there for us.
SELECT to_regclass(%(table)s) IS NOT NULL AS found
