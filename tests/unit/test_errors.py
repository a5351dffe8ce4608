"""The error tree: each class has a row in the table, which determines the text that a peer may read."""

import grpc
import pytest

from fanin.protos import errors as e

SECRET = "/var/lib/fanin: disk 3 broke"


def classes(kind: type[e.FaninError]) -> set[type[e.FaninError]]:
    """Return the class and all its subclasses in fanin's error tree."""
    result = {kind} if kind.__module__ == e.__name__ else set()
    return result.union(*(classes(subclass) for subclass in kind.__subclasses__()))


def test_each_class_but_the_base_has_a_row() -> None:
    assert set(e.STATUS) == classes(e.FaninError) - {e.FaninError}


@pytest.mark.parametrize("kind", e.STATUS)
def test_each_row_names_a_grpc_status(kind: type[e.FaninError]) -> None:
    status = e.status_of(kind("text"))
    assert status is e.STATUS[kind]
    assert status.code in grpc.StatusCode.__members__
    assert status.code not in {"OK", "UNKNOWN", "INTERNAL"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (e.Unauthenticated, "not authenticated"),
        (e.PermissionDenied, "not allowed"),
        (e.StorageFull, "the coordinator has no space left; try again later"),
        (e.Unavailable, "try again later"),
        (e.Untrusted, "try again later"),
        (e.StorageUnavailable, "the coordinator cannot write its state now; try again later"),
        (e.Corrupted, "the coordinator's own state does not verify"),
    ],
)
def test_errors_about_internals_have_a_generic_public_text(kind: type[e.FaninError], text: str) -> None:
    assert e.public_text(kind(SECRET)) == text


@pytest.mark.parametrize("kind", [*sorted(classes(e.InvalidInput), key=str), e.NotFound, e.Conflict, e.RuntimeMissing])
def test_errors_about_the_callers_input_are_public_in_full(kind: type[e.FaninError]) -> None:
    assert e.public_text(kind("got 3, expected 4")) == "got 3, expected 4"


@pytest.mark.parametrize("kind", e.STATUS)
def test_a_peer_rebuilds_the_class_from_its_name(kind: type[e.FaninError]) -> None:
    error = e.error_named(kind.__name__, "text")
    assert type(error) is kind
    assert str(error) == "text"


def test_an_unknown_name_is_no_fanin_error() -> None:
    assert e.error_named("SystemExit", "text") is None
