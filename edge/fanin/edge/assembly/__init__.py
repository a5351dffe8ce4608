"""Assembly: a Bundle from graphs that another exporter wrote.

Modules in reading order:

    facts      read the TOML file that lists the graphs
    assemble   check the graphs and write the Bundle
"""
