"""What follows the last Round of a simulation. An error or Ctrl-C there leaves the result of the federation as it is.

Reading order:

- ``per_client``: each client evaluates the last Version and its own model
- ``baseline``: the same model is trained on the pooled data
"""
