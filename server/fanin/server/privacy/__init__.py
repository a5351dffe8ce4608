"""Accounting of differential privacy: epsilon and delta of releases, and the noise that a budget needs.

What the numbers promise, and which of them are bounds, is on the page docs/explanation/differential-privacy.md. The
library ``dp-accounting`` (the extra ``privacy``) composes; it is imported on first use.

Modules in reading order:

    releases      what is released: its sensitivity, its noise and its sampling
    noising       the noise of a Run: terms, check of an Update, what the fold adds to a sum
    accounting    epsilon and delta of releases
    ledger        the text of a row, and the check of a budget before the next release
    calibration   the least noise whose releases stay within a budget
    planning      the table of a budget over Rounds
"""
