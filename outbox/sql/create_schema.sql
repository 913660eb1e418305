-- The house's own schema, beside dramatiq-pg's.
CREATE SCHEMA IF NOT EXISTS posthouse
