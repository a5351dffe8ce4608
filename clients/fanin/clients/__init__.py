"""The device and the operator's client. ``client`` is the device's public face, ``session`` its heart."""
