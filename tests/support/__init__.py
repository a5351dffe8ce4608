"""Code that several suites share: real processes, small models, data."""
