"""What a command says at last: shown if anybody still reads, since a closed pipe must not change how the command ends."""

import sys

from instep.agent.outlet import discard


def show(text: str) -> None:
    """Print lines on standard output; nobody there to read them is no error."""
    try:
        print(text, flush=True)
    except OSError:
        discard(sys.stdout)
