-- For the one connection that claims and settles: its few statements are planned once, and by index even while the
-- statistics are those of an empty table. A row that somebody has locked is not waited for.
SELECT set_config('plan_cache_mode', 'force_generic_plan', false),
       set_config('enable_seqscan', 'off', false),
       set_config('enable_bitmapscan', 'off', false),
       set_config('jit', 'off', false),
       set_config('lock_timeout', '200ms', false)
