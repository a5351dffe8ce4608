"""The device side of the device protocol: one session over a connection, with durable state in a folder.

Modules, in reading order:

    embed.py       ``join``: take part from within an app
    client.py      the client: a session in a process, over a transport
    session/       the state machine of a session
    driver.py      carries out the actions of a session
    conditions.py  whether the device may work now
    updates.py     the trainer's interface, and the encoding of its result as an Update
    training.py    local SGD on the device's examples, and the validation of the int8 model
    graphs.py      the open graphs of a Bundle, kept between Rounds
    downloads.py   Bundles and Versions onto the device
    fetching.py    many Chunks over one call
    models.py      the Chunks that a Publication needs, and opening them verified
    serving.py     predictions with the newest Version
    storage/       the device's folder: key, Chunks, Updates, records
    footprint.py   return unused memory to the system
"""
