"""Who is measured, a program each. Those of other queues run in environments of their own: see `environments`."""
