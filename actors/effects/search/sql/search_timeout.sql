-- For this transaction: a search that takes longer is unavailable, not slow.
SELECT set_config('statement_timeout', '2s', true)
