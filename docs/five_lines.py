"""A griffe extension: the five lines that end every hook's docstring become a list, which Markdown would run together."""

import re
from typing import Any

import griffe

_LINE = re.compile(r"^(When|Runs on|Return|Combine|If it raises): ", re.MULTILINE)


class FiveLines(griffe.Extension):
    """Marks the five lines of a hook specification as a list."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called by griffe for each function that it has read."""
        if func.docstring is not None:
            func.docstring.value = _LINE.sub(r"- **\1**: ", func.docstring.value)
