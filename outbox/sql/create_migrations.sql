-- Run by every migrator before anything else, so it must stand being run again.
CREATE TABLE IF NOT EXISTS posthouse.migrations (
    name text PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
