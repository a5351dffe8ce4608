"""``fanin init``: a small project that runs, to begin from.

Reading order:

- ``creation``: the command
- ``template/``: the files of the project; ``@NAME@`` stands for its name
"""
