"""Reports of a coordinator about its work: ``logs.py`` writes its effects to the log."""
