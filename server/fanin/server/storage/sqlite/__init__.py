"""The store: everything of the coordinator that is not bulk bytes, in one SQL database.

``engine`` opens and migrates it; ``devices``, ``runs`` and ``rounds`` are its three sides, each a small class
over SQLAlchemy Core. Every method is one transaction.
"""
