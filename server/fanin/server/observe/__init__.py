"""Reports of a coordinator: ``logs.py`` writes its effects to the log, ``health.py`` reports whether it serves."""
