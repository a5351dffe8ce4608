"""An operator's uploads and downloads report their progress, byte for byte."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support import federations as f
from support.hosted import Hosted

from fanin.clients.operator import Operator


def test_uploads_and_downloads_report_each_byte_once(tmp_path: Path) -> None:
    shown: Counter[str] = Counter()
    totals: Counter[str] = Counter()

    @contextmanager
    def transfers(text: str, total: int) -> Iterator[Callable[[int], None]]:
        totals[text] += total
        yield lambda num_bytes: shown.update({text: num_bytes})

    host = Hosted(tmp_path).start()
    try:
        bundle = f.bundle_in(tmp_path, f.SMALL_SHAPES)
        with Operator.connect(host.address, host.ca, host.operator_token, transfers) as operator:
            operator.publish_bundle(bundle)
            operator.publish_bundle(bundle)
            operator.start_run("run", f.plan(), bundle, f.PUBLISHER)
            data = operator.parameter_bytes(operator.version("run").version)
    finally:
        host.stop()
    # The second time, the coordinator has all Chunks.
    assert shown == totals and list(shown) == ["uploading", "downloading version 0 of run run"]
    assert shown["downloading version 0 of run run"] == len(data) and shown["uploading"] > len(data)
