"""Stages and codecs: from the change of a training to an Update, as integers on a power-of-two grid.

Modules in reading order:

    fixed            the codecs ``fixed32``, ``int16``, ``int8`` and ``int4``: encode, decode; the contract of codecs
    sparse           codecs that send some of the values with their positions: ``topk``
    grid             the step of each block, and how it follows the Updates of a Round
    vector           the vector of an Update: groups of values
    trained          the values of a vector that rules, optimizers and stages work on
    stage            the contract of stages, the steps before the codec
    scaffold         the stage of SCAFFOLD's control variates
    methods          the stages of FedNova, q-FedAvg and FedDyn
    stages           the stages by name; the one that adds what the codec left out to the next Update
    pipeline         the stages of an Assignment in their order, then the codec
    sparse           the codec ``topk``: some of the values, and their indices
    codec            the codec by name; one of another distribution is checked
    known            the names of the stages and codecs that are installed here
    statistics       the statistics that a Run declares, with their bounds
    contract         the contracts of stages and codecs, as checks for the tests of one's own
"""
