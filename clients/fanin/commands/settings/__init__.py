"""``fanin.toml``: each option of ``fanin serve`` is a key of the file and a variable of the environment.

The keys are read off the signature of the command, so there is no second list of them.

Reading order:

- ``keys``: the keys of a command's options, and the conversion of their values
- ``layers``: the file, the environment and the command line, of which the later one has precedence
- ``schema``: the keys as a JSON schema, for editors
- ``show``: ``fanin config``
"""

from fanin.commands.settings.layers import configured
from fanin.commands.settings.show import show_config

__all__ = ["configured", "show_config"]
