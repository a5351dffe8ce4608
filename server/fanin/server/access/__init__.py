"""Access to the coordinator: authentication of callers, and limits of their load.

Modules, in reading order:

    authority.py     the local certificate authority
    registry.py      enrolled devices, the signatures of their calls, and tokens of people
    permissions.py   the role that each call of a person needs
    open_calls.py    the calls under way, which a ban or a revocation ends
    replays.py       each signed call is served once
    interceptors.py  the checks of every gRPC call
    rates.py         the rate of calls of each device, and of wrong credentials of each address
    limited_log.py   a log with few lines a minute for what peers cause
    limits.py        the limits of a coordinator's load
    connections.py   the limits of gRPC connections
    permits.py       uploads at full speed
    delay_budget.py  how long a slow device may occupy a transfer
"""
