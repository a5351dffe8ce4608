"""Privacy noise: integers of exact distributions from a seed, equal on every machine.

Pure functions of numpy and ``cryptography``, on devices and on the coordinator. What the noise promises is on the page
docs/explanation/differential-privacy.md.

Modules in reading order:

    distributions   discrete Gaussian, discrete Laplace and Skellam; ``draw``: integers by position; their ``reach``
    streams         the random words of a block of values, from a seed
    inversion       exact inversion: outcomes with real probabilities, decided by integer bounds
    bounds          integer bounds of exp(-q)
    strips          discrete Gaussian and discrete Laplace of any scale
    poisson         bounds of the weights of a Poisson distribution
    clipping        integers of a clipped change, with a proven L2 norm
    adaptive        the clip norm of the next Round, and what its bits cost
    loss            the privacy loss of releases in closed form, for a device's ledger
    shares          the noise that each device adds under masks: its variance, its loss, and the ring of the sum
"""
