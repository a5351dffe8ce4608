"""Graphs of one or several lengths as one callable: ``dispatch`` runs each batch by the graph of its length."""
