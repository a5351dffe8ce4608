"""The page of a coordinator: what operators see and do in a browser.

Modules, in reading order:

    listener.py   the socket of the page, and uvicorn in the coordinator's event loop
    app.py        the routes, composed into one application
    guard.py      the checks of every request
    sessions.py   cookies and tokens of forms
    views.py      the pages that show something
    devices.py    the pages of devices, and their changes
    actions.py    signing in, and commands of operators
    reads.py      the read models of the views
    overview.py   the facts of the coordinator
    stream.py     live events
    texts.py      events in words
    rendering.py  templates, and the forms of values in them
    templates/, static/   HTML, and the style sheet and the modules of the browser
"""
