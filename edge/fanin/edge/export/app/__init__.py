"""What an ML engineer writes: the App with its module, its data, its loss and its Recipe, validated when it is created.

- ``app``: the App.
- ``losses``: losses of one number for each sample.
- ``optimizers/``: the Recipe, and the optimizers as pure functions.
- ``inputs/``: the inputs of a module by name, and the output for the loss.
- ``normalizing``: a layer that normalizes an input by the statistics of a fleet.
- ``decompositions``: an App's own forms of operators, and ``check_decomposition`` for their tests.
- ``accepted``: the requirements for the module.
- ``calls``: calls of the App's own code.
- ``loading``: an App from a file.
"""
