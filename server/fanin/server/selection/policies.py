"""Selection policies, which choose waiting devices for the free places of a Round.

A Plan names its policy with ``cohort.selection``. An installed distribution adds policies by the entry point group
``fanin.selection_policies``.

A policy is a pure function. It receives the facts about each device that the coordinator knows without the database,
and a random generator. ``select`` checks each result, so that no policy assigns a device that does not wait, or too
many devices.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Protocol

from fanin.protos.messages import Capabilities
from fanin.protos.plans import Plan
from fanin.protos.plans.named import blamed, checked_options, named, raised_text, wrong_object

GROUP: Final = "fanin.selection_policies"
"""The entry point group of policies in other distributions. An entry is a ``SelectionPolicy``."""


NUM_ARGUMENTS: Final = 4
"""The arguments of a policy. Further parameters are its options."""


class BrokenPolicy(Exception):
    """A selection policy broke its contract. The message is for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDevice:
    """A suitable device that waits for work.

    Attributes:
        device_id: The device's id.
        capabilities: The capabilities that it reported when it checked in.
        last_round: The last Round of this Run in which it took part, 0 for none.
    """

    device_id: str
    capabilities: Capabilities
    last_round: int


class SelectionPolicy(Protocol):
    """Chooses devices for the free places of a Round. Further parameters are its options."""

    def __call__(
        self, waiting: Sequence[WaitingDevice], num_places: int, round_number: int, rng: random.Random, /
    ) -> Sequence[WaitingDevice]:
        """Return the chosen devices: at most ``num_places`` of ``waiting``, each once.

        The result depends on the arguments alone. The function runs on the coordinator's event loop, so it must return
        within milliseconds for 10,000 devices.

        Args:
            waiting: The devices that wait, at least one.
            num_places: The number of free places, at least 1.
            round_number: The number of the Round.
            rng: The only source of randomness.
        """
        ...


def uniform(
    waiting: Sequence[WaitingDevice], num_places: int, _round_number: int, rng: random.Random
) -> Sequence[WaitingDevice]:
    """Draw devices uniformly, without replacement."""
    return waiting if len(waiting) <= num_places else rng.sample(waiting, num_places)


def least_recent(
    waiting: Sequence[WaitingDevice], num_places: int, _round_number: int, rng: random.Random
) -> Sequence[WaitingDevice]:
    """Choose the devices whose last Round is longest ago, new devices first. Ties are broken at random."""
    # The sort is stable, so the random order decides between devices with the same last Round.
    shuffled = rng.sample(waiting, len(waiting))
    return sorted(shuffled, key=attrgetter("last_round"))[:num_places]


POLICIES: Final[Mapping[str, SelectionPolicy]] = MappingProxyType({"uniform": uniform, "least_recent": least_recent})
"""The policies of fanin, by name."""


def policy_of(plan: Plan, policies: Mapping[str, SelectionPolicy] = POLICIES) -> SelectionPolicy:
    """Return the policy that a Plan names: one of ``policies``, or an installed one. Raises InvalidPlan."""
    name = plan.cohort.selection
    policy = named("cohort.selection", name, policies, GROUP)
    where = f"plan: cohort.selection: {name!r}"
    if isinstance(policy, type) or not callable(policy):
        raise wrong_object(where, policy, "a function")
    with blamed(where, "correct it"):
        options = checked_options(
            "plan: cohort.selection_options", policy, plan.cohort.selection_options, NUM_ARGUMENTS
        )
    return partial(policy, **options) if options else policy


def select(
    policy: SelectionPolicy, waiting: Sequence[WaitingDevice], num_places: int, round_number: int, rng: random.Random
) -> tuple[WaitingDevice, ...]:
    """Return the devices that a policy chooses, after a check of its result.

    Raises:
        BrokenPolicy: The policy raised an error, or returned something other than at most ``num_places`` different
            devices of ``waiting``.
    """
    try:
        result: object = policy(tuple(waiting), num_places, round_number, rng)
        chosen = tuple(islice(result, num_places + 1)) if isinstance(result, Iterable) else None
    except Exception as exc:  # Any error: the policy may come from another package.
        raise BrokenPolicy(f"raised {raised_text(exc)}, expected a sequence of waiting devices") from exc
    if chosen is None:
        raise BrokenPolicy(f"got {type(result).__name__}, expected a sequence of waiting devices")
    if len(chosen) > num_places:
        raise BrokenPolicy(f"got more than {num_places} devices, expected at most one for each of {num_places} places")
    # By identity: an invented object need not even have an id that can be compared.
    known = {id(device) for device in waiting}
    for index, device in enumerate(chosen):
        if id(device) not in known:
            raise BrokenPolicy(f"got something at index {index} that is not one of the {len(waiting)} waiting devices")
    if len({id(device) for device in chosen}) < len(chosen):
        raise BrokenPolicy(f"got a device twice among {len(chosen)}, expected each device once")
    return chosen
