"""The subcommands of ``fanin``: where everything is composed; imported by no other room."""
