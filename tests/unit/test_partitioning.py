"""Partitions: each partitioner keeps its law, the seed determines the result, and each mistake has one error."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from fanin.clients.data.examples import Examples
from fanin.edge.tensors import Int64s
from fanin.protos.errors import InvalidInput
from fanin.simulation import (
    Dirichlet,
    FeatureSkew,
    Iid,
    LabelSkew,
    Natural,
    Partition,
    Partitioner,
    Pathological,
    Quantity,
    Shards,
    partition,
)
from fanin.simulation.data.contract import check_partitioner
from fanin.simulation.data.partitioners import partitioner_of
from fanin.simulation.data.partitioning import least_alpha

NUM, NUM_LABELS = 600, 10


def labelled(num: int = NUM) -> Examples:
    labels = np.random.default_rng(5).integers(0, NUM_LABELS, num).astype(np.int32)
    return Examples(inputs={"x": np.arange(num, dtype=np.float32)[:, None]}, y=labels)


ALL: tuple[Partitioner, ...] = (
    Iid(),
    Dirichlet(alpha=0.3),
    LabelSkew(alpha=1.0),
    Quantity(alpha=5.0),
    Shards(per_client=2),
    Pathological(num_labels=2),
    FeatureSkew(mixed=0.5),
    Natural(ids=np.arange(NUM) % 30),
)


@pytest.mark.parametrize("by", ALL, ids=lambda by: type(by).__name__)
@given(seed=st.integers(0, 1000), num_clients=st.integers(1, 12))
def test_each_example_is_on_one_client_and_a_seed_decides_all(by: Partitioner, seed: int, num_clients: int) -> None:
    examples = labelled()
    parts = partition(examples, num_clients, by, seed=seed)
    all_indices = np.concatenate(parts.indices)
    assert len(np.unique(all_indices)) == len(all_indices)
    if not isinstance(by, Pathological) or num_clients * by.num_labels >= NUM_LABELS:
        assert len(all_indices) == NUM
    repeat = partition(examples, num_clients, by, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts.indices, repeat.indices, strict=True))
    if num_clients > 1:
        other = partition(examples, num_clients, by, seed=seed + 1)
        assert not all(np.array_equal(one, two) for one, two in zip(parts.indices, other.indices, strict=True))


def counts(by: Partitioner, num_clients: int = 20) -> Int64s:
    return partition(labelled(), num_clients, by, seed=3).label_counts()


def unevenness(table: Int64s) -> float:
    """Return the mean total variation distance between a client's labels and all labels: 0 if all are alike."""
    shares = table / table.sum(axis=1, keepdims=True)
    return float(np.abs(shares - table.sum(axis=0) / table.sum()).sum(axis=1).mean() / 2)


def test_each_partitioner_keeps_the_law_of_its_name() -> None:
    assert np.ptp(counts(Iid()).sum(axis=1)) <= 1
    assert np.ptp(counts(Dirichlet(alpha=0.1)).sum(axis=1)) <= 1
    assert unevenness(counts(Dirichlet(alpha=0.1))) > unevenness(counts(Dirichlet(alpha=1.0))) + 0.1
    assert unevenness(counts(Dirichlet(alpha=100.0))) < unevenness(counts(Iid())) + 0.05
    assert unevenness(counts(LabelSkew(alpha=0.4))) > unevenness(counts(LabelSkew(alpha=10.0))) + 0.2
    assert np.ptp(counts(LabelSkew(alpha=0.4)).sum(axis=1)) > 10
    assert np.ptp(counts(Quantity(alpha=3.0)).sum(axis=1)) > 20
    assert unevenness(counts(Quantity(alpha=5.0), 5)) < 0.2
    # A shard has at most two labels here, and a client has two shards.
    assert (counts(Shards(per_client=2)) > 0).sum(axis=1).max() <= 4
    assert ((counts(Pathological(num_labels=3)) > 0).sum(axis=1) == 3).all()


def test_the_clients_of_a_label_share_it_equally() -> None:
    table = counts(Pathological(num_labels=2))
    for column in table.T:
        owners = column[column > 0]
        assert np.ptp(owners) <= 1
    # 20 clients with 2 of 10 labels: each label has 4 clients.
    assert ((table > 0).sum(axis=0) == 4).all()


def test_a_natural_id_stays_on_one_client() -> None:
    ids = np.array([f"speaker {index % 7}" for index in range(NUM)])
    parts = partition(labelled(), 3, Natural(ids=ids), seed=1)
    owners = [set(ids[part]) for part in parts.indices]
    assert sorted(name for names in owners for name in names) == sorted(set(ids))
    assert [len(names) for names in owners] == [3, 2, 2]
    assert parts[0].inputs["x"].shape == (len(parts.indices[0]), 1)
    assert [len(part) for part in parts] == list(parts.sizes)


def test_with_as_many_clients_as_ids_client_k_has_the_kth_id() -> None:
    ids = [f"speaker {index % 7}" for index in range(NUM)]
    parts = partition(labelled(), 7, Natural(ids=ids), seed=1)
    assert [{ids[index] for index in part} for part in parts.indices] == [{f"speaker {k}"} for k in range(7)]


