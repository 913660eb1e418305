-- Only the holder lets go; a lease that was taken over meanwhile has another token.
UPDATE posthouse.index_state
SET lease_token = NULL, lease_until = NULL
WHERE lease_token = %(token)s
