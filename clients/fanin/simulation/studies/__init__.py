"""Comparisons and records: seeds, a centralized baseline, and simulations that resume.

Reading order:

- ``versions``: the evaluation of Versions on the test data
- ``baseline``: the same model on the pooled data
- ``seeds``: mean and spread over several seeds
- ``records``: the record of a simulation, from which it resumes; ``digests``: the digest of its App with the code
- ``plots``: figures of results
- ``boards``: the Rounds in TensorBoard
"""
