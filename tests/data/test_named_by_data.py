"""Members that the data names: a name never ends up on the samples of another."""

import tomllib
from functools import partial

import numpy as np
import pytest

from command_line import call
from fedmerit.config import as_toml, from_dict, load, recorded_hash
from fedmerit.data import load as load_data
from fedmerit.data import save
from fedmerit.errors import ConfigError, DataError, LedgerError, StoreError
from fedmerit.identity import SERVER
from fedmerit.ledger.chain import Ledger
from fedmerit.simulation.plan import plan
from fedmerit.simulation.run import run
from fedmerit.simulation.setup import prepare, read, resolve
from fedmerit.verify import verify_folder
from killing import half_run
from raising import raises
from runs import bodies_of

SITES = [f"Site {i}" for i in range(1, 11)]
SMALL = {
    "data": {"name": "npz", "test_size": 50},
    "partition": {"scheme": "group"},
    "model": {"name": "mlp"},
    "training": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
    "scoring": {"method": "reports"},
}


def write_npz(path, groups, *, flipped=(), size=None):
    """The pictures of the package, recorded by the given groups in turn; some have all labels wrong."""
    shipped = load_data("fashion-mini")
    count = size or len(shipped.y_train)
    recorded_by = np.array([groups[i % len(groups)] for i in range(count)])
    y = shipped.y_train[:count].copy()
    wrong = np.isin(recorded_by, flipped)
    y[wrong] = 9 - y[wrong]
    arrays = {key: getattr(shipped, key) for key in ("x_test", "y_test")}
    np.savez(path, x_train=shipped.x_train[:count], y_train=y, group_train=recorded_by, **arrays)
    return path


def small(path, **partition):
    raw = {section: dict(values) for section, values in SMALL.items()}
    raw["data"]["path"] = str(path)
    raw["partition"] |= partition
    return raw


