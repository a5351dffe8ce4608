"""Comparisons and records: seeds, a centralized baseline, and simulations that resume.

Reading order:

- ``baseline``: the same model on the pooled data
- ``seeds``: mean and spread over several seeds
- ``records``: the record of a simulation, from which it resumes
- ``boards``: the Rounds in TensorBoard
"""
