"""Metrics of predictions: functions and graphs, on held-out data and on the validation part of each device.

Modules in reading order:

    metric      ``Metric``, the metrics of fanin, and those of other distributions by name
    logits      the metrics of fanin that want logits
    graphs      a metric that is an ONNX graph
    declared    the metrics that a Plan asks of devices
    contract    the check of a metric, for the tests of one's own
"""
