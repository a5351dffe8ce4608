"""Golden files of secure aggregation, from which a device with masks can be written in another language.

    python tests/golden/masking.py

writes into the folder ``masking``:

    shares.json       a secret, the coefficients of its polynomial, and its shares
    masks.json        keystreams as words of each ring, at several offsets, and a masked payload
    active.json       a whole attempt of 4 devices in a complete graph, with an authority; the last device drops out
                      after its shares arrived
    sparse.json       a whole attempt of 8 devices in a graph of degree 4, honest coordinator; the same dropout

The last two have, in the order of the indexes, all secrets, all derived values and all messages. Bytes are in
hexadecimal. The secrets follow from a counter; the coefficients of the polynomials are free, so messages with sealed
shares are examples that open, not the only ones.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from support.masked import FixedEntropy, attempt_of, plain_sum, terms_of, update_of

from fanin.commands.bench.harness.masked import MaskedAttempt
from fanin.edge.masking import agreement, coordinator, device
from fanin.edge.masking.coordinator import Confirming, Masking, Sharing
from fanin.edge.masking.journal import Forget, record_of
from fanin.edge.masking.keystream import MaskKey, masked_payload
from fanin.edge.masking.parameters import Threat
from fanin.edge.masking.roster import share_key
from fanin.edge.masking.sharing import COEFFICIENT_BYTES, PRIME, split
from fanin.edge.rings import RING_BITS, Ring, RingVector

FOLDER: Final = Path(__file__).with_name("masking")
Json = dict[str, object]


def shares() -> Json:
    """Return the golden shares."""
    secret, threshold, points = bytes(range(32)), 3, [1, 2, 5, 300, 1_000_000]
    entropy = FixedEntropy(1)
    drawn = [int.from_bytes(entropy(COEFFICIENT_BYTES), "little") % PRIME for _ in range(threshold - 1)]
    rows = split(secret, threshold, points, FixedEntropy(1))
    return {
        "prime": str(PRIME),
        "secret": secret.hex(),
        "threshold": threshold,
        "coefficients": [str(each) for each in drawn],
        "shares": {str(point): row.hex() for point, row in zip(points, rows, strict=True)},
    }


def masks() -> Json:
    """Return the golden masks."""
    rows = []
    for bits in RING_BITS:
        layout = RingVector(ring=Ring(bits=bits), num_values=11, num_tail=2)
        keys = [MaskKey(bytes(range(32))), MaskKey(bytes(range(32, 64)), is_negative=True)]
        values = np.array([0, 1, -1, 127, -127, 5, 0, 0, 0, 0, 2], np.int8)
        payload = b"".join(masked_payload(layout, keys, [values], 3, [3, -7]))
        rows.append({"ring_bits": bits, "word_bytes": layout.ring.word_bytes, "payload": payload.hex()})
    return {
        "added": bytes(range(32)).hex(),
        "subtracted": bytes(range(32, 64)).hex(),
        "values": [0, 1, -1, 127, -127, 5, 0, 0, 0, 0, 2],
        "weight": 3,
        "tail": [3, -7],
        "rings": rows,
    }


def transcript(attempt: MaskedAttempt) -> Json:
    """Run an attempt whose last device drops out after its shares, and return all of it."""
    terms, last = attempt.terms, len(attempt.devices) - 1
    sharing = attempt.advertise()
    rosters = [coordinator.respond(sharing, index)[0].hex() for index in range(last + 1)]
    masking = attempt.share()
    assert isinstance(sharing, Sharing) and isinstance(masking, Masking)
    deliveries = [coordinator.respond(masking, index)[0].hex() for index in range(last + 1)]
    phase = attempt.mask(update_of, {last})
    payloads = [each.masked(update_of(index)).hex() for index, each in enumerate(attempt.devices)]
    survivors = coordinator.respond(phase, 0)[0].hex()
    proof = ""
    if isinstance(phase, Confirming):
        phase = attempt.confirm()
        proof = coordinator.respond(phase, 0)[1].hex()
    correction = attempt.unmask()
    states = [each.state for each in attempt.devices]
    values, tail = plain_sum([update_of(index) for index in range(last)])
    roster = sharing.roster
    (ended,) = device.finish(states[0])
    assert isinstance(ended, Forget)
    return {
        "terms": terms.encoded.hex(),
        "terms_digest": terms.digest.hex(),
        "authority": attempt.authority,
        "degree": roster.parameters.degree,
        "threshold": roster.parameters.threshold,
        "secrets": [
            {"sealing": state.keys.sealing.hex(), "masking": state.keys.masking.hex(), "seed": state.keys.seed.hex()}
            for state in states
        ],
        "advertisements": [state.keys.answer.hex() for state in states],
        "roster_digest": roster.digest.hex(),
        "neighbors": [list(roster.graph.neighbors(index)) for index in range(last + 1)],
        "rosters": rosters,
        "share_keys": share_keys(attempt, sharing),
        "sealed_shares": [state.sealed.answer.hex() for state in states if state.sealed],
        "sharers_digest": masking.sharers.digest.hex(),
        "deliveries": deliveries,
        "mask_keys": [[[mask.key.hex(), mask.is_negative] for mask in device.mask_keys(state)] for state in states],
        "values": [np.concatenate(update_of(index).pieces).tolist() for index in range(last + 1)],
        "tails": [list(update_of(index).tail) for index in range(last + 1)],
        "payloads": payloads,
        "survivors": survivors,
        "survivors_digest": phase.survivors.digest.hex(),
        "confirmations": [state.naming.answer.hex() for state in states[:last] if state.naming],
        "proof": proof,
        "shares": [state.giving.answer.hex() for state in states[:last] if state.giving],
        "correction": [[mask.key.hex(), mask.is_negative] for mask in correction.keys],
        "sum": values.tolist(),
        "tail_sum": tail,
        "journal": b"".join(attempt.devices[0].journal).hex(),
        "ended": record_of(ended.fact).hex(),
    }


def share_keys(attempt: MaskedAttempt, sharing: Sharing) -> Mapping[str, str]:
    """Return the key of each directed pair, by ``SENDER>RECEIVER``."""
    return {
        f"{sender}>{receiver}": share_key(
            sharing.roster, sender, (sender, receiver), agreement.private_key(each.state.keys.sealing)
        ).hex()
        for sender, each in enumerate(attempt.devices)
        for receiver in sharing.roster.graph.neighbors(sender)
    }


def texts() -> dict[str, str]:
    """Return the text of each golden file by its name."""
    files: dict[str, Json] = {
        "shares.json": shares(),
        "masks.json": masks(),
        "active.json": transcript(attempt_of(terms_of(4, Threat.ACTIVE, dropout=0.25), 4)),
        "sparse.json": transcript(attempt_of(terms_of(8, dropout=0.25), 8)),
    }
    return {name: json.dumps(rows, indent=1) + "\n" for name, rows in files.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)
