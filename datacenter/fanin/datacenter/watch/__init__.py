"""Watch: measurements of a job, and the diagnosis of a job that hangs.

Modules, in reading order:

- ``meters``: one record of measurements per step.
- ``sinks``: JSON lines, a status line, TensorBoard.
- ``timeline``: the spans of a rank's steps, as a trace.
- ``flops``: FLOPs of a token, peaks of hardware, MFU.
- ``watchdog``: ends a job that makes no progress.
- ``activity``: the current activity of a rank.
- ``hangs``: the rank that hangs, from the reports of all ranks.
"""
