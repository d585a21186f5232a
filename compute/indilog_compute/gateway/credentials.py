"""Authenticates callers: by the platform's token, or by the session of a browser.

A browser cannot store a token safely, so it gets a session. `indilog open` authenticates with the
token and gets a code, which can be used once. The page `/login` exchanges the code for a cookie
(`login`). This process keeps digests of codes and sessions in memory only, so codes and sessions
end with the process. `Guard` checks tokens and cookies by `Credentials`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final

_BYTES: Final = 32
_BEARER: Final = b"bearer "


class Credentials:
    """The token, and the browser sessions of this compute node.

    Args:
        token: token of the platform.
        sessions_max: largest number of sessions, and also of codes. A further session replaces the
            oldest session, and a further code the oldest code.
        session_s_max: seconds for which a session lasts.
        code_s: seconds within which a code can be used.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        token: str,
        *,
        sessions_max: int,
        session_s_max: float,
        code_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token.encode()
        self._codes = _Expiring(sessions_max, code_s, clock)
        self._sessions = _Expiring(sessions_max, session_s_max, clock)
        self.session_s_max = session_s_max
        self.code_s = code_s

    def is_token(self, authorization: bytes) -> bool:
        """Whether `authorization`, a value of the header `Authorization`, carries the token.

        The comparison takes constant time, so timing reveals nothing about the token.
        """
        given = authorization[len(_BEARER) :]
        is_same = hmac.compare_digest(given.strip(), self._token)
        return authorization[: len(_BEARER)].lower() == _BEARER and is_same

    def new_code(self) -> str:
        """Return a code that can begin one session, within `code_s` seconds."""
        return self._codes.issue()

    def begin_session(self, code: str) -> str | None:
        """Begin a session with a code, and return the secret of the session. None: the code is
        unknown, was used, or has expired.
        """
        return self._sessions.issue() if self._codes.remove(code.encode()) else None

    def is_session(self, secret: bytes) -> bool:
        """Whether `secret` is the secret of a session that has not ended."""
        return self._sessions.has(secret)

    def end_session(self, secret: bytes) -> None:
        """End the session with this secret, if there is one."""
        self._sessions.remove(secret)


class _Expiring:
    """Secrets that expire. Lookups compare digests, so timing reveals nothing about the secrets."""

    def __init__(self, count_max: int, valid_s: float, clock: Callable[[], float]) -> None:
        self._count_max = count_max
        self._valid_s = valid_s
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def issue(self) -> str:
        now = self._clock()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        while len(self._until) >= self._count_max:
            del self._until[next(iter(self._until))]
        secret = secrets.token_urlsafe(_BYTES)
        self._until[_digest(secret.encode())] = now + self._valid_s
        assert len(self._until) <= self._count_max, "the oldest secrets were removed"
        return secret

    def has(self, secret: bytes) -> bool:
        return self._until.get(_digest(secret), 0.0) > self._clock()

    def remove(self, secret: bytes) -> bool:
        """Remove a secret; return whether it was valid."""
        was_valid = self.has(secret)
        self._until.pop(_digest(secret), None)
        return was_valid


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
