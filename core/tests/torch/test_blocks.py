"""Blocks of a session: values, several in a row, and what ends a job."""

from pathlib import Path

from session_world import fault, play, same

from instep.agent.spawner import Server

TWO = """
@session.recoverable
def first():
    while session.step < 4:
        step()
    return {"at": session.step, "list": [1, 2.5, None]}

@session.recoverable
def second(value, *, more):
    while session.step < 8:
        step()
    return value["at"] + more

one = first()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
two = second(one, more=10)
save(one=one, two=two, weights=weights.tolist(), total=total.item(), rng=torch.rand(1).item())
"""


def test_a_replacement_passes_finished_blocks_and_gets_their_values(tmp_path: Path, sessions: Server) -> None:
    clean = play(TWO, tmp_path / "clean", sessions)
    broken = play(TWO, tmp_path / "broken", sessions, fault("kill", 1, "collective", 6))
    same([clean, broken])
    assert clean.saved[0]["two"] == 14
    assert len(broken.outcome.incidents) == 1
    assert broken.outcome.incidents[0].scope == "in_process"
