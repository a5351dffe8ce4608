"""Training over any mesh with the numbers of one process: one function a file, applied in the order of ``build``."""
