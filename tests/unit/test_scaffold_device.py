"""A device of a Run with SCAFFOLD: its control variate, and valid and wrong auxiliary tensors of a Version."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.staged import FEEDBACK, NUM, SCAFFOLD, Course, auxiliary_bytes, control_of, course, scaffold, take_part
from support.values import PUBLISHER, STRANGER

from fanin.edge.bundles.versions import add_auxiliary
from fanin.edge.tensors import TensorTable, encode_parameters
from fanin.protos import messages as m
from fanin.protos.chunks import artifact_of, cut

BOTH = (SCAFFOLD, FEEDBACK)
STATES = [(0, 0), (0, 1), (0, 1), (3, 0), (3, 4)]
"""Round 2 fails, and Version 3 is a rollback."""


def test_a_device_follows_the_algorithm_of_the_paper(tmp_path: Path) -> None:
    fleet = course(tmp_path, STATES, BOTH)
    works = list(fleet.works)
    assert take_part(fleet, tmp_path) == scaffold(fleet, works)
    assert fleet.failures == []


def test_auxiliary_tensors_are_downloaded_for_stages_that_read_them_alone(tmp_path: Path) -> None:
    fleet = course(tmp_path / "with", STATES, BOTH)
    works = list(fleet.works)
    take_part(fleet, tmp_path / "with")
    artifacts = [work.version.auxiliary.get("control") for work in works]
    assert [artifact is None for artifact in artifacts] == [True, False, False, True, False]
    assert {ref.sha256 for artifact in artifacts if artifact for ref in artifact.chunks} <= fleet.served
    # The same Versions, in a Run whose stages read no auxiliary tensor.
    plain = Course(
        bundle=fleet.bundle,
        works=[replace(work, stages=(FEEDBACK,), grid=work.grid[:2]) for work in works if work.version.auxiliary],
        chunks=fleet.chunks,
    )
    take_part(plain, tmp_path / "without")
    assert plain.failures == []
    assert not {ref.sha256 for artifact in artifacts if artifact for ref in artifact.chunks} & plain.served


def replace_auxiliary(fleet: Course, tensors: Mapping[str, bytes], *, is_signed: bool = True) -> None:
    """Replace the auxiliary tensors of the newest Version."""
    work = fleet.works[-1]
    artifacts = {name: artifact_of(data) for name, data in tensors.items()}
    version = add_auxiliary(PUBLISHER if is_signed else STRANGER, work.version, artifacts)
    if not is_signed:
        version = replace(version, public_key=PUBLISHER.public)
    fleet.works[-1] = replace(work, version=version)
    fleet.chunks |= {ref.sha256: data for tensor in tensors.values() for ref, data in cut(tensor)}


def lengthen(fleet: Course) -> None:
    replace_auxiliary(fleet, {"control": auxiliary_bytes(np.zeros(NUM + 1, np.float32))})


def remove(fleet: Course) -> None:
    replace_auxiliary(fleet, {})


def rename(fleet: Course) -> None:
    replace_auxiliary(fleet, {"controls": auxiliary_bytes(np.zeros(NUM, np.float32))})


def sign_by_a_stranger(fleet: Course) -> None:
    replace_auxiliary(fleet, {"control": auxiliary_bytes(np.zeros(NUM, np.float32))}, is_signed=False)


def exchange(fleet: Course) -> None:
    """Put the tensor of another Version under the signature of this one."""
    version = fleet.works[-1].version
    auxiliary = {"control": artifact_of(auxiliary_bytes(control_of(7)))}
    fleet.works[-1] = replace(fleet.works[-1], version=replace(version, auxiliary=auxiliary))


def change_layout(fleet: Course) -> None:
    table = TensorTable.of({"valuez": (NUM,)})
    replace_auxiliary(fleet, {"control": encode_parameters(table, np.zeros(NUM, np.float32))})


def change_bytes(fleet: Course) -> None:
    (ref,) = fleet.works[-1].version.auxiliary["control"].chunks
    data = fleet.chunks[ref.sha256]
    fleet.chunks[ref.sha256] = data[:-1] + b"\xff"


def start_lineage(fleet: Course) -> None:
    fleet.works[-1] = replace(fleet.works[-1], state=m.StageState(lineage=1, round=0))


@pytest.mark.parametrize(
    ("harm", "text", "downloads"),
    [
        (
            remove,
            (
                "version 1 of run run: got the auxiliary tensors [], expected 'control', which the stages of the "
                "assignment read [FN-0831]"
            ),
            False,
        ),
        (
            rename,
            (
                "version 1 of run run: got the auxiliary tensors ['controls'], expected 'control', which the stages of "
                "the assignment read [FN-0831]"
            ),
            False,
        ),
        (
            lengthen,
            (
                "version 1 of run run: got the auxiliary tensor 'control' of 108 bytes, expected 104 by the bundle's "
                "manifest [FN-0828]"
            ),
            False,
        ),
        (
            sign_by_a_stranger,
            "version 1 of run run: the signature does not match; it was changed after it was signed [FN-0373]",
            False,
        ),
        (
            exchange,
            "version 1 of run run: the signature does not match; it was changed after it was signed [FN-0373]",
            False,
        ),
        (
            change_layout,
            "version 1 of run run: auxiliary tensor 'control': names or shapes differ from the bundle's [FN-0828]",
            True,
        ),
        (change_bytes, "auxiliary tensors: chunk ", True),
        (
            start_lineage,
            (
                "version 1 of run run: got the auxiliary tensors ['control'], expected none in the first version of a "
                "lineage [FN-0831]"
            ),
            False,
        ),
    ],
)
def test_a_version_with_a_wrong_auxiliary_tensor_is_refused(
    tmp_path: Path, harm: Callable[[Course], None], text: str, downloads: bool
) -> None:
    fleet = course(tmp_path, [(0, 0), (0, 1)], BOTH)
    harm(fleet)
    version = fleet.works[-1].version
    take_part(fleet, tmp_path)
    (failure,) = fleet.failures
    assert failure == text or (failure.startswith(text) and harm is change_bytes)
    assert list(fleet.payloads) == [1]
    chunks = {ref.sha256 for artifact in version.auxiliary.values() for ref in artifact.chunks}
    assert bool(chunks & fleet.served) == downloads
    # A refused Version does not block later ones, and the state before it is kept.
    assert [path.name for path in (tmp_path / "device" / "states").iterdir()] == ["run.1.state"]


def test_an_auxiliary_tensor_that_was_damaged_on_disk_is_downloaded_again(tmp_path: Path) -> None:
    fleet = course(tmp_path, [(0, 0), (0, 1)], BOTH)
    works = list(fleet.works)
    expected = scaffold(fleet, works)
    take_part(fleet, tmp_path)
    (ref,) = works[1].version.auxiliary["control"].chunks
    path = tmp_path / "device" / "chunks" / ref.sha256
    path.write_bytes(path.read_bytes()[:-1])
    fleet.works, fleet.served = works[1:], set()
    assert take_part(fleet, tmp_path)[2] == expected[2]
    assert fleet.failures == []
    assert fleet.served == {ref.sha256}
