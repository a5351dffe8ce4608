"""Serving: an app always gets the newest valid Version, also after invalid offers and after a restart."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models import NUM_CLASSES, PUBLISHER, bundle_of, export_bundle, samples
from support.raw import raw_app, raw_of

from fanin.clients.device.models import OpenedModel, open_ranges
from fanin.clients.device.serving import Serving
from fanin.clients.device.storage.cache import Cache
from fanin.clients.operator import ref_of
from fanin.edge.bundles.bundle import Bundle
from fanin.edge.bundles.versions import add_auxiliary, begin_epoch, sign_version
from fanin.edge.ranges import RANGES, initial_ranges
from fanin.edge.runtimes.available import open_runtime
from fanin.edge.tensors import Float32s, TensorTable, encode_parameters
from fanin.protos.chunks import Artifact, artifact_of, cut
from fanin.protos.errors import InvalidVersion, NotFound
from fanin.protos.messages import Publication, ServedVersion, Version

RUN = "run"
X, _ = samples(5, seed=1)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A device's cache that contains the graphs of a Bundle."""
    device_cache = Cache(tmp_path / "device")
    bundle = bundle_of("mlp")
    put_chunks(device_cache, bundle.signed.data, *(bundle.artifact(name) for name in bundle.manifest.artifacts))
    return device_cache


def put_chunks(cache: Cache, *blobs: bytes) -> None:
    """Put the Chunks of these bytes into the cache."""
    for data in blobs:
        for ref, piece in cut(data):
            cache.chunks.fetch(ref, lambda offset, piece=piece: iter([piece[offset:]]))


def offer_of(cache: Cache, number: int, scale: float) -> tuple[Publication, OpenedModel]:
    """Return Version ``number`` of the Bundle, with parameters multiplied by ``scale``."""
    bundle = bundle_of("mlp")
    parameters = bundle.initial_parameters() * np.float32(scale)
    data = encode_parameters(bundle.manifest.table, parameters)
    put_chunks(cache, data)
    version = signed_version(bundle, number, artifact_of(data))
    return publication_of(bundle, version), OpenedModel(bundle=bundle, parameters=parameters)


def publication_of(bundle: Bundle, version: Version) -> Publication:
    """Return a Version in the form in which a coordinator names it."""
    return Publication(download_id=f"{RUN}.1.device", run_id=RUN, bundle=ref_of(bundle.signed), version=version)


def signed_version(bundle: Bundle, number: int, parameters: Artifact) -> Version:
    """Return the Version with this number, signed by the publisher."""
    version = None
    for _ in range(number + 1):
        version = sign_version(
            PUBLISHER, parent=version, run_id=RUN, bundle_sha256=bundle.sha256, parameters=parameters
        )
    assert version is not None
    return version


def serving(cache: Cache) -> Serving:
    """Return the serving state of a new process with this cache."""
    return Serving(open_runtime("onnx"), cache, [PUBLISHER.public])


def expected(scale: float) -> Float32s:
    """Return the Version's predictions, computed directly by the runtime."""
    bundle = bundle_of("mlp")
    return open_runtime("onnx").open_predict(bundle, bundle.initial_parameters() * np.float32(scale))({"x": X})


def test_a_prediction_without_a_version_is_an_error(cache: Cache) -> None:
    with pytest.raises(NotFound, match="FN-0833"):
        serving(cache).predict({"x": X})
    assert serving(cache).version is None


def test_the_newest_version_is_served_and_an_older_one_is_not(cache: Cache) -> None:
    server = serving(cache)
    assert server.offer(*offer_of(cache, 1, 1.0))
    assert server.version == (RUN, 1)
    assert server.offer(*offer_of(cache, 3, 0.5))
    assert not server.offer(*offer_of(cache, 2, 2.0))
    assert server.version == (RUN, 3)
    np.testing.assert_array_equal(server.predict({"x": X}), expected(0.5))


def test_a_version_of_a_later_epoch_replaces_every_number_of_an_earlier_one(cache: Cache) -> None:
    server = serving(cache)
    assert server.offer(*offer_of(cache, 3, 0.5))
    publication, model = offer_of(cache, 1, 2.0)
    later = replace(publication, version=begin_epoch(PUBLISHER, publication.version))
    assert server.offer(later, model)
    assert not server.offer(*offer_of(cache, 4, 0.5))
    assert (server.version, server.latest) == ((RUN, 1), ServedVersion(run_id=RUN, epoch=2, number=1))
    np.testing.assert_array_equal(server.predict({"x": X}), expected(2.0))


def test_a_version_that_predicts_nan_leaves_the_last_good_one(cache: Cache) -> None:
    server = serving(cache)
    server.offer(*offer_of(cache, 1, 1.0))
    assert not server.offer(*offer_of(cache, 2, np.nan))
    assert server.version == (RUN, 1)
    np.testing.assert_array_equal(server.predict({"x": X}), expected(1.0))


def test_a_restart_serves_the_same_version(cache: Cache) -> None:
    serving(cache).offer(*offer_of(cache, 2, 0.5))
    server = serving(cache)
    assert server.version == (RUN, 2)
    np.testing.assert_array_equal(server.predict({"x": X}), expected(0.5))


def ranged(cache: Cache, ranges: Float32s) -> tuple[Publication, OpenedModel]:
    """Return Version 2 with ranges of its own."""
    publication, model = offer_of(cache, 2, 0.5)
    data = encode_parameters(TensorTable.of({RANGES: ranges.shape}), ranges)
    put_chunks(cache, data)
    version = add_auxiliary(PUBLISHER, publication.version, {RANGES: artifact_of(data)})
    return replace(publication, version=version), replace(model, ranges=ranges)