def test_a_feature_differs_from_client_to_client_as_far_as_it_is_not_mixed() -> None:
    def spread(mixed: float) -> float:
        parts = partition(labelled(), 20, FeatureSkew(mixed=mixed), seed=3)
        assert set(parts.sizes) == {NUM // 20}
        return float(np.ptp([part.inputs["x"].mean() for part in parts]))

    assert spread(0.0) == NUM - NUM // 20, "the first and the last of 20 equal parts of 0, 1, ..., 599"
    assert spread(0.0) > spread(0.5) > spread(1.0)


def test_a_feature_of_ones_own_decides() -> None:
    parts = partition(labelled(), 6, FeatureSkew(feature=lambda examples: -np.abs(examples.inputs["x"][:, 0] - 300.0)))
    middle = min(parts, key=lambda part: float(np.abs(part.inputs["x"] - 300.0).max()))
    assert set(range(251, 350)) < set(middle.inputs["x"][:, 0]), "250 and 350 are equally far"


def test_an_alpha_that_leaves_clients_empty_names_them_and_one_that_works() -> None:
    with pytest.raises(InvalidInput) as excinfo:
        partition(labelled(), 50, LabelSkew(alpha=0.01), seed=7)
    text = str(excinfo.value)
    assert "of 50 clients have fewer than 2 examples with seed 7: 0, " in text
    words = text.split()
    works, does_not = float(words[-6]), float(words[-3])
    assert text.endswith(f"; with this seed, alpha {works:g} works and {does_not:g} does not")
    assert f"{works:.1e}" == f"{does_not * 1.0001 + 10 ** np.floor(np.log10(does_not)) / 10:.1e}", "the next number"
    assert min(partition(labelled(), 50, LabelSkew(alpha=works), seed=7).sizes) >= 2
    with pytest.raises(InvalidInput):
        partition(labelled(), 50, LabelSkew(alpha=does_not), seed=7)


@given(st.floats(1e-5, 1e3), st.floats(1.0, 1e3))
def test_the_least_alpha_is_the_first_number_of_two_digits_that_works(alpha: float, factor: float) -> None:
    least = alpha * factor
    bounds = least_alpha(alpha, lambda value: value > least)
    if least >= 9.9e3:  # The largest number that is tried.
        assert bounds is None
        return
    assert bounds is not None
    low, high = bounds
    assert low <= least < high == float(f"{high:.1e}")
    assert high - max(low, least) <= 0.1001 * high, "neighbours"


def test_the_number_before_the_least_alpha_does_not_work_if_some_smaller_ones_do() -> None:
    def works(alpha: float) -> bool:
        return alpha > 0.07 and round(alpha * 1000) % 7 > 0

    bounds = least_alpha(0.05, works)
    assert bounds is not None
    assert [works(alpha) for alpha in bounds] == [False, True]
    assert bounds[1] - bounds[0] == pytest.approx(0.001)


WIDE = (
    "partition: got {} clients for 600 examples, expected 1 to 300: each client needs 2, one to train and one to "
    "validate"
)


@pytest.mark.parametrize(
    ("num_clients", "by", "error"),
    [
        (0, Iid(), WIDE.format(0)),
        (301, Iid(), WIDE.format(301)),
        (10.0, Iid(), "partition: got num_clients 10.0, expected an integer"),
        (
            40,
            Natural(ids=np.arange(NUM) % 30),
            "partition: natural: got 40 clients, expected at most the 30 ids of the data",
        ),
        (
            5,
            Natural(ids=np.arange(3)),
            "partition: natural: got ids of shape (3,), expected one for each of 600 examples",
        ),
        (
            5,
            Pathological(num_labels=11),
            "partition: pathological: got num_labels 11, expected at most the 10 labels of the data; use fewer",
        ),
        (
            5,
            FeatureSkew(feature=lambda examples: examples.inputs["x"]),
            (
                "partition: feature_skew: the feature is float32 of shape (600, 1), expected one number for each of "
                "600 examples; correct the function"
            ),
        ),
        (
            300,
            Shards(per_client=3),
            (
                "partition: shards: got 300 clients with 3 shards each, expected at most 600 shards, one for each "
                "example; use fewer"
            ),
        ),
        (2, lambda *_: [np.arange(3)], "partition: the partitioner returned 1 clients, expected 2; correct it"),
        (2, lambda *_: {}["x"], "partition: the partitioner raised KeyError: 'x'; correct it"),
        (
            2,
            "iid",
            "partition: got by 'iid', expected a partitioner such as Iid() or Dirichlet(alpha=0.3)",
        ),
        (
            2,
            lambda *_: [np.arange(3), np.arange(2, 5)],
            "partition: the partitioner returned an example for two clients, expected one at most; correct it",
        ),
        (
            2,
            lambda *_: [np.arange(3), np.arange(598, 601)],
            "partition: the partitioner returned indices from 0 to 600, expected 0 to 599; correct it",
        ),
        (
            2,
            lambda *_: [np.arange(3), np.arange(3) / 2],
            (
                "partition: the partitioner returned float64 of shape (3,) for client 1, expected integers (n,); "
                "correct it"
            ),
        ),
        (
            2,
            lambda *_: [np.arange(3), []],
            (
                "partition: 1 of 2 clients have fewer than 2 examples with seed 0: 1; use fewer clients, or another "
                "partitioner"
            ),
        ),
    ],
)
def test_an_impossible_partition_raises_one_error(num_clients: int, by: Partitioner, error: str) -> None:
    with raises(InvalidInput, error):
        partition(labelled(), num_clients, by)


def test_an_option_of_another_type_raises_one_error() -> None:
    with raises(InvalidInput, "partition: dirichlet: got alpha '0.3', expected a positive number"):
        Dirichlet(alpha="0.3")  # type: ignore[arg-type]  # wrong on purpose
    with raises(InvalidInput, "partition: shards: got per_client 1.5, expected an integer of at least 1"):
        Shards(per_client=1.5)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("by", [Dirichlet(alpha=0.3), LabelSkew(alpha=1.0), Shards(), Pathological()])
def test_sequences_have_no_labels(by: Partitioner) -> None:
    tokens = np.zeros((20, 4), np.int32)
    with pytest.raises(InvalidInput, match="FN-1141"):
        partition(Examples(inputs={"x": tokens}, y=tokens), 2, by)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        (
            "dirichlett",
            {},
            (
                "partition: by: got 'dirichlett', expected one of ['dirichlet', 'feature_skew', 'iid', 'label_skew', "
                "'natural', 'pathological', 'quantity', 'shards'], which are installed here; did you mean dirichlet?"
            ),
        ),
        ("iid", {"alpha": 1.0}, "partition: iid.alpha: unknown option, expected none; remove it"),
        ("label_skew", {}, "partition: label_skew.alpha: missing, expected a number; add it"),
        (
            "dirichlet",
            {"alpa": 1.0},
            "partition: dirichlet.alpa: unknown option, expected alpha; did you mean alpha?",
        ),
        (
            "shards",
            {"per_client": 1.5},
            "partition: shards.per_client: got 1.5, expected an integer; correct it",
        ),
        ("feature_skew", {"mixed": 1.5}, "partition: feature_skew: got mixed 1.5, expected 0.0 to 1.0"),
        ("quantity", {"alpha": 0.0}, "partition: quantity: got alpha 0.0, expected a positive number"),
        (
            "pathological",
            {"num_labels": 0.0},
            "partition: pathological: got num_labels 0, expected an integer of at least 1",
        ),
    ],
)
def test_a_name_or_option_that_is_wrong_raises_one_error(name: str, options: dict[str, float], error: str) -> None:
    with raises(InvalidInput, error):
        partitioner_of(name, options)


