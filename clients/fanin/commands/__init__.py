"""The ``fanin`` command line: one module a subcommand.

This room is the composition root. It is the only place that combines the other rooms, and no other room imports it.

Reading order:

- ``main``: the table of subcommands and the entry point of ``fanin``
- ``serve``, ``join``: the two long-running processes, coordinator and device
- ``site/``: the state of a device, and why it cannot connect, for the people at its machine
- ``evaluator``: the process that evaluates Versions for a coordinator
- ``export``, ``assemble``, ``bundle``, ``inspect``, ``infer``: Bundles and model files
- ``plan``, ``train``: the datacenter
- ``simulation``: simulated clients on this machine, and partitions of data
- ``studies/``: studies of simulations from a file
- ``privacy``: the noise that a privacy budget needs
- ``administration/``: tokens, devices and the audit log
- ``control/``: subcommands that call a coordinator about its Runs
- ``fleet/``: subcommands that ask devices and train nothing
- ``care/``: retention, backups and restores of a coordinator
- ``demo/``, ``bench/``: the complete loop on one machine, and measurements
- ``project/``: a new project
- ``report/``: a Run or a simulation as one HTML file
- ``shell/``: the completion of shells
- ``settings/``: ``fanin.toml``, derived from the options of ``fanin serve``
- ``display/``: lines, tables and bars of commands that take long
- ``console/``: helpers of all subcommands
"""
