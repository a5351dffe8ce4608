"""Whether a device can take part in a Run. Pure functions of its capabilities, the Plan and the Bundle."""

from collections.abc import Sequence

from fanin.protos.messages import Capabilities
from fanin.protos.plans import PLAIN_PROTOCOL, Plan


def unsuitable(capabilities: Capabilities, plan: Plan, graph_formats: Sequence[str], download_bytes: int) -> str:
    """Return why a device cannot take part in a Run, or an empty string if it can.

    Args:
        capabilities: The device's capabilities.
        plan: The Run's Plan.
        graph_formats: The formats in which the Bundle has every graph.
        download_bytes: The size of the device's first download.
    """
    if plan.codec.name not in capabilities.codecs:
        return f"codec: got {list(capabilities.codecs)}, expected {plan.codec.name}"
    names = [stage.name for stage in plan.stages]
    if not set(names) <= set(capabilities.stages):
        return f"stages: got {list(capabilities.stages)}, expected {names}"
    protocol = plan.round.protocol
    if protocol not in (PLAIN_PROTOCOL, *capabilities.round_protocols):
        return f"round protocol: got {list(capabilities.round_protocols)}, expected {protocol}"
    if not set(graph_formats) & set(capabilities.graph_formats):
        return f"graph format: got {list(capabilities.graph_formats)}, expected one of {list(graph_formats)}"
    limit = capabilities.max_download_bytes
    if limit and download_bytes > limit:
        return f"download: a limit of {limit} bytes, expected at least {download_bytes}"
    return ""