def test_names_and_classes_are_the_same_partitioners() -> None:
    assert partitioner_of("pathological", {"num_labels": 3.0}) == Pathological(num_labels=3)
    assert partitioner_of("feature_skew", {}) == FeatureSkew()
    assert partitioner_of("feature_skew", {"mixed": 0.2}) == FeatureSkew(mixed=0.2)
    assert partitioner_of("label_skew", {"alpha": 0.2}) == LabelSkew(alpha=0.2)


def of_sizes(sizes: Sequence[int]) -> Partition:
    bounds = np.cumsum([0, *sizes])
    return Partition(examples=labelled(), indices=tuple(np.arange(*pair) for pair in itertools.pairwise(bounds)))


@pytest.mark.heavy
def test_a_partition_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parts = of_sizes([5, 10, 3])
    figure = parts.plot(tmp_path / "parts.svg")
    heights = np.zeros(3)
    for bar in figure.axes[0].patches:  # type: ignore[attr-defined]
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights.tolist() == [5, 10, 3]
    assert (tmp_path / "parts.svg").read_text().startswith("<?xml")
    # IPython shows the figure as the value of a cell.
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match="FN-1146"):
        parts.plot(tmp_path / "parts.xyz")


@pytest.mark.parametrize(
    "by", [Iid(), Dirichlet(alpha=1.0), Shards(), Pathological(), Quantity(alpha=5.0), FeatureSkew()]
)
def test_our_partitioners_keep_the_contract(by: Partitioner) -> None:
    assert len(check_partitioner(by)) == 5


def by_global_draw(examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
    return np.array_split(np.random.default_rng().permutation(len(examples)), num_clients)


def in_place(examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
    examples.y[0] += 1
    return np.array_split(np.arange(len(examples)), num_clients)


def twice(examples: Examples, num_clients: int, rng: np.random.Generator) -> Sequence[Int64s]:
    return [np.arange(len(examples))] * num_clients


@pytest.mark.parametrize(
    ("by", "kind", "problem"),
    [
        (
            by_global_draw,
            AssertionError,
            "a repetition with seed 0 gave other indices; draw all random numbers from rng",
        ),
        (in_place, AssertionError, "changed y of the examples"),
        (twice, InvalidInput, "returned an example for two clients"),
    ],
)
def test_a_partitioner_that_breaks_the_contract_is_refused(
    by: Partitioner, kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind, match=problem):
        check_partitioner(by, labelled())
