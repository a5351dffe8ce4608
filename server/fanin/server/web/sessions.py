"""Sessions of browsers: a signed cookie that names a token, and the tokens of forms.

The coordinator keeps no session. A cookie has the digest of the token that opened it, a number, a time, and a signature
by a key of the coordinator's folder. So a session survives a restart, and ends when its token is no longer valid. The
token itself is in no cookie. Signing out raises the number of the token, which ends all cookies with a lower one.
"""

import hashlib
import hmac
import secrets
import threading
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
KEY_FILE: Final = "page.key"
ENDED_FILE: Final = "page.ended"
"""A line for each token whose sessions were ended: its digest, and how often."""
_VISITOR: Final = "visitor"
"""The name by which forms of a browser without a session are signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSession:
    """A session that a cookie proves.

    Attributes:
        token_sha256: The digest of the token that opened it.
        number: How often sessions of the token were ended before.
        expires_s: When it ends, in seconds since the Unix epoch.
    """

    token_sha256: str
    number: int
    expires_s: int


class Sessions:
    """Signs and reads cookies and the tokens of forms.

    Args:
        folder: The folder of the key and of the numbers, which are created when they are needed.
        wall: The clock, in seconds since the Unix epoch.
    """

    def __init__(self, folder: Path, wall: Callable[[], float]) -> None:
        self._key = _session_key(folder / KEY_FILE)
        self._ended_file = folder / ENDED_FILE
        self._ended = _numbers(self._ended_file)
        self._ending = threading.Lock()
        self._wall = wall

    def open(self, token_sha256: str) -> str:
        """Return the cookie of a new session."""
        text = f"{token_sha256}.{self._ended.get(token_sha256, 0)}.{int(self._wall()) + SESSION_S}"
        return f"{text}.{self._signature('session', text)}"

    def read(self, cookie: str) -> PageSession | None:
        """Return the session of a cookie, None if it is not ours or has ended."""
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature("session", text).encode()):
            return None
        digest, number, expires = text.split(".")
        if int(expires) <= self._wall() or int(number) != self._ended.get(digest, 0):
            return None
        return PageSession(token_sha256=digest, number=int(number), expires_s=int(expires))

    def end(self, token_sha256: str) -> None:
        """End all sessions of a token, durably. Raises StorageFull, StorageUnavailable."""
        with self._ending:
            ended = self._ended | {token_sha256: self._ended.get(token_sha256, 0) + 1}
            write_file(self._ended_file, "".join(f"{digest} {number}\n" for digest, number in ended.items()).encode())
            self._ended = ended

    def is_old(self, session: PageSession) -> bool:
        """Return whether a session should get a new cookie."""
        return session.expires_s - self._wall() < RENEW_S

    def form_token(self, session: PageSession | None) -> str:
        """Return the token that every form of a session carries. Another site cannot read it."""
        return self._signature("form", _VISITOR if session is None else f"{session.token_sha256}.{session.number}")

    def _signature(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose} {text}".encode(), hashlib.sha256).hexdigest()


def _session_key(path: Path) -> bytes:
    """Return the key of a file, which is created at the first use or if it has another length."""
    if path.exists() and len(key := path.read_bytes()) == KEY_BYTES:
        return key
    path.parent.mkdir(exist_ok=True, mode=0o700)
    key = secrets.token_bytes(KEY_BYTES)
    write_file(path, key)
    return key


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file. A line that is damaged counts as none."""
    lines = path.read_text("ascii", errors="replace").splitlines() if path.exists() else []
    parts = (line.split(" ") for line in lines)
    return {part[0]: int(part[1]) for part in parts if len(part) == 2 and part[1].isascii() and part[1].isdecimal()}
