"""The folder of a device.

    lock                     held by the process that runs this device
    device.key               the Ed25519 key that identifies this device
    device.pub               its public half, in hexadecimal
    device.certificate       by an authority, over the public key, in hexadecimal; only for secure aggregation
    device.secret            32 random bytes, in hexadecimal; the draws of an app derive from them (``seeds``)
    policy.toml              the owner's policy, if there is one (``device.policy``)
    privacy.json             what the device knows of its own privacy (``device.policy``)
    seen.json                {run id: [epoch, number] of the highest verified Version}
    served                   the Publication of the served model
    chunks/<sha256>          verified Chunks; the least recently used ones are removed first
    chunks/<sha256>.part     a Chunk whose download is incomplete
    updates/<assignment>.header, .payload
    states/<run>.<round>.state    the states of stages after the Update of a Round
    locals/<run>.<round>.state    the personal parameters after the training of a Round
    exchanges/<assignment>@<phase>.exchange    a message of a Round's phase, and its answer
    journals/<run>.journal   what a round protocol must never do twice
    journals/<run>.begun     the digest of the journal that is whole, and of two while it is replaced
    trainings/<assignment>.training    the state of an unfinished training

Files with other names (``.DS_Store``, ``lost+found``) are ignored and never removed.

Reading order:

- ``protocols``: the stores as a session uses them
- ``cache``: the folder with its lock, its key and its secret
- ``seeds``: the seed of what the device's own code draws, from its secret
- ``chunks``: downloaded Chunks
- ``updates``: Updates that the coordinator has not accepted yet
- ``states``: the states of stages, and personal parameters, each stored together with an Update
- ``exchanges``: the messages of the Assignment under way
- ``journals``: the journals of round protocols
- ``personal``: the personal parameters before and after a training, in their store
- ``trainings``: the state of an unfinished training
- ``records``: the highest Version of each Run, and the served Publication
- ``files``: durable writes and the listing of a folder
"""
