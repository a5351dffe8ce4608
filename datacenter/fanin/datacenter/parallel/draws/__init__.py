"""The random numbers that a model draws while it trains, the same on any mesh.

Each number is a function of (seed, step, global number of the example, module, number of the draw in the module,
position in the example). Ranks, microbatches, accumulation steps and resumes change none of these. So ranks with one
activation draw the same numbers, a rank with a shard of an activation uses its slice of the complete draw, and a
recomputation repeats a draw.

Modules, in reading order:

- ``sites``: the draws of a model, by module
- ``recording``: finds the draws of a model before it is spread over ranks
- ``words``: random values on any device, from a counter
- ``operators``: torch's random operators, computed from given values
- ``step``: the draws of one rank: which examples a pass computes, and which slice the rank has
"""
