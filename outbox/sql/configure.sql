-- With *local* a value ends with the transaction, so that behind a pooler nobody else's statements meet it.
SELECT set_config(given.name, given.setting, %(local)s)
FROM unnest(%(names)s::text[], %(settings)s::text[]) AS given (name, setting)
