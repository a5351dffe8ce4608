"""The device side of the device protocol: one session over a connection, with durable state in a folder.

Modules, in reading order:

    embed.py       ``join``: take part from within an app
    client.py      the client: a session in a process, over a transport; its reports of progress
    session/       the state machine of a session
    session_driver.py  carries out the actions of a session
    exchanges.py   the messages of a Round's phases: made once, kept, sent and repeated
    conditions.py  whether the device may work now
    updates.py     the trainer's interface, and the encoding of its result as an Update
    contract.py    ``check_trainer``, the contract of a Trainer
    training/      local SGD on the device's examples, its resumption, and the validation of the int8 model
    graphs.py      the open graphs of a Bundle, kept between Rounds
    downloads.py   Bundles and Versions onto the device, many Chunks over one call
    models.py      the Chunks that a Publication needs, and opening them verified
    policy/        the floor of the device's privacy, its refusals, and its own ledger
    serving.py     predictions with the newest Version
    storage/       the device's folder: key, secret, Chunks, Updates, records
    site/          the state of the device for its owner: a file, and a page
    footprint.py   return unused memory to the system

An Update passes these files on its way from the trainer to the wire:

    1. session_driver.py   begins the training of an Assignment whose Update is not stored yet
    2. updates.py          ``begin_stages`` reads the states of the stages
    3. client.py           calls the trainer, on the thread of the client
    4. training/trainer.py trains, and returns a ``Change``
    5. updates.py          ``apply_stages`` takes the Change through the stages, then through the codec
                           (``fanin.edge.codecs.pipeline``); ``header_of`` adds statistics and telemetry
    6. storage/            stores the personal parameters, the states, the payload and, last, the header
    7. session_driver.py   reads the stored payload slice by slice, and asks ``conditions.py`` before each
    8. ../transport.py     sends the header and the slices, from the offset that the coordinator names
"""
