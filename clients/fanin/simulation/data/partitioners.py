"""Partitioners: how the examples of a data set are spread over the clients of a simulation.

A partitioner is a function ``(examples, num_clients, rng) -> indices of each client``. It draws from ``rng`` only, so a
seed gives the same partition in every process. An index may belong to one client at most. Another distribution adds
partitioners by the entry point group ``fanin.partitioners``: a function from options to a partitioner.

- ``iid``: equal sizes, drawn at random
- ``dirichlet``: equal sizes, a mix of labels for each client (Hsu et al. 2019)
- ``label_skew``: a mix of clients for each label, so sizes differ, too (Yurochkin et al. 2019)
- ``shards``: sorted by label and cut into shards, some shards for each client (McMahan et al. 2017, section 3)
- ``pathological``: some labels for each client, and equal shares of a label for its clients (Li et al. 2022)
- ``quantity``: sizes from a Dirichlet distribution, drawn at random
- ``feature_skew``: in the order of a number of each example, such as its brightness
- ``natural``: by an id of each example, such as its writer

Reference:
    Li, Diao, Chen and He 2022, arXiv 2102.02079, section 4, for an overview.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fanin.clients.data.examples import Examples
from fanin.clients.data.partitions import dirichlet_partition
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput, InvalidPlan
from fanin.protos.numbers import is_number
from fanin.protos.plans.named import Choice, created

GROUP: Final = "fanin.partitioners"
"""The entry point group of partitioners in other distributions: ``(options) -> Partitioner``."""


class Partitioner(Protocol):
    """A function that spreads examples over clients."""

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator, /) -> Sequence[Int64s]:
        """Return the indices of each client's examples. All random numbers come from ``rng``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Iid:
    """Equal sizes, drawn at random."""

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        return _cut(rng.permutation(len(examples)), num_clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dirichlet:
    """Equal sizes; each client draws its mix of labels. ``alpha`` counts per label: 0.1 is very uneven, 100 is even.

    Reference:
        Hsu, Qi and Brown 2019, arXiv 1909.06335, section 2.
    """

    alpha: float

    def __post_init__(self) -> None:
        _check_positive("dirichlet", "alpha", self.alpha)

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        return dirichlet_partition(_labels("dirichlet", examples), num_clients, self.alpha, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSkew:
    """For each label, a share for each client from Dir(alpha). Sizes differ, and a small alpha leaves clients empty.

    Reference:
        Yurochkin et al. 2019, arXiv 1905.12022, section 4.
    """

    alpha: float

    def __post_init__(self) -> None:
        _check_positive("label_skew", "alpha", self.alpha)

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        labels = _labels("label_skew", examples)
        parts: list[list[Int64s]] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            for part, piece in zip(parts, _by_shares(members, _dirichlet(self.alpha, num_clients, rng)), strict=True):
                part.append(piece)
        return tuple(np.sort(np.concatenate(part)) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Examples at random, and the share of each client from Dir(alpha). A small alpha leaves clients empty."""

    alpha: float

    def __post_init__(self) -> None:
        _check_positive("quantity", "alpha", self.alpha)

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        order = rng.permutation(len(examples))
        return tuple(map(np.sort, _by_shares(order, _dirichlet(self.alpha, num_clients, rng))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The examples in the order of their labels, cut into equal shards; ``per_client`` of them for each client.

    Reference:
        McMahan et al. 2017, arXiv 1602.05629, section 3.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        _check_count("shards", "per_client", self.per_client)

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        labels = _labels("shards", examples)
        num_shards = num_clients * self.per_client
        if num_shards > len(labels):
            raise InvalidInput(
                f"partition: shards: got {num_clients} clients with {self.per_client} shards each, expected at most "
                f"{len(labels)} shards, one for each example; use fewer",
                code="FN-1140",
            )
        # Examples of one label are in a random order, so a shard is no part of the file.
        shuffled = rng.permutation(len(labels))
        in_order = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shards = np.array_split(in_order, num_shards)
        drawn = rng.permutation(num_shards).reshape(num_clients, self.per_client)
        return tuple(np.sort(np.concatenate([shards[index] for index in row])) for row in drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pathological:
    """Each client has ``num_labels`` labels. The clients with a label share its examples equally.

    The labels are dealt one by one from a random order, so each label has nearly the same number of clients.

    Reference:
        Li, Diao, Chen and He 2022, arXiv 2102.02079, section 4.1, "quantity-based label imbalance".
    """

    num_labels: int = 2

    def __post_init__(self) -> None:
        _check_count("pathological", "num_labels", self.num_labels)

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        labels = _labels("pathological", examples)
        classes = np.unique(labels)
        if self.num_labels > len(classes):
            raise InvalidInput(
                f"partition: pathological: got num_labels {self.num_labels}, expected at most the {len(classes)} "
                "labels of the data; use fewer",
                code="FN-1140",
            )
        owners: dict[int, list[int]] = {int(label): [] for label in classes}
        for client in range(num_clients):
            # The labels with the fewest clients come first; ties are broken at random.
            by_need = sorted(owners, key=lambda label: (len(owners[label]), rng.random()))
            for label in by_need[: self.num_labels]:
                owners[label].append(client)
        parts: list[list[Int64s]] = [[] for _ in range(num_clients)]
        for label, clients in owners.items():
            if not clients:
                continue
            members = rng.permutation(np.flatnonzero(labels == label))
            for client, piece in zip(clients, np.array_split(members, len(clients)), strict=True):
                parts[client].append(piece)
        return tuple(np.sort(np.concatenate(part)) for part in parts)


def mean_input(examples: Examples) -> npt.NDArray[np.float64]:
    """Return the mean of all inputs of each example (n,): the brightness of an image, the level of a sound."""
    rows = [values.reshape(len(values), -1) for values in examples.inputs.values()]
    return np.asarray(sum(row.sum(axis=1, dtype=np.float64) for row in rows) / sum(row.shape[1] for row in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSkew:
    """Equal sizes, in the order of a feature: one client has the smallest values, another one the largest.

    The labels of a client are as they fall. Works for data of every kind of target.

    Attributes:
        mixed: Share of the examples that change places at random, 0.0 to 1.0. 1.0 is ``Iid``.
        feature: Returns one number for each example (n,).
    """

    mixed: float = 0.0
    feature: Callable[[Examples], npt.NDArray[np.generic]] = mean_input

    def __post_init__(self) -> None:
        if not (is_number(self.mixed) and 0.0 <= self.mixed <= 1.0):
            raise InvalidInput(
                f"partition: feature_skew: got mixed {self.mixed!r}, expected 0.0 to 1.0", code="FN-1139"
            )

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        values = np.asarray(self.feature(examples))
        if values.shape != (len(examples),) or values.dtype.kind not in "fiub":
            raise InvalidInput(
                f"partition: feature_skew: the feature is {values.dtype} of shape {values.shape}, expected one number "
                f"for each of {len(examples)} examples; correct the function",
                code="FN-1138",
            )
        # Examples of one value are in a random order.
        shuffled = rng.permutation(len(examples))
        order = shuffled[np.argsort(values[shuffled], kind="stable")]
        moved = np.flatnonzero(rng.random(len(order)) < self.mixed)
        order[moved] = order[rng.permutation(moved)]
        parts = _cut(order, num_clients)
        return tuple(parts[index] for index in rng.permutation(num_clients))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Natural:
    """By an id of each example, such as its writer or speaker. All examples of an id belong to one client.

    With as many clients as ids, client k has the k-th of the sorted ids. With fewer, each has some random ids.

    Attributes:
        ids: The id of each example (n,), of any type that sorts: an array or a sequence.
    """

    ids: npt.ArrayLike

    def __call__(self, examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
        ids = np.asarray(self.ids)
        if ids.shape != (len(examples),):
            raise InvalidInput(
                f"partition: natural: got ids of shape {ids.shape}, expected one for each of {len(examples)} examples",
                code="FN-1142",
            )
        names, inverse = np.unique(ids, return_inverse=True)
        if num_clients > len(names):
            raise InvalidInput(
                f"partition: natural: got {num_clients} clients, expected at most the {len(names)} ids of the data",
                code="FN-1140",
            )
        client_of = np.arange(len(names))
        if num_clients < len(names):
            client_of[rng.permutation(len(names))] = np.arange(len(names)) % num_clients
        clients = client_of[inverse]
        return tuple(np.flatnonzero(clients == client) for client in range(num_clients))


def partitioner_of(name: str, options: Mapping[str, float]) -> Partitioner:
    """Return the partitioner of a name with its options, as the command line gives them.

    Raises:
        InvalidInput: The name is unknown, or an option is wrong.
    """
    try:
        return created(Choice(key="by", name=name, options_key=name, options=options), FACTORIES, GROUP)
    except InvalidPlan as exc:
        raise InvalidInput(f"partition: {str(exc).removeprefix('plan: ')}", code=exc.code) from exc


def _natural() -> Partitioner:
    raise InvalidInput(
        "--by natural: expected data whose examples have an id, such as tinyshakespeare, and no options; in Python, "
        "use Natural(ids=...)",
        code="FN-1142",
    )


FACTORIES: Final[Mapping[str, Callable[..., Partitioner]]] = MappingProxyType(
    {
        "iid": Iid,
        "dirichlet": Dirichlet,
        "label_skew": LabelSkew,
        "quantity": Quantity,
        "shards": Shards,
        "pathological": Pathological,
        "feature_skew": FeatureSkew,
        "natural": _natural,
    }
)
"""Our partitioners with numbers as options, by name."""


def _cut(order: Int64s, num_clients: int) -> tuple[Int64s, ...]:
    return tuple(np.sort(part) for part in np.array_split(order, num_clients))


def _by_shares(members: Int64s, shares: npt.NDArray[np.float64]) -> list[Int64s]:
    """Cut indices into one consecutive part for each share."""
    bounds = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
    return np.split(members, bounds)


def _dirichlet(alpha: float, num_clients: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return shares from Dir(alpha) (num_clients,). With a tiny alpha all of them underflow, and one client has all."""
    shares = rng.standard_gamma(alpha, num_clients)
    total = shares.sum()
    if total > 0.0:
        return np.asarray(shares / total)
    shares[rng.integers(num_clients)] = 1.0
    return shares


def _labels(name: str, examples: Examples) -> npt.NDArray[np.int32]:
    """Return the labels (n,). Raises InvalidInput for sequences and values, which have none."""
    if examples.y.ndim != 1 or examples.y.dtype != np.int32:
        raise InvalidInput(
            f"partition: {name}: got targets {examples.y.dtype} of shape {examples.y.shape}, expected labels (n,) "
            "int32; use iid, quantity or natural for sequences and values",
            code="FN-1141",
        )
    return examples.y.astype(np.int32, copy=False)


def _check_positive(name: str, option: str, value: object) -> None:
    if not (is_number(value) and 0.0 < value < np.inf):
        raise InvalidInput(f"partition: {name}: got {option} {value!r}, expected a positive number", code="FN-1139")


def _check_count(name: str, option: str, value: object) -> None:
    if not (is_number(value) and isinstance(value, int) and value >= 1):
        raise InvalidInput(
            f"partition: {name}: got {option} {value!r}, expected an integer of at least 1", code="FN-1139"
        )
