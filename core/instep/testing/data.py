"""The laws of data: the very next batch after every fault, for a script that uses the plugin's loader."""

from collections.abc import Collection
from typing import ClassVar

import pytest

from instep.testing.drilled import DrilledContract
from instep.testing.faults import Faults


class DataContract(DrilledContract):
    """Laws of ``resume_data``. Give it a ``script`` that trains with the plugin's loader; a drill compares every gradient of every step."""

    torch: ClassVar[bool] = True
    covers: ClassVar[Collection[str]] = ("resume_data",)

    @pytest.mark.parametrize("phase", ["loader", "barrier", "after"])
    def test_the_next_batch_is_the_right_one(self, phase: str) -> None:
        """A rank dies while a batch is delivered, in the barrier of the commit, and right behind it: no batch is lost or seen twice."""
        self._need("resume_data")
        self._drill(Faults().kill(rank=1).at(step=4, phase=phase))

    def test_a_second_fault_while_data_is_resumed(self) -> None:
        """The rank that was being replaced dies again."""
        self._need("resume_data")
        self._drill(Faults().kill(rank=1, birth=0).at(step=4).kill(rank=1, birth=1).at(phase="verify"))
