"""The work, one file a domain. Importing this package installs the broker and declares every actor."""

import settings
from broker import install
from middleware import logs

logs.configure(settings.load().log_format)
broker = install(settings.load())

from actors import corpus, maintenance, notify, webhooks  # noqa: E402 - actors are declared on the broker installed above

__all__ = ["broker", "corpus", "maintenance", "notify", "webhooks"]
