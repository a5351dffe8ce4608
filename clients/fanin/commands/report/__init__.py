"""``fanin report``: a Run, or a simulation, as one HTML file that needs nothing else.

Reading order:

- ``content``: what a report has
- ``of_run``, ``of_simulation``: it, from a coordinator or from the JSON of a simulation
- ``charts``: curves as inline SVG
- ``page``: the HTML
- ``command``: the command
"""
