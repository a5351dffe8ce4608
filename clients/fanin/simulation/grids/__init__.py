"""Studies: a grid of Plans for several methods and seeds, with one table, and a folder from which they go on.

Reading order:

- ``points``: one simulation of a study, and its file
- ``results``: ``StudyResult``, the best values of the grid and the Rounds to a target
- ``study``: ``Study``, its simulations one after the other
"""
