"""What a command shows while it works: lines, one line a Round, a line that updates in place, and bars.

On a terminal these use colours (not with ``NO_COLOR``) and update in place. In a pipe or a file they are plain lines.

Reading order:

- ``screen``: a stream with lines, and with a live line on a terminal
- ``bars``: the progress of a transfer or of a count
- ``steps``: the steps of a command that takes long
- ``rounds``: a Round as one line, and as a row of a table
- ``plans``: a Plan as text
- ``view``: the events of a Run on a screen
- ``follow``: the loop that shows a Run until it ends
"""
