"""Rules for requests to the page: the addresses that are its own, and a token that works once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from sirtaki.runner.observe.bounded_server import hosts_of

TOKEN_FILE = "dashboard_token"  # in the job's private folder
ACTION_HEADER = "X-Sirtaki-Token"  # of requests that change something


class Access:
    """The access rules of a dashboard page.

    The token of the printed address works once, and is exchanged for a cookie: an address that remains in a
    history, or in the scroll-back of a terminal, opens nothing.
    """

    def __init__(self, token: str, host: str, listening: tuple[str, int]) -> None:
        """`host` is the name or the address at which the user has asked for the page.

        `listening` is the socket's address and port, as numbers.
        """
        number, port = listening
        self._token: bytes | None = token.encode()
        self._lock = threading.Lock()
        # Browsers send cookies to all ports of a host, so those of several jobs need different names.
        self._cookie = f"sirtaki_{port}={secrets.token_urlsafe(32)}"
        self._hosts = hosts_of(host, number, port)
        self.action_token = secrets.token_urlsafe(32)  # in the page, which no other site can read

    def is_own_address(self, names: Sequence[str]) -> bool:
        """Returns whether the Host headers of a request name the page's own address.

        Others mean that a name of somebody else has been made to stand for this address (DNS rebinding).
        """
        return len(names) == 1 and names[0].lower() in self._hosts

    def redeem(self, token: str) -> str | None:
        """Returns the header that sets the cookie, if the token is right and was not used before."""
        with self._lock:
            if self._token is None or not secrets.compare_digest(token.encode(), self._token):
                return None
            self._token = None
        return f"{self._cookie}; HttpOnly; SameSite=Strict; Path=/"

    def admits(self, cookies: str) -> bool:
        """Returns whether a request's Cookie header contains the cookie, among cookies of other servers."""
        own = self._cookie.encode()
        return any(secrets.compare_digest(part.strip().encode(), own) for part in cookies.split(";"))

    def may_act(self, tokens: Sequence[str]) -> bool:
        """Returns whether the action headers of a request have the token that is in the page."""
        own = self.action_token.encode()
        return len(tokens) == 1 and secrets.compare_digest(tokens[0].encode(), own)
