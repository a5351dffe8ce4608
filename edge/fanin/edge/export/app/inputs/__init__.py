"""The data of an App: inputs by name, and the output for the loss and the predictions.

- ``named``: a tensor, a tuple or a dict as tensors by name, and the call of a module with them
- ``checks``: the values of these tensors
- ``sequences``: lengths that fit the data, and rows by length
- ``outputs``: one tensor of an output that is a tuple or a dict, by its path
"""
