import pytest
from replica_worker import Held, Spec

from instep.errors import InstepError
from instep.model import AddressBook, Plan, Role
from instep_state_replica.roster import Roster, roster

ROLES = {"K": Role.KEEP, "R": Role.RESTORE, "F": Role.ROLL_FORWARD}


def made(roles: str, donors: tuple[int, ...], *, replicas: tuple[int, ...], layouts: bool) -> Roster:
    book = AddressBook(incarnation=1, addresses=())
    plan = Plan(incarnation=1, block=0, step=0, roles=tuple(ROLES[r] for r in roles), donors={"a": donors, "b": (9,)}, book=book)
    return roster(plan, Held(Spec("a", replicas, layouts=layouts, width=1), 0))


@pytest.mark.parametrize(
    ("roles", "donors", "replicas", "layouts", "expected"),
    [
        ("KRK", (0, 2), (0, 1, 2), True, Roster(0, (0, 2), (1,), (1, 2))),
        ("KRK", (0, 2), (0, 1, 2), False, Roster(0, (0, 2), (1,), (1,))),
        ("RKF", (1, 2), (0, 1, 2), True, Roster(1, (1, 2), (0,), (0, 2))),
        ("KKK", (), (0, 1, 2), True, Roster(0, (), (), (1, 2))),
        ("KKK", (), (1, 2), False, Roster(1, (), (), ())),
        # Nobody in this group restores: whoever does belongs to others.
        ("RKKR", (), (1, 2), True, Roster(1, (), (), (2,))),
        ("RKRK", (3,), (2, 3), False, Roster(3, (3,), (2,), (2,))),
    ],
)
def test_the_roster_follows_from_the_plan(
    roles: str, donors: tuple[int, ...], replicas: tuple[int, ...], layouts: bool, expected: Roster
) -> None:
    assert made(roles, donors, replicas=replicas, layouts=layouts) == expected


def test_a_replica_that_no_donor_knows_of_is_an_error() -> None:
    with pytest.raises(InstepError, match=r"shard group 'a': ranks \[0\] restore it, and the plan has no donor"):
        made("RKK", (), replicas=(0, 1), layouts=False)
