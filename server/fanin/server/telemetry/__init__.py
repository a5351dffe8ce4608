"""What a coordinator tells programs about itself: metrics and traces.

Modules, in reading order:

    table.py        all metrics by name
    exposition.py   one scrape: the state of the coordinator as text for Prometheus
    instruments.py  the observers of one coordinator, composed
    calls.py        the interceptor that observes calls
    counts.py       counters of calls and of the work of devices
    rounds.py       the parts of Rounds
    traces.py       the spans of Rounds, devices and calls
    record.py       what the record says of Runs
    audit.py        what the audit log has, by kind
    disk.py         the space of the coordinator's folder

The other rooms do not depend on this one: it observes them by Protocols of theirs (``rounds.worker.Observer``,
``fleet.observer.FleetObserver``) and reads their state.
"""
