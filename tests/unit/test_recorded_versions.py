"""The highest Version of a Run that a device records: it must have verified, or it would block all later ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.scripted import Script, run, scripted_coordinator
from support.values import PUBLISHER

from fanin.clients.device.storage.cache import Cache
from fanin.edge.bundles.versions import sign_version
from fanin.protos.messages import Version


def unsigned(script: Script) -> Version:
    """Return Version 9 with the signature of Version 0."""
    return replace(script.work.version, number=9)


def misfit(script: Script) -> Version:
    """Return a signed Version 9 whose parameters are not of the Bundle."""
    return sign_version(
        PUBLISHER,
        parent=replace(script.work.version, number=8),
        run_id="run",
        bundle_sha256=script.bundle.sha256,
        parameters=script.bundle.manifest.artifacts["graph"],
    )


@pytest.mark.parametrize(
    ("forge", "problem"), [(unsigned, "the signature does not match"), (misfit, "got parameters of 11 bytes")]
)
def test_a_version_that_does_not_verify_blocks_no_other(
    tmp_path: Path, forge: Callable[[Script], Version], problem: str
) -> None:
    script = scripted_coordinator(tmp_path)
    work = script.work
    script.work = replace(work, version=forge(script))
    run(script, tmp_path)
    (failure,) = script.failures
    assert f"version 9 of run run: {problem}" in failure
    assert Cache(tmp_path / "device", 1 << 20).records.highest_version("run") == (0, 0)
    script.work = work
    assert run(script, tmp_path).num_accepted == 1
    assert Cache(tmp_path / "device", 1 << 20).records.highest_version("run") == (1, 0)
