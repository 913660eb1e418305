-- All that Posthouse has stored, but what it is: its migrations and the declared types of events.
TRUNCATE
    dramatiq.queue,
    posthouse.attempts,
    posthouse.workers,
    posthouse.pauses,
    posthouse.buckets,
    posthouse.rate_limits,
    posthouse.events,
    posthouse.mails,
    posthouse.endpoints,
    posthouse.deliveries,
    posthouse.delivery_attempts,
    posthouse.documents,
    posthouse.index_state,
    posthouse.search_entries
