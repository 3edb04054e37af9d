"""A shard group as a receiver sees it: taking over what arrived tears this rank until the recovery has succeeded."""

from collections.abc import Callable, Sequence

from torch import Tensor

from instep.torch.share import Share


class Receiving:
    """``hooks.SharedState`` over ``Share`` that calls ``tearing`` before anything of this rank is overwritten."""

    def __init__(self, share: Share, tearing: Callable[[], None]) -> None:
        self._share, self._tearing = share, tearing
        self.name, self.replicas, self.layouts = share.name, share.replicas, share.layouts

    def present(self) -> tuple[object, list[object]]:
        """See ``hooks.SharedState``."""
        return self._share.present()

    def describe(self) -> tuple[bytes, Sequence[Tensor]]:
        """See ``hooks.SharedState``."""
        return self._share.describe()

    def destination(self, schema: bytes, *, staged: bool) -> Sequence[Tensor]:
        """See ``hooks.SharedState``; tensors that are not staged are overwritten from here on."""
        if not staged:
            self._tearing()
        return self._share.destination(schema, staged=staged)

    def accept(self) -> None:
        """See ``hooks.SharedState``."""
        self._tearing()
        self._share.accept()

    def align(self, schema: bytes) -> None:
        """See ``hooks.SharedState``."""
        self._share.align(schema)

    def digest(self) -> int:
        """See ``hooks.SharedState``."""
        return self._share.digest()
