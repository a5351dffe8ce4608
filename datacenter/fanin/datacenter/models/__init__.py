"""Models to train: small ones for devices, transformers for the datacenter, and models of ``transformers``.

Each module is a self-contained model that does not depend on ranks or rounds. Modules therefore repeat the names
``Attention``, ``Block``, ``FeedForward`` and ``Layer``; import these only within their module.

Modules, in reading order:

- ``seeding``: makes initial parameters a function of a seed.
- ``mlp``: a multilayer perceptron.
- ``cnn``: a small CNN for the 8 x 8 digits.
- ``recurrent``: a GRU or LSTM classifier of token sequences.
- ``transformer``: a small decoder for devices.
- ``tiny``: the convolutional models of MLPerf Tiny.
- ``digits_app`` and ``fashion_app``: the Apps of the demo.
- ``decoder``: a decoder of the Llama family.
- ``encoder``: an encoder of the BERT family.
- ``pretrained_folder``: reads the files of a model folder of ``transformers``.
- ``pretrained``: builds a language model of ``transformers`` from its folder.
"""
