"""The number of this release: the one place where it stands; pyproject.toml reads it from here.

A process that asked its own installation for it would load a parser of mail headers: 3 MB on a device.
"""

__version__ = "0.1.0"
