"""Loggers get each line once, though a step may run again: each call has a number, and one that has happened is left out.

A replacement of rank 0 goes on in the version and in the file of its predecessor.
"""

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from instep.agent.channel import Environment
from instep_lightning.adopt import adopted, inherited
from instep_lightning.flavour import part

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.session import Session
    from instep.torch.effects import Effects

_NUMBERED = ("log_metrics", "log_graph", "log_image", "log_text", "log_table", "log_audio", "log_video")


@contextmanager
def once(trainer: "Trainer", session: "Session", effects: "Effects") -> Iterator[None]:
    """While the training runs, each call of a logger of this rank happens once in the job."""
    if session.rank != 0:
        yield
        return
    with ExitStack() as stack:
        for logger in trainer.loggers:
            _same_version(logger, session)
            if Environment.read().birth and isinstance(logger, part(trainer, "loggers").CSVLogger):
                _go_on(logger)
            numbered = {name: _numbered(name) for name in _NUMBERED if callable(getattr(logger, name, None))}
            stack.enter_context(adopted(logger, numbered, effects))
        yield


def _numbered(name: str) -> Callable[..., None]:
    def call(logger: Any, *args: object, **kwargs: object) -> None:
        def effect() -> None:
            getattr(inherited(logger), name)(*args, **kwargs)
            logger.save()  # what is buffered only would be lost with this process

        cast("Effects", logger._instep).once(effect)

    return call


def _same_version(logger: Any, session: "Session") -> None:
    if getattr(logger, "_version", "none") is None:
        logger._version = session.once(lambda: logger.version)


def _go_on(logger: Any) -> None:
    """A CSVLogger would delete the file that it finds."""
    module = part(logger, "loggers.csv_logs")
    writer = type("ExperimentWriter", (module.ExperimentWriter,), {"_check_log_dir_exists": lambda _: None})(log_dir=logger.log_dir)
    file = Path(writer.metrics_file_path)
    if file.exists():
        with file.open(newline="") as lines:
            writer.metrics_keys = next(csv.reader(lines), [])
    logger._experiment = writer
