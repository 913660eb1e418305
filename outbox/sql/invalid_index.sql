-- A concurrent build that was interrupted leaves an index nobody may use.
SELECT indexrelid
FROM pg_index
WHERE indexrelid = to_regclass(%(name)s)
  AND NOT indisvalid
