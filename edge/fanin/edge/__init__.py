"""The part that devices, the coordinator and the datacenter share: Bundles, codecs, runtimes and the export.

Rooms and modules in reading order:

    tensors     named float32 tensors as one flat vector, and their canonical bytes
    parameter_files  files of parameters: canonical bytes, and .npz
    lengths     the lengths of a model's sequences, and padding up to the next one
    batch_sizes the batch sizes of a Bundle, among which a Plan chooses
    signatures  the callable graphs of a Bundle: their ports
    rings       sums modulo a power of two, and the bytes of masked values
    basis       the facts of a Round on which both sides of its protocol agree
    clipped     the codec of a Round with differential privacy
    ranges      ranges of activations, their int8 grids, and histograms of extreme values
    files       durable replacement of files
    spans       spans of traces, sent by OpenTelemetry
    scopes      what a line of the log is about
    bundles/    signed manifests, slots, Versions, int8 quantization
    codecs/     the grid, and Updates as integers on it
    noise/      privacy noise: integers of exact distributions from a seed
    masking/    secure aggregation: masks that cancel in the sum of a Round
    floors/     the privacy floor: the least that a device accepts
    queries/    statistics of a fleet without training: a query, the integers of a device, the result
    runtimes/   the inference libraries behind one contract, and measurement of a Version
    metrics/    metrics of predictions: functions and graphs
    assembly/   Bundles from graphs of other exporters
    export/     from a torch module to a Bundle (the only room here that imports torch)
"""

import os

# Since 1.31 the wheels of onnxruntime for Linux have telemetry: with the import, the library writes an id of the device
# below the home folder, and then sends events to its vendor. What a device sends is what fanin documents.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
