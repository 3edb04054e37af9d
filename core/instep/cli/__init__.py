"""The ``instep`` command: the only part that prints. Each subcommand is one module, imported when it is called."""
