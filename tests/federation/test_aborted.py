"""Rounds aborted in one process, also where the run was stopped around them and resumed: all verify."""

import pytest
from tiny import tiny

from fedmerit.simulation.run import run
from fedmerit.verify import verify_folder

pytestmark = pytest.mark.long


class Stopped(Exception):
    """Somebody stopped the run."""


@pytest.mark.parametrize("switch", ["true", "false"])
@pytest.mark.parametrize(("aborted", "stopped"), [([1], 1), ([2], 1), ([2], 2), ([1, 2], 1), ([2, 3], 3)])
def test_an_aborted_round_before_or_after_a_resume_verifies(tmp_path, switch, aborted, stopped):
    config = tiny(
        "training.rounds=4",
        f"secure_aggregation.enabled={switch}",
        f"participation.away={{client-0={aborted}, client-1={aborted}}}",
    )

    def watch(step):
        if step.stage == "round" and step.round == stopped:
            raise Stopped

    with pytest.raises(Stopped):
        run(config, tmp_path / "run", watch=watch)
    assert f"rounds: {stopped} of 4, {sum(one <= stopped for one in aborted)} aborted" in list(
        verify_folder(tmp_path / "run")
    )
    run(config, tmp_path / "run", resume=True)
    assert f"rounds: 4 of 4, {len(aborted)} aborted" in list(verify_folder(tmp_path / "run"))
