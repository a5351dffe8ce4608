"""Flower apps of the forms that people have, each a module with ``app`` and ``initial``. They do not refer to fanin.

Modules: ``data`` has the examples of a client. ``logistic``, ``rounds``, ``mixed``, ``tabular`` and ``stateful`` need
numpy alone. ``convolution``, ``loops``, ``variational``, ``language``, ``proximal``, ``doubles`` and ``adapters`` need
torch.
"""
