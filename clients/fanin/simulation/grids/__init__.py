"""Studies: a grid of Plans for several methods and seeds, with one table, and a folder from which they go on.

Reading order:

- ``points``: one simulation of a study, and its file
- ``study``: ``Study``, its simulations one after the other, and ``StudyResult``
"""
