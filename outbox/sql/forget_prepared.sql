-- The driver takes what the server skipped for prepared, and would call it by a name that nobody knows.
DEALLOCATE ALL