def test_a_version_is_served_with_its_own_ranges_also_after_a_restart(tmp_path: Path, cache: Cache) -> None:
    bundle = bundle_of("mlp")
    ranges = initial_ranges(bundle.manifest.activations) * np.float32(2.5)
    expected_logits = open_runtime("onnx").open_predict(bundle, bundle.initial_parameters() * np.float32(0.5), ranges)(
        {"x": X}
    )
    assert not np.array_equal(expected_logits, expected(0.5))
    server = serving(cache)
    assert server.offer(*ranged(cache, ranges))
    np.testing.assert_array_equal(server.predict({"x": X}), expected_logits)
    Cache(tmp_path / "device", max_bytes=1).chunks.trim(server.chunks)
    np.testing.assert_array_equal(serving(cache).predict({"x": X}), expected_logits)


def test_a_version_with_ranges_of_another_bundle_is_not_served(cache: Cache) -> None:
    publication, _ = ranged(cache, np.zeros(2, np.float32))
    with pytest.raises(InvalidVersion, match="FN-0828"):
        open_ranges(publication, bundle_of("mlp"), cache.chunks.read)
    wrong = -initial_ranges(bundle_of("mlp").manifest.activations)
    publication, model = ranged(cache, wrong)
    with pytest.raises(InvalidVersion, match="FN-0361"):
        open_ranges(publication, bundle_of("mlp"), cache.chunks.read)
    assert not serving(cache).offer(publication, model)


def test_chunks_that_a_restart_needs_are_never_trimmed(tmp_path: Path, cache: Cache) -> None:
    server = serving(cache)
    server.offer(*offer_of(cache, 2, 0.5))
    small = Cache(tmp_path / "device", max_bytes=1)
    small.chunks.trim(server.chunks)
    assert serving(small).version == (RUN, 2)
    small.chunks.trim(())
    assert serving(small).version is None


def test_a_record_by_another_publisher_is_not_served(cache: Cache) -> None:
    serving(cache).offer(*offer_of(cache, 2, 0.5))
    assert Serving(open_runtime("onnx"), cache, ["00" * 32]).version is None


def test_a_damaged_record_or_chunk_is_not_served(tmp_path: Path, cache: Cache) -> None:
    work, model = offer_of(cache, 2, 0.5)
    serving(cache).offer(work, model)
    path = tmp_path / "device" / "chunks" / work.version.parameters.chunks[0].sha256
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert serving(cache).version is None
    (tmp_path / "device" / "served").write_bytes(b"\xff\xff")
    assert serving(cache).version is None


def test_swaps_under_load_give_one_version_or_the_other(cache: Cache) -> None:
    server = serving(cache)
    server.offer(*offer_of(cache, 1, 1.0))
    known = {scale: expected(scale).tobytes() for scale in (1.0, 0.5)}
    stop, seen = threading.Event(), set()

    def predictions() -> Iterator[bytes]:
        while not stop.is_set():
            yield server.predict({"x": X}).tobytes()

    threads = [threading.Thread(target=lambda: seen.update(predictions())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(2, 8):
        assert server.offer(*offer_of(cache, number, 1.0 if number % 2 else 0.5))
    stop.set()
    for thread in threads:
        thread.join()
    assert seen <= set(known.values())
    assert server.predict({"x": X}).shape == (5, NUM_CLASSES)


def test_raw_inputs_are_served_like_the_models_own(tmp_path: Path) -> None:
    bundle = export_bundle(raw_app("pixels"), ["onnx"])
    device_cache = Cache(tmp_path / "raw")
    data = encode_parameters(bundle.manifest.table, bundle.initial_parameters())
    put_chunks(device_cache, bundle.signed.data, data, *(bundle.artifact(name) for name in bundle.manifest.artifacts))
    version = signed_version(bundle, 1, artifact_of(data))
    work = publication_of(bundle, version)
    assert serving(device_cache).offer(work, OpenedModel(bundle=bundle, parameters=bundle.initial_parameters()))
    server, raw = serving(device_cache), raw_of("pixels").numpy()
    np.testing.assert_array_equal(
        server.predict({"x": raw}), server.predict({"x": raw_app("pixels").inputs["x"].numpy()})
    )
    assert len(server.predict({"x": raw})) == len(raw)
    with pytest.raises(ValueError, match=r"x: got uint8 \(24, 8, 8\), expected float32 .* or raw as uint8"):
        server.predict({"x": raw[..., 0]})


def test_the_served_version_survives_one_that_does_not_verify(cache: Cache) -> None:
    work, model = offer_of(cache, 1, 1.0)
    serving(cache).offer(work, model)
    # A client does this when the next Version of the same Bundle does not verify.
    cache.chunks.remove_damaged((*work.bundle.manifest.chunks, *work.version.parameters.chunks))
    assert serving(cache).version == (RUN, 1)


def test_inputs_that_are_not_finite_are_refused(cache: Cache) -> None:
    server = serving(cache)
    server.offer(*offer_of(cache, 1, 1.0))
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="x: got NaN or infinity"):
            server.predict({"x": np.full_like(X, wrong)})


def test_the_latest_version_is_the_newest_offer_served_or_refused(cache: Cache) -> None:
    server = serving(cache)
    assert server.latest == ServedVersion()
    server.offer(*offer_of(cache, 1, 1.0))
    server.offer(*offer_of(cache, 2, np.nan))
    assert (server.version, server.latest) == ((RUN, 1), ServedVersion(run_id=RUN, epoch=1, number=2))
    server.offer(*offer_of(cache, 0, 1.0))
    assert server.latest == ServedVersion(run_id=RUN, epoch=1, number=2)
    # After a restart the refused Version is tried once more.
    assert serving(cache).latest == ServedVersion(run_id=RUN, epoch=1, number=1)
