"""The seeds of a training: those of the Plan, and one that the coordinator cannot compute.

    order of the batches, dropout and noise inside graphs, rounding    Plan's seed: a Round can be repeated
    draws of the device's own code, of stages too                      ``device_seed``, from the device's secret

The coordinator chooses the Plan's seed and the Round, and it can guess the partition. It could compute whatever is
drawn from them, and subtract a noise that an app adds for privacy. A simulation has no secret: there all draws follow
the Plan, so a simulation can be repeated, and its noise is not private.

Reference:
    RFC 5869, HKDF.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fanin.clients.device.models import OpenedModel
from fanin.protos.messages import Assignment
from fanin.protos.wire import to_proto
from fanin.v1 import fleet_pb2

DOMAIN: Final = b"fanin device seed v1\n"
SEED_BYTES: Final = 32


def device_seed(secret: bytes, assignment: Assignment) -> bytes:
    """Return the seed of what this device's code draws for an Assignment, 32 bytes.

    It is HKDF-SHA256 of the secret. The ``info`` is the whole Assignment: its Run, lineage, Round and id, and also
    its Version and its training. So a coordinator that offers an Assignment again with another Version does not get
    two Updates with the same noise. ``deadline_s`` is left out: it differs whenever an Assignment is offered again.

    Args:
        secret: The secret of the device.
        assignment: The Assignment.
    """
    info = to_proto(replace(assignment, deadline_s=0.0), fleet_pb2.Assignment).SerializeToString(deterministic=True)
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=DOMAIN + info).derive(secret)


def app_seed(model: OpenedModel, assignment: Assignment, partition: int = 0) -> int:
    """Return the seed for the random numbers that the code of a trainer draws.

    On a device it has 256 bits, which the coordinator cannot compute. In a simulation it has 32 bits and follows from
    the Plan's seed, the partition and the Round. A repeated training gets the same seed.

    Args:
        model: The model that ``train`` received.
        assignment: The Assignment that ``train`` received.
        partition: Index of the device's data. It tells the clients of a simulation apart.
    """
    if model.device_seed is not None:
        return int.from_bytes(model.device_seed, "big")
    seeds = np.random.SeedSequence((assignment.training.seed, partition, assignment.round))
    return int(seeds.generate_state(1)[0])
