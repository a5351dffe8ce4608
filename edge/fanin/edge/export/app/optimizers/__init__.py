"""Optimizers as pure functions: gradients, parameters and state in, the next parameters and state out.

The learning rate, the number of the step and the ``settings`` are inputs of the graph, so that a Plan sets them. All
other values are fixed at the export. A momentum or a weight decay of 0.0 is no input unless it is ``settable``: a graph
without it is smaller and faster.

- ``optimizer``: the Protocol ``Optimizer``, and the inputs of a step.
- ``fields``: the types of fields, also those of the App, and the ranges of settings.
- ``rules``: those of torch.
- ``lion``: Lion, which torch lacks.
- ``recipe``: the Recipe, with the optimizer and all other training options of an App.
"""
