"""Access to the coordinator: authentication of callers, and limits of their load.

Modules, in reading order:

    authority.py     the local certificate authority
    tokens.py        the first tokens
    registry.py      enrolled devices, and the signatures of their calls
    replays.py       each signed call is served once
    interceptors.py  the checks of every gRPC call
    rates.py         the rate of calls of each device
    limited_log.py   a log with few lines a minute for what peers cause
    limits.py        the limits of a coordinator's load
    connections.py   the limits of gRPC connections
    permits.py       uploads at full speed
    delay_budget.py  how long a slow device may occupy a transfer
"""
