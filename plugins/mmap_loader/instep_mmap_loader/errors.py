"""What the loader raises."""

from instep.errors import InstepError


class LoaderError(InstepError, RuntimeError):
    """A batch cannot be had: the dataset raised, its deadline passed, or the cache's directory is not to be trusted."""


class Refused(InstepError):  # noqa: N818 - never leaves the loader
    """A file of the cache is not what it should be. The loader makes the batch again; the message says what was wrong."""


class NoRoom(InstepError):  # noqa: N818 - never leaves the loader
    """Shared memory is too small, or no producer stays alive. The loader goes on without the cache."""
