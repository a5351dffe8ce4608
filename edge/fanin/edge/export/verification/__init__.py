"""The check of the module before the trace, and that the exported graphs compute the same as it.

- ``norm_rows``: the sample of each row of the input of a norm.
- ``ready``: the checks before the trace: a pass changes nothing, draws little, and depends only on its batch.
- ``eager``: the train step of eager torch.
- ``padding``: whether a row depends on the padding after its end.
- ``pure``: a pass uses only its batch and torch's draws, and changes no counter, clock or generator.
- ``batch_loss``: a loss of a batch leaves masked samples out.
- ``verify``: steps, evaluation, int8 and preprocessing of a Bundle in one runtime.
- ``cost``: the cost of int8, and whether a module is trained.
- ``comparison``: a tensor of a graph against eager torch's, with a bound on rounding errors.
"""
