"""Forms of the names, keys and signatures that peers send."""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

from fanin.protos.errors import InvalidInput

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
MAX_NAME_CHARS: Final = 128
"""Longest id, codec or runtime name. A longer one is a mistake or an attack."""
NAME_FORM: Final = f"1 to {MAX_NAME_CHARS} letters, digits or ._:+- that do not begin with a dot"
_NAME: Final = re.compile(rf"[A-Za-z0-9_:+-][A-Za-z0-9._:+-]{{0,{MAX_NAME_CHARS - 1}}}")
MAX_LABEL_CHARS: Final = 4096
"""Longest name of a part of a model. Converters join the names of fused operators."""
LABEL_FORM: Final = (
    f"1 to {MAX_LABEL_CHARS} printable characters that do not begin with a slash, without a backslash and without .. "
    "between slashes"
)
MAX_RUN_ID_CHARS: Final = 64
MAX_TAGS: Final = 16
MAX_TAG_CHARS: Final = 64
"""Longest name of a tag. The value may have ``MAX_NAME_CHARS``."""
DIGEST_CHARS: Final = 64
MAX_NUMBER: Final = (1 << 63) - 1
"""Highest number of a Version or an event: the largest integer of the database."""
SMALL_ORDER: Final = frozenset(
    {
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    }
)
"""Encodings, without the sign bit, of the eight Ed25519 points of order 1, 2, 4 and 8. No private key has one of
them as its public key, and one signature is valid for many messages under them. ``cryptography`` accepts them.

Reference:
    RFC 8032, section 5.1.3, for the encoding; the same seven are refused by ``ge25519_has_small_order`` of libsodium.
"""


def is_name(text: str) -> bool:
    """Return whether a text is a short name in printable ASCII without spaces or slashes.

    Ids become file names and metadata, so the alphabet is the intersection of their alphabets.
    """
    return _NAME.fullmatch(text) is not None


def check_name(what: str, name: str) -> None:
    """Raise InvalidInput unless ``name`` is a name (``is_name``)."""
    if not is_name(name):
        raise InvalidInput(f"{what}: got {name[:MAX_NAME_CHARS]!r}, expected {NAME_FORM}", code="FN-0105")


def check_label(what: str, label: str) -> None:
    """Raise InvalidInput unless ``label`` can name a part of a model: an artifact, a parameter, a port or a slot.

    Exporters choose such names, so they have more characters than ids. A reader may still make a file of one, or print
    it: it is printable, and as a path it stays in its folder.
    """
    is_path = not label.startswith("/") and "\\" not in label and ".." not in label.split("/")
    if not 0 < len(label) <= MAX_LABEL_CHARS or not label.isprintable() or not is_path:
        raise InvalidInput(f"{what}: got the name {label[:MAX_NAME_CHARS]!r}, expected {LABEL_FORM}", code="FN-0106")


def check_run_id(run_id: str) -> None:
    """Raise InvalidInput unless ``run_id`` is a valid name, short enough to be a part of Assignment ids."""
    check_name("run id", run_id)
    if len(run_id) > MAX_RUN_ID_CHARS:
        raise InvalidInput(f"run id: got {len(run_id)} characters, expected at most {MAX_RUN_ID_CHARS}", code="FN-0105")


def check_key(what: str, public_key: str) -> None:
    """Raise InvalidInput unless ``public_key`` has the form of an Ed25519 public key in hexadecimal.

    A point of small order is refused: it is the public key of no private one.
    """
    if len(public_key) != 2 * PUBLIC_KEY_BYTES or not set(public_key) <= set("0123456789abcdef"):
        raise InvalidInput(
            f"{what}: got a public key of {len(public_key)} characters, expected 64 hexadecimal ones", code="FN-0110"
        )
    sign_byte = int(public_key[-2:], 16)
    if f"{public_key[:-2]}{sign_byte & 0x7F:02x}" in SMALL_ORDER:
        raise InvalidInput(
            f"{what}: got the public key {public_key}, a point of small order; create a new key", code="FN-0110"
        )


def check_signature(what: str, signature: bytes) -> None:
    """Raise InvalidInput unless ``signature`` has the length of an Ed25519 signature."""
    if len(signature) != SIGNATURE_BYTES:
        raise InvalidInput(
            f"{what}: got a signature of {len(signature)} bytes, expected {SIGNATURE_BYTES}", code="FN-0110"
        )


def check_secret(what: str, sha256: str) -> None:
    """Raise InvalidInput unless ``sha256`` is the digest of a secret. An empty one would admit everybody."""
    check_digest(what, sha256)
    if sha256 == hashlib.sha256(b"").hexdigest():
        raise InvalidInput(
            f"{what}: got the digest of an empty secret, expected one of 24 random bytes", code="FN-1402"
        )


def check_digest(what: str, sha256: str) -> None:
    """Raise InvalidInput unless ``sha256`` has the form of a digest."""
    if len(sha256) != DIGEST_CHARS or not set(sha256) <= set("0123456789abcdef"):
        raise InvalidInput(
            f"{what}: got a digest of {len(sha256)} characters, expected 64 lower-case hexadecimal ones", code="FN-1402"
        )


def check_text_line(what: str, text: str, max_chars: int) -> None:
    """Raise InvalidInput unless ``text`` is one line of printable characters. Markup in it is text like any other."""
    if not 0 < len(text) <= max_chars or not text.isprintable():
        raise InvalidInput(
            f"{what}: got {text[:MAX_NAME_CHARS]!r}, expected 1 to {max_chars} printable characters", code="FN-1403"
        )


def check_tags(what: str, tags: Mapping[str, str]) -> None:
    """Raise InvalidInput unless these are few tags, each with a short name and a short printable value."""
    if len(tags) > MAX_TAGS:
        raise InvalidInput(f"{what}: got {len(tags)} tags, expected at most {MAX_TAGS}", code="FN-1404")
    for name, value in tags.items():
        check_tag_name(what, name)
        check_text_line(f"{what}: tag {name}", value, MAX_NAME_CHARS)


def check_tag_name(what: str, name: str) -> None:
    """Raise InvalidInput unless ``name`` can name a tag."""
    if not is_name(name) or len(name) > MAX_TAG_CHARS:
        raise InvalidInput(
            f"{what}: got the tag name {name[:MAX_TAG_CHARS]!r}, expected 1 to {MAX_TAG_CHARS} letters, digits or "
            "._:+- that do not begin with a dot",
            code="FN-1404",
        )