def write_toml(path, raw):
    path.write_text(as_toml(raw), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight hospitals in a file, of 45 or 46 samples each."""
    return write_npz(tmp_path_factory.mktemp("eight") / "eight.npz", SITES[:8], size=363)


def test_all_groups_are_members_in_plan_and_run_and_the_resolved_config_is_what_is_recorded(eight, tmp_path):
    config = from_dict(small(eight))
    assert not config.resolved
    assert plan(config, calibrate=False).members == 8
    assert run(config, tmp_path / "run")["clients"] == SITES[:8]
    assert list(verify_folder(tmp_path / "run"))
    recorded = load(tmp_path / "run" / "config.toml")
    assert recorded.resolved
    assert recorded.partition.names == tuple(SITES[:8])
    assert recorded.partition.clients == 8
    (body,) = bodies_of(tmp_path / "run", "run")
    assert from_dict(tomllib.loads(body["terms"]["config"])) == recorded
    assert body["terms"]["config_hash"] == recorded_hash(body["terms"]["config"])
    dataset = read(recorded)
    assert resolve(recorded, dataset) == (recorded, ())
    assert resolve(config, dataset) == (recorded, ())


@pytest.mark.parametrize(
    ("partition", "other", "setting", "told"),
    [
        ({"clients": 6}, {}, "partition.clients", "got 6"),
        ({"clients": 9}, {}, "partition.clients", "got 9"),
        ({"names": ["Site 1", "Site 9", "Site 3"]}, {}, "partition.names", "'Site 9'"),
        ({}, {"corruption": {"label_flip": ["client-0"]}}, "corruption.label_flip", "'client-0'"),
        ({}, {"participation": {"away": {"Site 9": [1]}}}, "participation.away", "'Site 9'"),
        ({"names": SITES[:3]}, {"training": {"weights": dict.fromkeys(SITES[:4], 1.0)}}, "training.weights",
         "'Site 4'; members are Site 1, Site 2, Site 3"),
        ({}, {"training": {"weights": dict.fromkeys(SITES[:7], 1.0)}}, "training.weights", "Site 8"),
        ({}, {"secure_aggregation": {"threshold": 4}}, "secure_aggregation.threshold", "5 to 8"),
    ],
)  # fmt: skip
def test_plan_and_run_refuse_the_same_and_write_nothing(eight, tmp_path, partition, other, setting, told):
    raw = {**small(eight, **partition), **other}
    for attempt in (partial(plan, calibrate=False), lambda config: run(config, tmp_path / "run")):
        with pytest.raises((ConfigError, DataError)) as caught:
            attempt(from_dict(raw))
        assert caught.value.setting == setting
        assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_settings_about_a_member_reach_the_samples_of_its_group(eight):
    raw = small(eight) | {"corruption": {"label_flip": ["Site 8"]}}
    federation = prepare(from_dict(raw))
    held = {client.name: client for client in federation.clients}
    dataset = read(federation.config)
    for name in set(SITES[:8]) - {"Site 8"}:
        assert np.array_equal(held[name].y, dataset.y_train[dataset.group_train == name])
    assert np.array_equal(held["Site 8"].y, 9 - dataset.y_train[dataset.group_train == "Site 8"])


def test_who_is_left_out_is_said_by_plan_and_run(eight, tmp_path):
    config = from_dict(small(eight, names=["Site 8", "Site 1", "Site 4", "Site 3", "Site 2"]))
    note = (
        "partition.names leaves out 3 of the 8 groups of the data, 135 of 363 training samples: "
        "Site 5 (45), Site 6 (45), Site 7 (45)"
    )
    assert note in plan(config, calibrate=False).notes
    said = []
    content = run(config, tmp_path / "run", watch=said.append)
    assert content["clients"] == ["Site 8", "Site 1", "Site 4", "Site 3", "Site 2"]
    assert note in [step.text for step in said]


def test_a_ledger_must_say_who_its_members_are(eight, tmp_path):
    config = from_dict(small(eight), ["secure_aggregation.enabled=false"])
    run(config, tmp_path / "run")
    body, pool = (dict(*bodies_of(tmp_path / "run", kind)) for kind in ("run", "pool"))
    (tmp_path / "forged").mkdir()
    (tmp_path / "forged" / "config.toml").write_text(config.to_toml())
    text = config.to_toml()
    body["terms"] = body["terms"] | {"config": text, "config_hash": recorded_hash(text)}
    with Ledger(tmp_path / "forged" / "ledger.sqlite") as ledger, ledger.transaction():
        ledger.append(SERVER, "run", body)
        ledger.append(SERVER, "pool", pool)
    with pytest.raises(LedgerError, match="its config names no members"):
        list(verify_folder(tmp_path / "forged"))


# --------------------------------------------------------------------------------------------- resume


@pytest.mark.long
@pytest.mark.parametrize("partition", [{}, {"names": SITES[5:0:-1]}, {"clients": 8}])
def test_a_run_goes_on_with_the_users_own_file_and_with_the_recorded_one(eight, tmp_path, partition):
    raw = small(eight, **partition)
    toml = write_toml(tmp_path / "user.toml", raw)
    run(from_dict(raw), tmp_path / "whole")
    wanted = (tmp_path / "whole" / "scores.json").read_bytes()
    for name, file in (("a", toml), ("b", tmp_path / "b" / "config.toml")):
        folder = half_run(from_dict(raw), tmp_path / name)
        done = call("run", file, "--out", folder, "--resume")
        assert done.exit_code == 0, done.stderr
        assert (folder / "scores.json").read_bytes() == wanted
        assert list(verify_folder(folder))


def test_a_run_does_not_go_on_with_other_groups(eight, tmp_path):
    file = tmp_path / "now.npz"
    file.write_bytes(eight.read_bytes())
    folder = half_run(from_dict(small(file)), tmp_path / "run")
    write_npz(file, SITES[:9], size=363)
    with pytest.raises(StoreError, match=r"a different config: partition\.clients is 8 there and 9 here$"):
        run(from_dict(small(file)), folder, resume=True)


# ------------------------------------------------------------------------------ a saved partition


def test_a_saved_partition_names_the_members(tmp_path):
    name = "parts.json"
    parts = [np.arange(0, 30), np.arange(30, 70), np.arange(70, 90)]
    save(tmp_path / name, parts, 1813, names=["Ulm", "Bonn", "Köln"])
    raw = {**SMALL, "data": {"test_size": 50}, "partition": {"scheme": f"file:{tmp_path / name}"}}
    assert run(from_dict(raw), tmp_path / "run")["clients"] == ["Ulm", "Bonn", "Köln"]
    assert list(verify_folder(tmp_path / "run"))
    assert load(tmp_path / "run" / "config.toml").partition.names == ("Ulm", "Bonn", "Köln")
    run(from_dict(raw), tmp_path / "run", resume=True)
    raw["partition"]["names"] = ["Köln", "Ulm", "Bonn"]
    raw["corruption"] = {"label_flip": ["Bonn"]}
    clients = prepare(from_dict(raw)).clients
    assert {client.name: len(client.y) for client in clients} == {"Köln": 20, "Ulm": 30, "Bonn": 40}
    shipped = load_data("fashion-mini")
    assert np.array_equal(clients[2].y, 9 - shipped.y_train[30:70])
    raw["partition"]["names"] = ["Köln", "Bern", "Bonn"]
    with raises(DataError, setting="partition.names"):
        run(from_dict(raw), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_saved_partition_without_names_goes_on_as_it_was(tmp_path):
    file = tmp_path / "parts.json"
    save(file, [np.arange(0, 30), np.arange(30, 70), np.arange(70, 90)], 1813)
    raw = {**SMALL, "data": {"test_size": 50}, "partition": {"scheme": f"file:{file}"}}
    note = f"partition.scheme: {file} has no names: client-0, client-1, ... are given to its parts in order, "
    planned = plan(from_dict(raw), calibrate=False)
    assert note + "unchecked" in planned.notes
    assert planned.samples == (("client-0", 30), ("client-1", 40), ("client-2", 20))
    folder = half_run(from_dict(raw), tmp_path / "run")
    text = (folder / "config.toml").read_text()
    assert 'names = ["client-0", "client-1", "client-2"]' in text
    said = []
    content = run(from_dict(raw), folder, resume=True, watch=said.append)
    assert content["clients"] == ["client-0", "client-1", "client-2"]
    assert [step.text for step in said if "has no names" in step.text] == [note + "unchecked"]
    raw["partition"] = {**raw["partition"], "names": ["Ulm", "Bonn", "Köln"]}
    notes = prepare(from_dict(raw)).notes
    assert any("has no names: partition.names are given to its parts in order" in note for note in notes)


def test_sizes_belong_to_names_in_the_order_they_were_written():
    raw = {**SMALL, "data": {"test_size": 50}}
    raw["partition"] = {"scheme": "sizes", "sizes": [30, 50, 20], "names": ["Ulm", "Bonn", "Köln"]}
    held = {client.name: len(client.y) for client in prepare(from_dict(raw)).clients}
    assert held == {"Ulm": 30, "Bonn": 50, "Köln": 20}
