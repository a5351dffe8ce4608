"""The device's session: a state machine that decides the next action of a device.

Reading order:

- ``events``: the phases, the events that a driver reports, the actions that it carries out
- ``protocols``: the device's side of a round protocol
- ``secagg``: that of secure aggregation
- ``known``: that of the protocol which an Assignment names
- ``machine``: the transition table
- ``outcomes``: the event for an error; the Bundle that the data do not fit
- ``progress``: the log line for an event
- ``tracing``: the spans of actions
"""
