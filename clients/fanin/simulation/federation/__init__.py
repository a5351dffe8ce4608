"""A coordinator and its devices in this process, on a virtual clock.

Reading order:

- ``clock``: ``run_virtual``, an event loop whose clock jumps to the next timer, so a long deadline costs no time
- ``loopback``: ``Fleet``, the methods of a coordinator; a device's calls without a network; calls that all break
- ``device``: ``VirtualDevice``, the production session over that transport; ``memory``: its folder
- ``observed``: the events of a device's part in a Round
- ``unreliable``: a coordinator from the view of a device with faults
- ``member``: ``Member``, a device with habits that leaves and returns
- ``rotation``: ``Rotation``, more clients than are present at a time
- ``synthetic``: a trainer and a Bundle for all but training
- ``coordinator``: a production coordinator that can stop and start again
- ``federation``: ``Federation``, the coordinator with its devices
- ``scenario``: ``play``, one Run from a ``Scenario`` to its ``Outcome``
"""
