"""Codecs: an Update as integers on a power-of-two grid.

Modules in reading order:

    fixed   the codecs ``fixed32`` and ``int8``: encode, decode
    grid    the step of each block, and how it follows the Updates of a Round
"""
