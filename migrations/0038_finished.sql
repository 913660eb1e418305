-- queue_finished has taken its place, and queue_past for dramatiq-pg's purge.
DROP INDEX IF EXISTS dramatiq.queue_ended;

-- And queue_newest that of this one.
DROP INDEX IF EXISTS dramatiq.queue_waiting;
