"""The contract of selection policies, as a check for the tests of an implementation."""

import random
from collections.abc import Sequence
from typing import Final

from fanin.protos.messages import Capabilities
from fanin.server.selection.policies import BrokenPolicy, SelectionPolicy, WaitingDevice, select

_RUNTIMES: Final = ("onnxruntime 1.22.0", "litert 1.4.0", "tflite-runtime 2.14.0")
_NUM_ROUNDS: Final = 9


def check_policy(policy: SelectionPolicy, *, num_devices: int = 50, seed: int = 1) -> None:
    """Check that a selection policy keeps the contract that the coordinator relies on.

    The policy chooses among crowds of 1 to ``num_devices`` devices, for fewer and for more places than devices.

    Args:
        policy: The policy.
        num_devices: The size of the largest crowd.
        seed: Seed of the devices, the places and the policy's randomness.

    Raises:
        AssertionError: The policy breaks the contract. The text says how.
    """
    rng = random.Random(seed)
    for size in range(1, num_devices + 1):
        waiting = _crowd(size, rng)
        for num_places in (1, rng.randint(1, size), size, 2 * size):
            round_number, choice = rng.randint(1, _NUM_ROUNDS), rng.getrandbits(64)
            first = _choose(policy, waiting, num_places, round_number, random.Random(choice))
            again = _choose(policy, waiting, num_places, round_number, random.Random(choice))
            assert first == again, f"policy: {size} devices for {num_places} places: the same seed chose other devices"


def _choose(
    policy: SelectionPolicy, waiting: Sequence[WaitingDevice], num_places: int, round_number: int, rng: random.Random
) -> tuple[WaitingDevice, ...]:
    try:
        return select(policy, waiting, num_places, round_number, rng)
    except BrokenPolicy as exc:
        raise AssertionError(f"policy: {len(waiting)} devices for {num_places} places: {exc}") from exc


def _crowd(size: int, rng: random.Random) -> list[WaitingDevice]:
    """Return devices of several kinds. About a third has never taken part."""
    return [
        WaitingDevice(
            device_id=f"device-{rng.getrandbits(64):016x}",
            capabilities=Capabilities(
                codecs=("fixed32", "int8"),
                runtimes=tuple(rng.sample(_RUNTIMES, rng.randint(0, 2))),
                graph_formats=("onnx", "tflite"),
                max_download_bytes=rng.choice((0, 1 << 20, 1 << 30)),
            ),
            last_round=rng.choice((0, rng.randrange(_NUM_ROUNDS), rng.randrange(_NUM_ROUNDS))),
        )
        for _ in range(size)
    ]
