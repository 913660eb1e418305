"""The road: what happened, what must be done about it. Knows no Dramatiq."""
