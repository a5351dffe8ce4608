"""``converted``: a conversion that asks the cache first."""

import logging
import os
from collections.abc import Callable, Mapping

from fanin.edge.export.formats.cache.digests import digest_of
from fanin.edge.export.formats.cache.files import folder_from
from fanin.edge.export.graph.traced import Traced

LOG = logging.getLogger("fanin.edge.export")


def converted(graph_format: str, signatures: Mapping[str, Traced], convert: Callable[[], bytes]) -> bytes:
    """Return the file of some Signatures, from the cache or from the converter.

    Args:
        graph_format: ``"onnx"`` or ``"tflite"``.
        signatures: Traced graphs by Signature name.
        convert: The conversion. Its errors are raised, and not kept.
    """
    folder = folder_from(os.environ)
    key = digest_of(graph_format, signatures) if folder.path is not None else None
    if key is None:
        return convert()
    data = folder.read(key)
    if data is None:
        data = convert()
        folder.write(key, data)
    else:
        LOG.debug("%s: %s is in the cache", graph_format, " and ".join(signatures))
    return data
