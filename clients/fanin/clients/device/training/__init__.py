"""Training on a device: local SGD on its own examples, and the validation of the int8 model.

Reading order:

- ``trainer``: ``RuntimeTrainer``, the loop over epochs and batches
- ``passes``: what each pass of a training trains: FedRep and Ditto have two
- ``local_data``: the examples of a device, the evaluation of a Version, and the ranges of its activations
- ``statistics``: the answer to the query of a statistics Run, instead of a training
- ``resuming``: when the state of a training is saved, and how a training resumes from it
- ``work``: how many of its steps a device does
- ``tuning``: the training of the last Version that a device keeps for itself; ``tuner``: its course on a device
"""
