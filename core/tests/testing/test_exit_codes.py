"""A plugin that fails on the ranks, where no command has looked before, ends the job with the exit code of every plugin error."""

from pathlib import Path

import pytest

from instep.errors import InstepError
from instep.testing import Jobs, Script


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"plugins.init_gloo": {"threadz": 1}}, "[plugins.init_gloo]"),
        ({"plugins.init_gloo": {"threads": 0}}, "greater than or equal to 1"),
    ],
)
def test_wrong_settings_of_a_plugin_that_only_ranks_load(job: Jobs, tmp_path: Path, settings: dict[str, object], part: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import instep\ninstep.init()\n")
    try:
        outcome = job.run(Script(str(script), ranks=2, steps=1), settings=settings).outcome
    except InstepError as error:
        pytest.fail(f"the agent loaded it: {error}")
    assert outcome.code == 2, outcome.message
    assert part in outcome.message
