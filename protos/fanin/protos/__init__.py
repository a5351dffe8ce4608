"""The wire: messages, their conversion to protobuf, Chunks, Plans and errors. No IO, no clock, no grpc.

Rooms and modules in reading order:

    errors             all errors, and what a peer may see of each
    codes/             what the code of each error means, for ``fanin explain`` and a page
    names              forms of ids, keys and signatures
    texts              parts of sentences for people
    numbers            numbers among values of any type
    roles              the role of a tensor, and the range of its values
    records            the check of records that other packages create
    chunks             Artifacts as content-addressed Chunks
    plans/             the Plan (``plan.proto``): its keys, and the proof that its sums cannot overflow
    messages/          both protocols (``fleet.proto``, ``control.proto``) as dataclasses
    fields             annotations of fields whose wire form differs from what their types say
    wire               all dataclasses to protobuf and back
    addresses          HOST:PORT
    calls              the signed metadata of a device's calls
    release            the version number of this package
"""
