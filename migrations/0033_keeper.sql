-- What tells a process from any other, so that its host's keeper can say whether it lives: a pid alone is used again, in
-- every container and after every boot. Null where the system does not tell: those are left to their leases.
ALTER TABLE posthouse.workers
    ADD COLUMN pid_space text,
    ADD COLUMN pid_started bigint,
    ADD CONSTRAINT workers_process CHECK ((pid_space IS NULL) = (pid_started IS NULL));
