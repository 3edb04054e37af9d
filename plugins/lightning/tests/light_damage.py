"""What can be wrong with a checkpoint on disk."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch


def flip(path: Path) -> None:
    """One bit in the middle is another one."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Its end was not written."""
    os.truncate(path, path.stat().st_size * 2 // 3)


def unpickle(path: Path) -> None:
    """It holds an object that only unpickling brings back."""
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, "hyper_parameters": {"folder": Path("somewhere")}}, path)


def lose(path: Path) -> None:
    """It is gone."""
    (shutil.rmtree if path.is_dir() else Path.unlink)(path)


HARM: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "unpickle": unpickle, "lose": lose}
