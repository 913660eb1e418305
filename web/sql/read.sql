-- A page changes nothing, and no statement of it runs for longer than people wait.
SELECT set_config('transaction_read_only', 'on', true),
       set_config('statement_timeout', %(limit_ms)s, true)
