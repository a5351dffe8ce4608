"""What a coordinator reports about its work: ``logs.py`` writes its effects to the log."""
