"""Every error that instep raises, and the one interruption that is not an error."""


class InstepError(Exception):
    """Base of all errors of instep. The message says what happened, where, and what to do."""


class ConfigError(InstepError):
    """The configuration is wrong: unknown key, wrong type, unreadable file."""


class PluginError(InstepError):
    """A plugin cannot be loaded, or one of its hooks answered against the contract."""


class UsageError(InstepError):
    """The script breaks the loop contract. Repeating the step would not help, so the job ends."""


class RecoveryFailed(ExceptionGroup[Exception]):
    """One attempt of a recovery failed; holds what each phase or plugin raised."""


class NoCheckpoint(InstepError):  # noqa: N818 - an answer
    """From the function of ``session.on_checkpoint``, on all ranks: there is none that could be loaded. The message says why."""


class GiveUp(InstepError):  # noqa: N818 - the last rung of the ladder
    """No rung of the ladder is left. The message says why each of them failed."""


class CommsError(InstepError, RuntimeError):
    """A collective failed because a peer or a connection is gone. A recovery usually follows at once."""


class Interrupted(BaseException):
    """Unwinds the block after a fault somewhere in the world; user code must let it pass."""
