"""Ten mistakes that a plugin's author may make in what ``instep new`` wrote: how to plant each, and what the contract must say."""

import os
from dataclasses import dataclass

LEFT = f"mydetector-{os.getpid()}-"
"""How the files begin that one of the mistakes leaves in /dev/shm."""


@dataclass(frozen=True)
class Mistake:
    """Replace ``old`` by ``new`` in ``plugin.py``; ``law`` fails, with all of ``says`` in its message."""

    name: str
    old: str
    new: str
    law: str
    says: tuple[str, ...]


_QUIESCE = "        self._odd = None\n\n    @instep.hookimpl\n    def close"
_START = "        self._rank = job.rank\n"
_RESUME = '''    @instep.hookimpl
    def resume_data(self, recovery: Recovery) -> Receipt | None:
        """Only where it is easy."""
        if recovery.rank == 0:
            return None
        return Receipt(phase="resume_data", plugin=NAME, rank=recovery.rank, seconds=0.0)

    @instep.hookimpl
    def close'''

MISTAKES = (
    Mistake("misspelt hook", "def quiesce(", "def quiece(", "spelt", ("'quiece' is no hook", "did you mean 'quiesce'")),
    Mistake(
        "wrong return type",
        "    def detect(self) -> Fault | None:",
        "    def detect(self) -> bool:\n        return self._odd is not None\n\n    def _detect(self) -> Fault | None:",
        "spelt or answer",
        ("hook 'detect'", "says that it returns bool; it must return a Fault, or None", "returned False of type bool"),
    ),
    Mistake(
        "blocking past its deadline",
        "        if self._odd is None:\n            return None\n",
        "        import threading\n        threading.Event().wait()\n",
        "deadlines",
        ("hook 'detect'", "past its deadline of 5 s", "it stands at", "plugin.py:", "in detect"),
    ),
    Mistake(
        "not idempotent quiesce",
        _QUIESCE,
        "        self._done.remove(1)\n\n    @instep.hookimpl\n    def close",
        "quiesce",
        ("quiesce of Mydetector cannot be repeated", "call 2 for one fault", "ValueError", "must be idempotent"),
    ),
    Mistake(
        "leaking a thread",
        _START,
        f"{_START}        import threading\n        threading.Thread(target=threading.Event().wait, name='watcher', daemon=True).start()\n",
        "left_behind",
        ("a thread is left running after close", "watcher"),
    ),
    Mistake(
        "leaking an fd",
        _START,
        f"{_START}        import os\n        os.open('/dev/null', os.O_RDONLY)\n",
        "left_behind",
        ("open files (fd) more after", "/dev/null"),
    ),
    Mistake(
        "leaking a /dev/shm file",
        _START,
        f"{_START}        import tempfile\n        open(tempfile.mktemp(prefix='{LEFT}', dir='/dev/shm'), 'w').close()\n",
        "left_behind",
        ("files in /dev/shm are left after close", f"/dev/shm/{LEFT}"),
    ),
    Mistake("importing torch at load", "import math\n", "import math\nimport torch\n", "torch", ("imports torch", "plugin.py:4")),
    Mistake(
        "unknown setting accepted",
        "    HOOK_API:",
        '    model_config = {"extra": "ignore"}\n    HOOK_API:',
        "settings",
        ("accepts the unknown setting", "extra='forbid'"),
    ),
    Mistake(
        "None depending on rank",
        "    @instep.hookimpl\n    def close",
        _RESUME,
        "rank",
        ("hook 'resume_data'", "returned None on the ranks [0]", "took the call on [1, 2]", "None depends on the rank"),
    ),
)


def plant(source: str, mistake: Mistake) -> str:
    """The source with the mistake in it."""
    assert source.count(mistake.old) == 1, f"{mistake.name}: the template has changed, {mistake.old!r} is not in it once"
    out = source.replace(mistake.old, mistake.new)
    if "self._done" in out:
        first = "    _odd: float | None = PrivateAttr(default=None)\n"
        out = out.replace(first, f"{first}    _done: list[int] = PrivateAttr(default_factory=lambda: [1])\n")
    return out.replace("import Interruption, Job\n", "import Interruption, Job, Recovery\n").replace(
        "import Fault\n", "import Fault, Receipt\n"
    )
