-- What is kept for superusers is not ours, nor is what a role's or database's own limit holds back (-1: none).
SELECT least(
    current_setting('max_connections')::integer
        - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true), '0')::integer,
    nullif(r.rolconnlimit, -1),
    nullif(d.datconnlimit, -1)
) AS connections
FROM pg_roles r, pg_database d
WHERE r.rolname = current_user
  AND d.datname = current_database()
