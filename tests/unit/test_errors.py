"""The error tree: each class has a row in the table, which determines the text that a peer may read."""

import pickle
import traceback

import grpc
import pytest

from fanin.protos import errors as e

SECRET = "/var/lib/fanin: disk 3 broke"


def classes(kind: type[e.FaninError]) -> set[type[e.FaninError]]:
    """Return the class and all its subclasses in fanin's error tree."""
    result = {kind} if kind.__module__ == e.__name__ else set()
    return result.union(*(classes(subclass) for subclass in kind.__subclasses__()))


class Mine(e.InvalidPlan):
    """An error of another package."""


def test_each_class_has_a_row() -> None:
    assert set(e.STATUS) == classes(e.FaninError)


def test_a_class_of_another_package_counts_as_the_nearest_of_ours() -> None:
    assert e.kind_name(Mine("text")) == "InvalidPlan"
    assert e.kind_name(e.FaninError("text")) == "Internal"
    assert e.public(Mine("text")) == ("text", e.InvalidPlan.class_code)


@pytest.mark.parametrize("kind", e.STATUS)
def test_each_row_names_a_grpc_status(kind: type[e.FaninError]) -> None:
    status = e.status_of(kind("text"))
    assert status is e.STATUS[kind]
    assert status.grpc in grpc.StatusCode.__members__
    assert status.grpc not in {"OK", "UNKNOWN"}
    assert (status.grpc == "INTERNAL") == (kind is e.FaninError)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (e.Unauthenticated, "not authenticated"),
        (e.StorageFull, "the coordinator has no space left; try again later"),
        (e.Unavailable, "try again later"),
        (e.Untrusted, "try again later"),
        (e.StorageUnavailable, "the coordinator cannot write its state now; try again later"),
        (e.Corrupted, "the coordinator's own state does not verify"),
    ],
)
def test_errors_about_internals_have_a_generic_public_text(kind: type[e.FaninError], text: str) -> None:
    assert e.public(kind(SECRET, code="FN-0201")) == (text, kind.class_code)


@pytest.mark.parametrize(
    "kind", [*sorted(classes(e.InvalidInput), key=str), e.PermissionDenied, e.NotFound, e.Conflict, e.RuntimeMissing]
)
def test_errors_about_the_callers_input_are_public_in_full(kind: type[e.FaninError]) -> None:
    assert e.public(kind("got 3, expected 4", code="FN-0201")) == ("got 3, expected 4", "FN-0201")


@pytest.mark.parametrize("code", ["FN-0677", "FN-0678", "FN-0696"])
def test_a_call_that_must_wait_has_its_own_text(code: str) -> None:
    assert e.public(e.Unavailable("upload: 7 are under way", code=code)) == ("upload: 7 are under way", code)
    # Only this class has such texts.
    assert e.public(e.StorageUnavailable(SECRET, code=code))[1] == e.StorageUnavailable.class_code


@pytest.mark.parametrize("kind", [kind for kind in e.STATUS if kind is not e.FaninError])
def test_a_peer_rebuilds_the_error_from_name_and_code(kind: type[e.FaninError]) -> None:
    error = e.error_named(kind.__name__, "text", "FN-0201")
    assert type(error) is kind
    assert (str(error), error.code) == ("text", "FN-0201")


@pytest.mark.parametrize("code", ["", "FN-302", "FN-02010", "fn-0302", "FN-٠٣٠٢", "FN-0201\n", "x" * 10_000])
def test_a_peers_code_of_another_form_is_not_kept(code: str) -> None:
    error = e.error_named("InvalidPlan", "text", code)
    assert error is not None
    assert error.code == e.InvalidPlan.class_code


def test_each_class_has_a_code_of_its_own() -> None:
    kinds = classes(e.FaninError)
    assert len({kind.class_code for kind in kinds}) == len(kinds)
    assert e.InvalidPlan("text of another package").code == e.InvalidPlan.class_code


def test_a_traceback_names_the_code_and_the_text_does_not() -> None:
    error = e.InvalidPlan("cohort.size: got 0", code="FN-0201")
    assert str(error) == "cohort.size: got 0"
    assert traceback.format_exception(error)[-1] == "FN-0201: `fanin explain FN-0201` says more\n"


@pytest.mark.parametrize("error", [e.InvalidPlan("a", code="FN-0201"), e.StorageFull("a", "b", code="FN-0201")])
def test_an_error_survives_pickle_with_its_code(error: e.FaninError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code, copy.__notes__) == (type(error), "a", "FN-0201", error.__notes__)


def test_an_unknown_name_is_no_fanin_error() -> None:
    assert e.error_named("SystemExit", "text", "FN-0201") is None
