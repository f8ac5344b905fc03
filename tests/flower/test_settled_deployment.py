"""A settled run between processes: the example app on a SuperLink and five SuperNodes on 127.0.0.1.

One hospital is killed (-9) in the last round, when its masked update has left, and is started again once the
server has noticed; the server waits for it at the settlement. Another one states one percent too much.
"""

import shutil

import pytest
from deployment import verified
from federation_in import HERE, NAMES, make_keys

from fedmerit.errors import FedmeritError
from fedmerit.ledger.chain import Ledger
from fedmerit.verify import verify_folder
from loopback import Loopback, Simulation
from loopback.processes import HANG, wait_for

VICTIM, LIAR, VERIFIER = "Dale", "Bridge", "Abbey"
LIES = """

class Liar(type(app)):
    def _member(self, place, context):
        member = super()._member(place, context)
        member.misstates = context.node_config.get("misstates")
        return member


app.__class__ = Liar
"""
"""A member whose own machine says so misstates; all others are as in the example."""


@pytest.fixture
def example(request, tmp_path, monkeypatch):
    """A copy of the example in which a member may lie."""
    folder = shutil.copytree(request.config.rootpath / "examples" / "flower-hospitals", tmp_path / "app")
    monkeypatch.syspath_prepend(str(request.config.rootpath / "examples" / "flower-hospitals"))
    client = folder / "hospitals" / "client_app.py"
    client.write_text(client.read_text() + LIES)
    return folder


@pytest.mark.alone
@pytest.mark.timeout(4 * HANG)
def test_a_deployment_is_settled_with_who_is_back_and_names_a_liar(example, tmp_path):
    import demo
    from hospitals.task import HOSPITALS

    roster, out = demo.make_roster(tmp_path), tmp_path / "run"
    nodes = {
        name: {"fedmerit-key": str(demo.key_of(tmp_path, name)), "fedmerit-roster": str(roster)}
        for name in HOSPITALS
    }
    nodes[LIAR]["misstates"] = 1.01
    with Loopback(tmp_path / "federation", nodes, demo.THREADS) as federation:
        config = {"roster": str(roster), "server-key": str(demo.server_key(tmp_path)), "out": str(out)}
        run = federation.submit(example, {**config, "rounds": 2, "patience": HANG, "join": HANG})

        def goes_on():
            federation.check()
            if run.over:
                raise FedmeritError(f"the run is over already:\n{run.output[-3000:]}")

        wait_for("masked", lambda: federation.sent(VICTIM, "train") == 2, alive=goes_on)
        federation.kill(VICTIM)
        notes = out / "notes.txt"
        away = f"{VICTIM} is away"
        wait_for(away, lambda: notes.exists() and away in notes.read_text(), alive=goes_on)
        federation.start_member(VICTIM)
        run.wait()
    with Ledger(out / "ledger.sqlite", read_only=True) as ledger:
        settled = [record.body for record in ledger.records("settled")]
        stated = {record.author for record in ledger.records("statement")}
        countersigned = {record.author for record in ledger.records("countersigned")}
    assert stated == countersigned == set(HOSPITALS)
    first, last = [(one["missing"], one["named"], one["final"]) for one in settled]
    assert first == ([VICTIM], [], False)  # those who were there stated before anybody waited
    assert last == ([], [LIAR], True)
    said = verified(out, tmp_path / VERIFIER, roster)
    assert "settlement: 0 of 2 equations hold" in said
    assert f"settlement: in round 1 {LIAR}" in said
    assert f"settlement: in round 2 {LIAR}" in said


@pytest.mark.alone
@pytest.mark.timeout(2 * HANG)
def test_a_simulation_is_settled(tmp_path):
    roster, out = make_keys(tmp_path), tmp_path / "run"
    with Simulation(tmp_path / "simulation", {"OMP_NUM_THREADS": "1"}) as simulation:
        config = {"roster": str(roster), "out": str(out), "fedmerit-rehearsal": str(tmp_path)}
        config |= {"method": "settled", "patience": HANG, "join": HANG}
        simulation.simulate(HERE / "contract_app", len(NAMES), config).wait()
    lines = list(verify_folder(out, archive=out / "archive"))
    assert "settlement: 2 of 2 equations hold" in lines
    assert any(line.startswith("rehearsal: one simulation held all keys") for line in lines)
