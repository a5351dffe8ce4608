"""Version number of this package. pyproject.toml reads it from here.

``importlib.metadata`` could return it too, but loads the email parser, which costs 3 MB on a device.
"""

__version__ = "0.1.0"
