"""Closed by default: who may ask, and what a browser may do with the answer."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from settings import Settings, refuse

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def require_loopback(settings: Settings) -> None:
    """Nobody is asked who they are, so nobody else may come: exit 78 unless WEB_HOST is a loopback."""
    if not _is_loopback(settings.web_host):
        refuse(
            f"WEB_HOST: {settings.web_host} is open to others, and the page does not yet ask who they are; "
            "use 127.0.0.1, ::1 or localhost"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_names(settings: Settings) -> list[str]:
    """What a browser may call us. A stranger's page whose name leads to 127.0.0.1 calls us by that name."""
    host = settings.web_host.lower()
    return ["127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host]


class SecurityHeaders:
    """HEADERS on every answer; what the database said is never kept by a cache."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if "etag" in headers else "no-store")
            await send(message)

        await self.app(scope, receive, send_with_headers)
