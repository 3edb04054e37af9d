"""PyTorch Lightning under instep: ``Trainer(callbacks=[InstepCallback()], ...)``."""

from instep_lightning.callback import InstepCallback

__all__ = ["InstepCallback"]
