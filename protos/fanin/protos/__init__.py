"""The words of the wire as values: ``messages``, ``plans``, ``runs``, their conversion, Chunks, and all errors."""
