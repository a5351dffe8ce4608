"""Sessions of browsers: a signed cookie that names a token, and the tokens of forms.

The coordinator keeps no session. A cookie has the digest of the token that opened it, a time, and a signature by a key
of the coordinator's folder. So a session survives a restart, and ends when its token is no longer valid. The token
itself is in no cookie.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fanin.server.storage.disk import write_file

COOKIE: Final = "fanin_session"
SESSION_S: Final = 7 * 86_400
"""Life of a session without a request: a page that stays open for longer asks for the token again."""
RENEW_S: Final = SESSION_S // 2
KEY_BYTES: Final = 32
_VISITOR: Final = "visitor"
"""The name by which forms of a browser without a session are signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSession:
    """A session that a cookie proves.

    Attributes:
        token_sha256: The digest of the token that opened it.
        expires_s: When it ends, in seconds since the Unix epoch.
    """

    token_sha256: str
    expires_s: int


class Sessions:
    """Signs and reads cookies and the tokens of forms.

    Args:
        key: A secret of the coordinator.
        wall: The clock, in seconds since the Unix epoch.
    """

    def __init__(self, key: bytes, wall: Callable[[], float]) -> None:
        self._key = key
        self._wall = wall

    def open(self, token_sha256: str) -> str:
        """Return the cookie of a new session."""
        text = f"{token_sha256}.{int(self._wall()) + SESSION_S}"
        return f"{text}.{self._signature('session', text)}"

    def read(self, cookie: str) -> PageSession | None:
        """Return the session of a cookie, None if it is not ours or has ended."""
        text, _, signature = cookie.rpartition(".")
        digest, _, expires = text.rpartition(".")
        is_ours = hmac.compare_digest(signature.encode(), self._signature("session", text).encode())
        if not is_ours or int(expires) <= self._wall():
            return None
        return PageSession(token_sha256=digest, expires_s=int(expires))

    def is_old(self, session: PageSession) -> bool:
        """Return whether a session should get a new cookie."""
        return session.expires_s - self._wall() < RENEW_S

    def form_token(self, session: PageSession | None) -> str:
        """Return the token that every form of a session carries. Another site cannot read it."""
        return self._signature("form", _VISITOR if session is None else session.token_sha256)

    def _signature(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose} {text}".encode(), hashlib.sha256).hexdigest()


def session_key(path: Path) -> bytes:
    """Return the key of a file, which is created at the first use or if it has another length."""
    if path.exists() and len(key := path.read_bytes()) == KEY_BYTES:
        return key
    path.parent.mkdir(exist_ok=True, mode=0o700)
    key = secrets.token_bytes(KEY_BYTES)
    write_file(path, key)
    return key
