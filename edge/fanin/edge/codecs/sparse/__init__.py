"""Sparse codecs: payloads with some of the values of an Update, and their positions.

positions     sorted positions as bits
topk          the codec ``topk``: the values of the largest magnitude
requirements  what a sparse codec demands of a Plan and a model
"""

from fanin.edge.codecs.sparse.topk import TopK, topk

__all__ = ["TopK", "topk"]
