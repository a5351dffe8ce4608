"""The authority of a coordinator by its fingerprint, for a device that has no copy of its certificate.

1. The chain is read without verification. No credential is sent.
2. One certificate of the chain must have the fingerprint. It is compared as a whole: no other one counts.
3. A new connection must verify with that certificate as the only authority: it signed the coordinator's certificate,
   which is for this name and valid now.
4. Only then it is returned, and the device stores it. From then on it is used like a file of ``--ca``.
"""

import hmac
import logging
import os
import random
import ssl
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from fanin.clients.device.session.machine import FIRST_PAUSE_S, LONGEST_PAUSE_S
from fanin.clients.device.storage.files import replace
from fanin.clients.probe import cause_of_failure, served_chain
from fanin.clients.route import Route, route_to
from fanin.protos.addresses import check_remote
from fanin.protos.errors import FaninError, InvalidInput, Unavailable, Untrusted, coded

LOG = logging.getLogger("fanin.clients")
AUTHORITY_FILE: Final = "ca.pem"
"""The file of the authority in a device's folder."""
FINGERPRINT_CHARS: Final = 64


def parse_fingerprint(what: str, text: str) -> str:
    """Return a fingerprint as lower-case hexadecimal. Raises InvalidInput.

    Colons and ``sha256:`` or ``SHA256 Fingerprint=`` before it are accepted, as ``openssl x509`` prints them.
    """
    digits = text.strip().rpartition("=")[2].lower().removeprefix("sha256:").replace(":", "")
    if len(digits) != FINGERPRINT_CHARS or not set(digits) <= set("0123456789abcdef"):
        raise InvalidInput(
            f"{what}: got {text[:100]!r}, expected the {FINGERPRINT_CHARS} hexadecimal characters that fanin serve "
            "prints (SHA-256 of the authority's certificate)",
            code="FN-1482",
        )
    return digits


def fingerprints_of(pem: bytes) -> tuple[str, ...]:
    """Return the fingerprint of each certificate of a PEM text. Raises InvalidInput if there is none."""
    blocks = pem.decode("ascii", "ignore").split(ssl.PEM_FOOTER)[:-1]
    try:
        texts = [f"{block[block.index(ssl.PEM_HEADER) :]}{ssl.PEM_FOOTER}" for block in blocks]
        fingerprints = tuple(sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest() for text in texts)
    except ValueError:
        fingerprints = ()
    if not fingerprints:
        raise InvalidInput(
            "certificate authority: got no PEM certificate, expected the coordinator's tls/ca.pem", code="FN-0807"
        )
    return fingerprints


def kept_authority(
    server: str, fingerprint: str, folder: Path, on_failure: Callable[[FaninError, float], None]
) -> bytes:
    """Return the authority's certificate from a device's folder. Read it from the coordinator first if it is missing.

    A coordinator that cannot be reached is tried again after growing pauses, as by a device that takes part.
    ``on_failure`` gets each cause and the pause after it.

    Raises:
        InvalidInput: The folder has another authority.
        Untrusted: See ``pinned_authority``.
    """
    path = folder / AUTHORITY_FILE
    if path.exists():
        pem = path.read_bytes()
        check_kept(path, pem, fingerprint)
        return pem
    route, pause_s = route_to(check_remote("server", server), os.environ), FIRST_PAUSE_S
    while True:
        try:
            pem = pinned_authority(route, fingerprint)
        except Untrusted:
            raise
        except Unavailable as exc:
            LOG.warning("authority: %s", coded(exc))
            drawn_s = random.uniform(pause_s / 2, pause_s)
            on_failure(exc, drawn_s)
            time.sleep(drawn_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            replace(path, pem)
            LOG.info("authority: %s is kept in %s", fingerprint, path)
            return pem


def check_kept(path: Path, pem: bytes, fingerprint: str) -> None:
    """Raise InvalidInput unless a certificate of a file has the fingerprint. Its owner may have appended others."""
    if fingerprint not in (kept := fingerprints_of(pem)):
        raise InvalidInput(
            f"{path}: has the fingerprint {kept[0]}, expected {fingerprint} of --ca-fingerprint; give another "
            "--state, or remove the file if the coordinator has a new authority",
            code="FN-1483",
        )


def pinned_authority(route: Route, fingerprint: str) -> bytes:
    """Return the authority's certificate (PEM) with this fingerprint, from the coordinator itself.

    Raises:
        Untrusted: The coordinator presents no certificate with this fingerprint, or it did not sign the coordinator's.
        Unavailable: The coordinator cannot be reached.
    """
    chain = served_chain(route)
    fingerprints = [sha256(each).hexdigest() for each in chain]
    matches = [
        each for each, digest in zip(chain, fingerprints, strict=True) if hmac.compare_digest(digest, fingerprint)
    ]
    if not matches:
        # The last one of a chain is the authority's.
        shown = fingerprints[-1] if fingerprints else "none"
        raise Untrusted(
            f"{route.target}: no certificate there has the fingerprint of --ca-fingerprint: received {shown}, expected "
            f"{fingerprint}; compare it with the join line of the coordinator's operator. If it is the same, "
            "another program answers here, for example a proxy that inspects TLS; fanin doctor shows who issued it",
            code="FN-1480",
        )
    pem = ssl.DER_cert_to_PEM_cert(matches[0]).encode()
    if cause := cause_of_failure(route, pem):
        raise cause
    return pem
