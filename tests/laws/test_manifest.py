"""Law of the manifest: any other bytes or values are refused as InvalidBundle, or are read back unchanged."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.manifests import manifest

from fanin.edge.bundles.manifest_json import dump_manifest, parse_manifest
from fanin.protos.errors import InvalidBundle

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def places(row: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a JSON tree."""
    keys = list(row) if isinstance(row, dict) else list(range(len(row))) if isinstance(row, list) else []
    return [(row, key) for key in keys] + [place for key in keys for place in places(row[key])]


@given(st.data())
def test_any_value_in_any_place_is_refused_or_reads_back(data: st.DataObject) -> None:
    row = json.loads(dump_manifest(manifest()))
    container, key = data.draw(st.sampled_from(range(len(places(row)))).map(places(row).__getitem__))
    if data.draw(st.booleans()):
        container[key] = data.draw(VALUES)
    else:
        del container[key]
    try:
        parsed = parse_manifest(json.dumps(row).encode())
    except InvalidBundle:
        return
    assert parse_manifest(dump_manifest(parsed)) == parsed


@given(st.data())
def test_any_other_bytes_are_refused_or_read_back(data: st.DataObject) -> None:
    good = dump_manifest(manifest())
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(start + 3, len(good))))
    try:
        parsed = parse_manifest(good[:start] + data.draw(st.binary(max_size=3)) + good[stop:])
    except InvalidBundle:
        return
    assert parse_manifest(dump_manifest(parsed)) == parsed
