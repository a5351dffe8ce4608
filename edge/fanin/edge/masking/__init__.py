"""Secure aggregation: masks on integers that cancel in the sum of a Round. docs/explanation/secure-aggregation.md
specifies each byte.

All of it is pure: no clock, no IO, and entropy is an argument. Modules in reading order:

    sharing      secrets as shares over a prime field: any t of them reveal the secret
    agreement    X25519 keys, derivations with their labels, sealed shares
    keystream    masks: a key as ring words, with random access
    parameters   degree and threshold for a number of devices, from exact tails
    graph        the neighbors of a device
    terms        what all devices of an attempt agree on; the floor of a device
    settings     the options of a Plan, and the terms that follow from them
    messages     the bytes of each message
    roster       the frozen sets of an attempt, and their digests
    journal      the durable facts of a device
    device       the state machine of a device
    coordinator  the phases of the coordinator, and the correction of the sum
"""
