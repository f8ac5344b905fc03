"""A folder in which nobody was scheduled can be used again, and no other."""

import hashlib

import pytest
from federation_in import NAMES, NODES, grid_of, run
from lies import exchange_of

from fedmerit.errors import ProtocolError, StoreError
from fedmerit.federation.verify import verify_folder
from fedmerit.ledger import Ledger


def everything(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def failed_start(home):
    """Two of four join, in half a second."""
    grid = grid_of(home)
    grid.dead = {NODES["client-2"], NODES["client-3"]}
    with pytest.raises(ProtocolError, match="2 of 4 members joined"):
        run(home, grid, join=0.5)
    grid.dead.clear()
    return grid


# ------------------------------------------------------------------------------------ a start without a round


def test_a_start_that_too_few_joined_leaves_its_folder_free(home):
    grid = failed_start(home)
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert {record.kind for record in ledger.records()} == {"run", "pool", "join"}
        before = next(ledger.records("run")).body["run"]
    _, rounds = run(home, grid)
    assert [set(one.reports) for one in rounds] == [{*NAMES}] * 2
    list(verify_folder(home / "run"))
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        (record,) = ledger.records("run")
        assert record.body["run"] != before


def test_a_folder_with_a_schedule_is_never_touched(home):
    """Also where no round came to an end: the server was killed in its first."""
    grid = grid_of(home)

    def before(node, message):
        if exchange_of(message).exchange == "share":
            raise KeyboardInterrupt

    grid.before = before
    with pytest.raises(KeyboardInterrupt):
        run(home, grid)
    (home / "run" / "scores.json").unlink()
    (home / "run" / "scores.csv").unlink()
    kept = everything(home / "run")
    with pytest.raises(StoreError, match="run: not empty; a Flower run cannot be resumed, give a new folder"):
        run(home, grid_of(home))
    assert everything(home / "run") == kept


@pytest.mark.parametrize("name", ["thesis.tex", "keys/mine.pem", "checkpoints/model-0001.safetensors"])
def test_what_no_start_wrote_is_never_removed(home, name):
    grid = failed_start(home)
    (home / "run" / name).write_text("precious")
    kept = everything(home / "run")
    with pytest.raises(StoreError, match="not empty"):
        run(home, grid)
    assert everything(home / "run") == kept


def test_a_folder_of_the_engine_in_one_process_is_not_touched(home):
    failed_start(home)
    with Ledger(home / "run" / "ledger.sqlite") as ledger:
        (record,) = ledger.records("run")
    for path in (home / "run").glob("ledger.sqlite*"):
        path.unlink()
    with Ledger(home / "run" / "ledger.sqlite") as ledger, ledger.transaction():
        ledger.append("server", "run", {**record.body, "engine": "embedded"})
    with pytest.raises(StoreError, match="not empty"):
        run(home, grid_of(home))


def test_a_start_that_is_going_on_keeps_its_folder(home):
    grid = grid_of(home)
    grid.dead = {NODES["client-2"], NODES["client-3"]}
    refused = []

    def get_node_ids():
        if not refused:
            with pytest.raises(StoreError) as caught:
                run(home, grid_of(home))
            refused.append(str(caught.value))
        return [100, 101]

    grid.get_node_ids = get_node_ids
    with pytest.raises(ProtocolError, match="2 of 4 members joined"):
        run(home, grid, join=0.5)
    assert "another process is running in this folder" in refused[0]
