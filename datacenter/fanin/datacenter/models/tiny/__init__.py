"""The convolutional reference models of MLPerf Tiny.

Modules, in reading order:

- ``layers``: padding, norms and blocks that the models share.
- ``ds_cnn``: keyword spotting.
- ``resnet8``: image classification.
- ``mobilenet``: visual wake words.

Reference:
    Banbury et al. 2021, MLPerf Tiny Benchmark, arXiv 2106.07597.
"""
