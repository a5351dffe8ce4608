"""Stages and codecs: from the change of a training to an Update, as integers on a power-of-two grid.

Modules in reading order:

    fixed            the codecs ``fixed32`` and ``int8``: encode, decode
    grid             the step of each block, and how it follows the Updates of a Round
    vector           the vector of an Update: groups of values
    trained          the values of a vector that rules, optimizers and stages work on
    stage            the contract of stages, the steps before the codec
    error_feedback   the stage that adds what the codec left out to the next Update
    scaffold         the stage of SCAFFOLD's control variates
    stages           the stages by name
    known            the names of the stages that are installed here
    pipeline         the stages of an Assignment in their order, then the codec
    statistics       the statistics that a Run declares, with their bounds
    contract         the contract of stages, as a check for the tests of one's own
"""
