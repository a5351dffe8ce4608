"""Attempts of secure aggregation up to a phase, and messages of a coordinator that lies."""

from collections.abc import Sequence

import pytest

from fanin.commands.bench.harness.masked import MaskedAttempt
from fanin.edge.masking import messages
from fanin.edge.masking.coordinator import Confirming, Unmasking
from fanin.edge.masking.messages import ShareOf
from fanin.edge.masking.parameters import Threat
from fanin.edge.masking.roster import set_bytes
from fanin.protos.errors import FaninError, InvalidInput
from support.masked import attempt_of, terms_of, update_of


def refused(code: str, kind: type[FaninError] = InvalidInput) -> "pytest.RaisesExc[FaninError]":
    return pytest.RaisesExc(kind, check=lambda error: error.code == code)


def shared(num_devices: int = 6, threat: Threat = Threat.CURIOUS, **fractions: float) -> MaskedAttempt:
    """Return an attempt in which the shares were delivered to nobody yet."""
    attempt = attempt_of(terms_of(num_devices, threat, **fractions), num_devices)
    attempt.advertise()
    attempt.share()
    return attempt


def masked(num_devices: int = 6, threat: Threat = Threat.CURIOUS, **fractions: float) -> MaskedAttempt:
    """Return an attempt whose masked Updates were summed."""
    attempt = shared(num_devices, threat, **fractions)
    attempt.mask(update_of)
    return attempt


def survivors_message(attempt: MaskedAttempt, members: Sequence[int]) -> bytes:
    """Return message 5 for any survivors, as a coordinator that lies would write it."""
    phase = attempt.phase
    assert isinstance(phase, Confirming | Unmasking)
    row = messages.SurvivorsMessage(digest=phase.sharers.digest, members=set_bytes(phase.roster, members))
    return messages.survivors_bytes(attempt.terms.digest, row)


def kinds_given(message: bytes, attempt: MaskedAttempt) -> dict[int, ShareOf]:
    shares = messages.read_shares(attempt.terms.digest, message).shares
    return {owner: kind for owner, (kind, _) in shares.items()}


def advertised(num_devices: int = 6, threat: Threat = Threat.CURIOUS, **fractions: float) -> MaskedAttempt:
    attempt = attempt_of(terms_of(num_devices, threat, **fractions), num_devices)
    attempt.advertise()
    return attempt
