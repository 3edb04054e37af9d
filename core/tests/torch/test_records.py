"""The record of private state survives its writer, wherever that was cut."""

import os
import struct
from collections.abc import Iterator

import pytest

from instep.agent import records
from instep.agent.records import Header, Slots, State
from instep.errors import InstepError

FLAT = 100


@pytest.fixture
def record() -> Iterator[int]:
    fd = records.create("test-record")
    yield fd
    os.close(fd)


def test_header_words_and_operation_are_read_from_outside(record: int) -> None:
    header = Header(record)
    header.put("state", State.BODY)
    header.put("step", 2**40)
    header.put("joined", -1)
    header.operation("default allreduce " + "x" * 200)
    seen = records.read(record)
    assert (seen.state, seen.step, seen.joined) == (State.BODY, 2**40, -1)
    assert len(seen.operation) == 127
    header.operation("short")
    assert records.read(record).operation == "short"


def test_slots_alternate_and_keep_three_steps(record: int) -> None:
    slots = Slots(record, meta=64, flat=FLAT)
    for step in range(5):
        slots.begin(step)
        slots.flat(step)[:] = bytes([step]) * FLAT
        slots.end(step, f"step {step}".encode(), layout=9)
    assert slots.load(4, 9) == b"step 4"
    assert slots.load(3, 9) == b"step 3"
    assert slots.load(2, 9) == b"step 2"
    assert bytes(slots.flat(4)) == b"\4" * FLAT
    assert bytes(slots.flat(3)) == b"\3" * FLAT
    assert slots.load(1, 9) is None
    assert slots.load(4, 8) is None


def test_a_cut_write_leaves_the_other_steps_whole(record: int) -> None:
    slots = Slots(record, meta=64, flat=FLAT)
    for step in (0, 1, 2):
        slots.begin(step)
        slots.end(step, b"whole", layout=1)
    slots.begin(3)
    slots.flat(3)[: FLAT // 2] = b"\7" * (FLAT // 2)
    successor = Slots(record, meta=64, flat=FLAT)
    assert successor.load(3, 1) is None
    assert successor.load(0, 1) is None
    assert successor.load(1, 1) == successor.load(2, 1) == b"whole"


def test_a_payload_that_does_not_match_its_checksum_is_none(record: int) -> None:
    slots = Slots(record, meta=64, flat=0)
    slots.begin(6)
    slots.end(6, b"payload", layout=1)
    content = os.pread(record, os.fstat(record).st_size, 0)
    at = content.index(b"payload")
    os.pwrite(record, b"x", at)
    assert slots.load(6, 1) is None
    os.pwrite(record, b"p", at)
    assert slots.load(6, 1) == b"payload"
    os.pwrite(record, struct.pack("<Q", 2**40), content.index(struct.pack("<Q", 7), 4096))
    assert slots.load(6, 1) is None


def test_a_successor_with_other_needs_finds_the_slots_of_its_predecessor(record: int) -> None:
    """How much room the first birth reserved is in the record: a second birth may meet its objects in another state."""
    slots = Slots(record, meta=1000, flat=FLAT)
    for step in (4, 5):
        slots.begin(step)
        slots.flat(step)[:] = bytes([step]) * FLAT
        slots.end(step, f"step {step}".encode(), layout=1)
    for meta in (900, 1100):
        successor = Slots(record, meta=meta, flat=FLAT)
        assert successor.load(5, 1) == b"step 5"
        assert successor.load(4, 1) == b"step 4"
        assert bytes(successor.flat(5)) == b"\5" * FLAT


def test_a_slot_that_holds_the_very_payload_is_valid_for_its_new_step(record: int) -> None:
    slots, same, other = Slots(record, meta=64, flat=0), b"the same", b"other"
    for step, meta in enumerate((same, same, other, same, other, other, same, same, same)):
        slots.begin(step)
        slots.end(step, meta, layout=1)
        assert Slots(record, meta=64, flat=0).load(step, 1) == meta
    assert [slots.load(step, 1) for step in (6, 7, 8)] == [same, same, same]


def test_growth_beyond_what_was_reserved_names_the_cause(record: int) -> None:
    slots = Slots(record, meta=16, flat=0)
    slots.begin(0)
    with pytest.raises(InstepError, match="must not grow"):
        slots.end(0, b"x" * 4096, layout=1)
    assert slots.load(0, 1) is None
