"""The checks of ``fanin doctor``: why a device or a coordinator cannot be reached, and the command that corrects it.

They need the core install alone, send no credential except for the check of the token, and end within some seconds.

Reading order:

- ``checks``: a check and its result; a limit on its duration
- ``network``: the proxy, the name, the port, TLS
- ``calls``: the clock, the protocol, the token and the device, by calls to the coordinator
- ``machine``: the disk, files, runtimes, the GPU
"""
