"""Bundles: signed manifests with content-addressed graphs, and the Versions that fill them.

Modules in reading order:

    bundle          open, verify, write a Bundle
    manifest        the facts of a Bundle
    slots           the places in an int8 graph that a Version fills
    derived         constants and folded tensors, further sources of slots
    manifest_json   the JSON form of the manifest
    rows            strict reader of JSON objects
    keys            Ed25519 keys
    versions        sign and verify Versions
    quantize        from parameters to slot values
    initializers    constants and nodes of an ONNX file
    formats         the graph formats as files
    arrays          a Bundle without graphs, for models that code on the device trains
"""
