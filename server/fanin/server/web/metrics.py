"""``/metrics``: the metrics of the coordinator for Prometheus. The guard admits a session, or a token in a header."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fanin.server.web.guard import METRICS_PATH

RenderMetrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Returns the metrics and their content type. Its argument is the header ``Accept``."""


def metrics_route(render: RenderMetrics) -> Route:
    """Return the route of the metrics."""

    async def metrics(request: Request) -> Response:
        body, content_type = await render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Route(METRICS_PATH, metrics)
