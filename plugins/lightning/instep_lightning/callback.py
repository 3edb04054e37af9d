"""The callback that switches recovery on: it joins the job, and marks the trainer whose training is to be recovered."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import instep
from instep.agent.channel import Environment
from instep.errors import UsageError
from instep.session import Session, current
from instep_lightning import attach, supported
from instep_lightning.adopt import adopted, members
from instep_lightning.fit import Fit
from instep_lightning.flavour import Callback
from instep_lightning.strategy import Averaging

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class InstepCallback(Callback):
    """Makes ``trainer.fit`` recoverable: ``Trainer(callbacks=[InstepCallback()], ...)`` in a script that ``instep run`` starts.

    Making it joins the job, so make it before anything else talks to other ranks. One ``fit`` of a script is recovered; what comes before
    or behind it (``validate``, ``test``, ``predict``) runs as ever. Without ``instep run`` it does nothing, and warns once.
    """

    training: ClassVar[type[Fit]] = Fit
    outside: ClassVar[Mapping[str, object]] = members(Averaging)
    """What the strategy gets when the trainer validates, tests or predicts."""

    def __init__(self) -> None:
        super().__init__()
        self._fitted = False
        self._fit: Fit | None = None
        self._session = _join()
        if self._session is not None:
            attach.attach(type(self))

    @property
    def session(self) -> Session | None:
        """This rank's session; ``None`` where nothing is protected."""
        return self._session

    def around(self, trainer: "Trainer", run: Callable[[], object], *, fitting: bool) -> object:
        """Run what a trainer does, so that a training is recovered. Raises ``UsageError`` for one that cannot be."""
        session = self._session
        if session is None:
            return run()
        if not fitting:
            with adopted(trainer.strategy, self.outside, self):
                return run()
        try:
            self._first()
            self.check(trainer)
            self._fit = self.training(trainer, session)
            with self._fit.attached():
                return run()
        except UsageError as error:
            session._engine.fatal(error)
            raise
        finally:
            self._fit = None

    def check(self, trainer: "Trainer") -> None:
        """Raise ``UsageError`` for a trainer whose training cannot be recovered, before anything of it is built."""
        supported.check(trainer)

    def on_save_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, object]) -> None:  # noqa: ARG002
        """A checkpoint of a recoverable training tells where in which run it was saved."""
        if self._fit is not None:
            self._fit.rung.mark(checkpoint)

    def _first(self) -> None:
        if self._fitted:
            raise UsageError(
                "a second trainer.fit in one script: instep protects the objects of one training. Train to the end in one fit "
                "(max_epochs), or start a script for each; trainer.validate, test and predict may follow a fit"
            )
        self._fitted = True


def _join() -> Session | None:
    if Environment.read().channel is None:
        warnings.warn("InstepCallback without `instep run`: training works, but nothing is protected", stacklevel=3)
        return None
    session = current() or instep.init()
    return session if isinstance(session, Session) else None
