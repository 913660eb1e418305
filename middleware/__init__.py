"""What surrounds an actor: threads, leases, limits, verdicts, shutdown. Nothing here must happen in a Dramatiq hook."""
