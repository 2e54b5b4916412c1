"""Decides who may request what from the live page, before anything of the run is touched.

A request must pass these checks, in this order:

1. the token, if one is set
2. the request rate of its address, separately with and without the token
3. its Host, which must name this machine: a foreign name is another site that points its own name here
4. its Origin, which must be the page itself

A request that changes something also needs the key of this start. No page contains that key. It is in the link that the
command prints, behind its `#`, which browsers never send, and in the answer to the right token. Other users of the
machine, who can also reach a loopback port, can therefore look but not change anything.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections import OrderedDict
from urllib.parse import urlsplit

from aiohttp import web

from omni_async.rewards.server.limits import RateLimit, Refused, client_of

KEY_HEADER = "X-Omni-Async-Key"
_MOST_SESSIONS = 100
# Rates per address, on average and at once: a page sends some ten requests a second while the user zooms.
_PER_S, _BURST = 100.0, 1000
_LOGINS_PER_S, _LOGINS = 0.2, 10

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:;"
        " media-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """The rules of one start of the server.

    Args:
        host: the address that it listens at.
        token: the secret of browsers and programs; None: no secret is needed."""

    def __init__(self, host: str, token: str | None) -> None:
        self.key = secrets.token_urlsafe(32)
        self.needs_token = token is not None
        self._token = token
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._rate = RateLimit(_PER_S, _BURST)
        self._strangers = RateLimit(_PER_S, _BURST)  # so that strangers do not use up the rate of token holders
        self._logins = RateLimit(_LOGINS_PER_S, _LOGINS)
        self._sessions: OrderedDict[str, None] = OrderedDict()

    def require_allowed(self, request: web.Request, has_token: bool, now: float) -> None:
        """Raise Refused unless the address's rate, the Host and the Origin are acceptable.

        Args:
            request: its body is not read.
            has_token: as `knows` returns it.
            now: seconds of a monotonic clock."""
        if wait_s := (self._rate if has_token else self._strangers).wait_s(client_of(request.remote), now):
            raise Refused(429, "too many requests", wait_s)
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._is_own_name(hosts[0]):
            raise Refused(421, "this server answers to localhost, to the name of its machine and to addresses alone")
        for origin in request.headers.getall("Origin", []):
            if origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
                raise Refused(403, "a page from elsewhere may not ask")
        site, mode = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Sec-Fetch-Mode", "")
        if site not in ("none", "same-origin") and not (mode == "navigate" and request.path.endswith("/")):
            raise Refused(403, "a page from elsewhere may not ask")

    def _is_own_name(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}")
            if name.hostname is None or name.username is not None or name.path or name.query or name.port == 0:
                return False
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name.hostname)
        except ValueError:
            return name.hostname in self._names
        return True

    # ---- the token --------------------------------------------------------------------------------------------------

    def cookie(self, request: web.Request) -> str:
        """Return the name of the session's cookie, with the port: browsers send cookies to every port of a host."""
        port = urlsplit(f"//{request.host}").port or 80
        return f"omni_async_watch_{port}"

    def knows(self, request: web.Request, now: float) -> bool:
        """Return whether the request has the token, or a session that was begun with it.

        Raises Refused for a wrong token after too many of them; the right token always passes."""
        if self._token is None:
            return True
        given = request.headers.get("Authorization", "")
        if given:
            if _same(given, f"Bearer {self._token}"):
                return True
            self._count_wrong(request, now)
            return False
        return request.cookies.get(self.cookie(request), "") in self._sessions

    def begin_session(self, request: web.Request, token: str, now: float) -> str:
        """Return a new session's secret. Raises Refused for a wrong token, and for too many of them."""
        if self._token is None or not _same(token, self._token):
            self._count_wrong(request, now)
            raise Refused(401, "that is not the token")
        session = secrets.token_urlsafe(32)
        self._sessions[session] = None
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def _count_wrong(self, request: web.Request, now: float) -> None:
        """Raise Refused if the address gave too many wrong tokens."""
        if wait_s := self._logins.wait_s(client_of(request.remote), now):
            raise Refused(429, "too many wrong tokens", wait_s)

    # ---- changes to the run -----------------------------------------------------------------------------------------

    def require_own_page(self, request: web.Request) -> None:
        """Raise Refused unless a request with a body comes from the page itself, or from a program with its Origin."""
        if not request.headers.get("Origin"):
            raise Refused(403, "expected an Origin: it is the page that asks")
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            raise Refused(415, "expected Content-Type application/json")

    def require_key(self, request: web.Request) -> None:
        """Raise Refused unless the request has the key of this start."""
        if not _same(request.headers.get(KEY_HEADER, ""), self.key):
            raise Refused(403, "open the link that `omni-async watch` printed: the page has no key to change the run")


def _same(given: str, secret: str) -> bool:
    """Compare in constant time: the duration does not reveal the position of a difference."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())
