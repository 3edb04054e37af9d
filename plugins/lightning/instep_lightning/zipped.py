"""What ``torch.save`` wrote: a zip with a checksum of each entry, which torch itself does not look at when it loads."""

import pickle  # noqa: TID251 - for the name of its error: nothing is unpickled here
import zipfile
from typing import IO

import torch

from instep.errors import InstepError
from instep_lightning.flavour import Foreign


class Unusable(InstepError):  # noqa: N818 - an outcome of reading
    """A checkpoint cannot be loaded; the message continues a sentence about it."""


def intact(file: IO[bytes]) -> None:
    """Compare each entry with its checksum. Raises ``Unusable`` naming one that differs."""
    if not torch.serialization.get_crc32_options():
        return
    try:
        with zipfile.ZipFile(file) as entries:
            bad = entries.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise Unusable(f"is damaged or incomplete ({error})") from None
    if bad:
        raise Unusable(f"is damaged: {bad} has another checksum than it was written with")


def load(file: str | IO[bytes]) -> dict[str, Foreign]:
    """Tensors and plain values; of a path the tensors stay in the file. Raises ``Unusable`` for what is damaged, or more than that."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    except pickle.UnpicklingError as error:
        raise Unusable(_refused(file, error)) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise Unusable(f"is damaged or incomplete ({str(error).splitlines()[0]})") from None
    if not isinstance(saved, dict):
        raise Unusable("is no checkpoint of Lightning")
    return saved


def _refused(file: str | IO[bytes], error: Exception) -> str:
    """What stands in a file that only unpickling could bring back."""
    if not isinstance(file, str):
        file.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError):
        names = []
    if not names:
        return f"is damaged, or was not written by Lightning ({str(error).splitlines()[0]})"
    return (
        f"would have to be unpickled: it holds {', '.join(sorted(names))}. Leave that out of save_hyperparameters() and of what callbacks "
        "save, or trust it by torch.serialization.add_safe_globals([...])"
    )
