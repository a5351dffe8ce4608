"""Comparisons and records: seeds, a centralized baseline, and simulations that resume.

Reading order:

- ``tests``: one test set, or several by name
- ``versions``: the evaluation of Versions on the test data
- ``per_client``: the quality of the last Version for each client, before and after fine-tuning
- ``baseline``: the same model on the pooled data
- ``seeds``: mean and spread over several seeds
- ``records``: the record of a simulation, from which it resumes; ``digests``: the digest of its App with the code
- ``plots``: the figure of one result; ``comparison``: of several, with bands over their seeds
- ``boards``: the Rounds in TensorBoard
"""
