"""Shared state as a receiver sees it: taking over what arrived tears this rank until the recovery has succeeded."""

from collections.abc import Callable, Sequence

from torch import Tensor

from instep.torch.shared import Shared


class Receiving:
    """``hooks.SharedState`` over ``Shared`` that calls ``tearing`` before anything of this rank is overwritten."""

    def __init__(self, shared: Shared, tearing: Callable[[], None]) -> None:
        self._shared, self._tearing = shared, tearing

    def describe(self) -> tuple[bytes, Sequence[Tensor]]:
        """See ``hooks.SharedState``."""
        return self._shared.describe()

    def destination(self, schema: bytes, *, staged: bool) -> Sequence[Tensor]:
        """See ``hooks.SharedState``; tensors that are not staged are overwritten from here on."""
        if not staged:
            self._tearing()
        return self._shared.destination(schema, staged=staged)

    def accept(self) -> None:
        """See ``hooks.SharedState``."""
        self._tearing()
        self._shared.accept()

    def align(self, schema: bytes) -> None:
        """See ``hooks.SharedState``."""
        self._shared.align(schema)

    def digest(self) -> int:
        """See ``hooks.SharedState``."""
        return self._shared.digest()
