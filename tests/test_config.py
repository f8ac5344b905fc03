"""Settings: what is read is what is written, and what cannot mean anything is refused by name."""

import math
import re
import tomllib
import tracemalloc
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedmerit
from fedmerit.cli.run import DEMO, commented_config
from fedmerit.config import (
    SCHEMA,
    SECTIONS,
    Config,
    Partition,
    Scoring,
    Training,
    asked_for,
    difference,
    from_dict,
    load,
    recorded,
    recorded_hash,
)
from fedmerit.errors import ConfigError
from fedmerit.limits import STAGES, check_schedule
from fedmerit.scoring.validate import two_spellings
from raising import raises

SCHEMAS = Path(fedmerit.__file__).with_name("schemas")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.lists(
    st.text(st.sampled_from("aZ9éλ漢 '\"#=.,[]{}-_:;🏥"), min_size=1, max_size=8)
    .map(str.strip)
    .filter(lambda name: name and name not in (".", "..")),
    min_size=3,
    max_size=5,
    unique=True,
)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
POSITIVE = st.floats(1e-9, 1e9)


def _disjoint(lists):
    listed = [item for one in lists for item in one]
    return len(set(listed)) == len(listed)


@st.composite
def configs(draw):
    """Settings with every key away from its default."""
    names = draw(NAMES.filter(lambda names: two_spellings(names) is None))
    scheme = draw(st.sampled_from(["iid", "dirichlet", "group", "sizes", "file"]))
    each = {"min_size": len(names), "max_size": len(names)}
    sizes = draw(st.lists(st.integers(1, 99), **each) | st.lists(POSITIVE, **each))
    some = st.lists(st.sampled_from(names), unique=True)

    def by_name(values):
        return st.dictionaries(st.sampled_from(names), values)

    method = draw(st.sampled_from(["settled", "both", "reports"]))
    settled, settles = method == "settled", method != "reports"
    factors = st.floats(-9, 9).filter(lambda factor: factor != 1)
    weights = draw(st.sampled_from(["uniform", "roster", "secret", *(["scores"] if not settled else [])]))
    roster = {name: draw(POSITIVE) for name in names} if weights == "roster" else {}
    merge = {}
    if scheme == "group":
        groups = st.lists(TEXT, min_size=1, max_size=3, unique=True)
        merge = draw(by_name(groups).filter(lambda merge: _disjoint(merge.values())))
    return from_dict(
        {
            "data": {
                "name": draw(st.sampled_from(["fashion-mini", "npz", "folder", "pcam"])),
                "path": draw(TEXT),
                "test_size": draw(st.integers(0, 10**9)),
                "test_reveal": "end" if settled else draw(st.sampled_from(["fixed", "per-round"])),
                "options": draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
            },
            "partition": {
                "names": names,
                "scheme": scheme,
                "mu": draw(POSITIVE | st.integers(1, 9)),
                "minimum": draw(st.integers(1, 100)),
                "sizes": sizes if scheme == "sizes" else [],
                "file": draw(TEXT),
                "merge": merge,
            },
            "corruption": {
                "label_noise": draw(by_name(st.floats(0, 1)) | st.just("ramp")),
                "label_flip": draw(some),
                "free_rider": draw(by_name(st.sampled_from(["zero", "noise", "stale"]))),
                "duplicate": draw(by_name(st.sampled_from(names))),
                "test_set": [] if settled else draw(some),
                "misstate": draw(by_name(factors)) if settles else {},
            },
            "model": {"name": draw(TEXT), "norm": draw(st.sampled_from(["group", "batch"]))},
            "training": {
                "rounds": draw(st.integers(99, 10**6)),
                "local_epochs": draw(st.integers(1, 50)),
                "batch_size": draw(st.integers(1, 4096)),
                "lr": draw(POSITIVE),
                "weight_decay": draw(st.just(0) | POSITIVE),
                "tf32": draw(st.booleans()),
                "weights": weights,
                "roster_weights": roster,
                "weight_cap": draw(st.integers(1, 2**32 - 1)),
            },
            "participation": {
                "fraction": draw(st.floats(0.01, 1)),
                "away": draw(by_name(st.lists(st.integers(1, 99)))),
                "lost": draw(by_name(st.builds("{}:{}".format, st.integers(1, 99), st.sampled_from(STAGES)))),
            },
            "scoring": {
                "method": method,
                "utilities": draw(st.lists(TEXT, min_size=1, max_size=4, unique=True)),
                "game": "additive" if settled else draw(st.sampled_from(["additive", "renormalised"])),
                "disclose_samples": draw(st.booleans()),
                "solo": not settled and draw(st.booleans()),
                "truth": []
                if settled
                else draw(st.lists(st.sampled_from(["mr-shapley", "shapley"]), unique=True)),
            },
            "settlement": {
                "blocks": draw(st.integers(2, 64)),
                "detail": draw(st.sampled_from(["rounds", "run"])),
                "naming": draw(st.booleans()),
                "window_days": draw(st.floats(0, 36_500)),
            },
            "secure_aggregation": {
                "enabled": draw(st.booleans()),
                "bound": draw(POSITIVE),
                "threshold": draw(st.sampled_from([0, len(names)])),
                "clip": draw(st.booleans()),
            },
            "payment": {
                "missing": draw(st.sampled_from(["zero", "own-mean"])),
                "equal": draw(st.floats(0, 1)),
                "forfeit": draw(st.floats(0, 1)),
                "currency": draw(st.sampled_from(["EUR", "$"])),
            },
            "run": {"seed": draw(st.integers(0, 2**63 - 1)), "device": draw(TEXT)},
            "report": {
                "title": draw(NAMES)[0],
                "consortium": draw(NAMES)[0],
                "date": str(draw(st.dates())),
                "language": draw(st.sampled_from(["en", "de"])),
            },
        }
    )


@given(config=configs())
@settings(max_examples=60)
def test_every_key_survives_toml(config):
    text = config.to_toml()
    again = from_dict(tomllib.loads(text))
    assert again == config
    assert again.to_toml() == text
    assert recorded(text) == config
    written = tomllib.loads(text)
    assert written.pop("schema") == SCHEMA
    for section, keys in written.items():
        assert set(keys) == set(typing.get_type_hints(type(getattr(config, section))))


def test_an_empty_file_is_a_valid_run_and_the_commented_one_says_the_same(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "init.toml").write_text(commented_config())
    assert load(tmp_path / "empty.toml") == Config() == load(tmp_path / "init.toml")


def test_the_commented_file_explains_every_choice():
    lines = {line.partition(" = ")[0]: line for line in commented_config().splitlines()}
    assert "# fixed | per-round | end; per-round: a fresh slice" in lines["test_reveal"]
    assert "# settled | both | reports; both: " in lines["method"]
    assert lines["lost"].startswith('lost = {}  # {client-2 = "3:masked"}')
    assert "# Who takes part when." in commented_config()
    assert "called as factory(input_shape, outputs)" in commented_config()
    assert "called as function(model, x, y)" in commented_config()


def _variants():
    """For every setting a value that differs from its default and is allowed on its own."""
    other = {
        "path": "x", "options": {"size": 64}, "file": "x", "name": "my:own", "loss": "mse",
        "whole": ["brier"], "device": "cpu",
        "label_noise": {"client-1": 0.5}, "label_flip": ["client-1"], "free_rider": {"client-1": "zero"},
        "duplicate": {"client-1": "client-0"}, "test_set": ["client-1"], "away": {"client-1": [1]},
        "lost": {"client-1": "1:masked"}, "utilities": ["brier"], "truth": ["shapley"],
        "threshold": 5, "fraction": 0.5, "names": list("abcdef"), "title": "x", "consortium": "x",
        "date": "2026-11-30", "currency": "CHF", "equal": 0.5, "floor": 0.1, "cap": 0.5, "forfeit": 0.5,
    }  # fmt: skip
    for section in SECTIONS:
        part = getattr(Config(), section)
        for key, hint in typing.get_type_hints(type(part)).items():
            value = getattr(part, key)
            if key in ("roster_weights", "sizes", "merge", "misstate", "momentum"):
                continue  # stand with weights, scheme or method of another kind only, see below
            if typing.get_origin(hint) is typing.Literal:
                alone = (
                    one for one in typing.get_args(hint) if one not in (value, "settled", "end", "roster")
                )
                changed = next(alone)
            elif isinstance(value, bool):
                changed = not value
            elif key in other:
                changed = other[key]
            else:
                changed = value + 1
            yield section, key, changed


@pytest.mark.parametrize(("section", "key", "value"), list(_variants()), ids=lambda v: str(v)[:20])
def test_every_setting_is_compared_and_moves_the_hash(section, key, value):
    raw = {"scoring": {"method": "both"}}
    raw[section] = raw.get(section, {}) | {key: value}
    changed = from_dict(raw)
    assert difference(Config(), changed).startswith(f"{section}.{key} is ")
    assert recorded_hash(changed.to_toml()) != recorded_hash(Config().to_toml())
    assert difference(from_dict(raw), changed) == ""


def test_roster_weights_are_compared_but_not_the_order_of_names():
    weights = dict.fromkeys(Config().clients, 1.0)
    even, heavier, turned = (
        from_dict({"training": {"weights": "roster", "roster_weights": chosen}})
        for chosen in (weights, weights | {"client-0": 2.0}, dict(reversed(weights.items())))
    )
    assert difference(even, turned) == ""
    assert difference(even, heavier).startswith("training.roster_weights is {'client-0': 1.0")


def test_sizes_are_compared():
    even, other = (
        from_dict({"partition": {"clients": 3, "scheme": "sizes", "sizes": sizes}})
        for sizes in ([1, 1, 1], [1, 1, 2])
    )
    assert difference(even, other).startswith("partition.sizes is ")


def test_merged_groups_are_compared():
    one, other = (
        from_dict({"partition": {"scheme": "group", "merge": {"North": groups}}})
        for groups in (["Site 1"], ["Site 1", "Site 2"])
    )
    assert difference(one, other) == (
        "partition.merge is {'North': ['Site 1']} there and {'North': ['Site 1', 'Site 2']} here"
    )


def test_misstatements_are_compared():
    one, other = (
        from_dict({"scoring": {"method": "both"}, "corruption": {"misstate": {"client-2": factor}}})
        for factor in (1.01, 2)
    )
    assert difference(one, other) == (
        "corruption.misstate is {'client-2': 1.01} there and {'client-2': 2.0} here"
    )


def test_members_that_the_data_names_are_checked_once_they_are_known():
    raw = {
        "partition": {"scheme": "group"},
        "corruption": {"label_flip": ["Site 10"], "label_noise": {"Site 2": 0.5}},
        "participation": {"away": {"Site 1": [1]}, "lost": {"Site 3": "1:masked"}},
        "training": {"weights": "roster", "roster_weights": {"Site 1": 2.0}},
        "secure_aggregation": {"threshold": 9},
    }
    config = from_dict(raw)
    assert not config.resolved
    assert config.clients == ()
    assert (config.partition.names, config.partition.clients) == ((), 0)
    assert from_dict(tomllib.loads(config.to_toml())) == config
    with raises(ConfigError, setting="corruption.label_noise"):
        from_dict({**raw, "partition": {"scheme": "group", "names": ["Site 1", "Site 10", "Site 3"]}})
    for wrong, message in (
        (
            {"corruption": {"label_noise": {"Site 2": 1.5}}},
            r"^corruption\.label_noise\.Site 2: expected a rate",
        ),
        ({"participation": {"lost": {"Site 3": "1:lunch"}}}, r"^participation\.lost\.Site 3: expected"),
        (
            {"partition": {"scheme": "group", "clients": 2}},
            r"^partition\.clients: expected 3 to 1024 members",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            from_dict({**raw, **wrong})


def test_one_and_one_point_zero_are_the_same_setting():
    whole, broken = (from_dict({"partition": {"mu": mu}}) for mu in (1, 1.0))
    assert whole == broken
    assert difference(Config(partition=Partition(mu=1)), broken) == ""
    assert whole.to_toml() == broken.to_toml()


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, -1, True, 1.0, "2", [2]])
def test_settings_of_an_unknown_schema_are_refused(schema):
    with pytest.raises(ConfigError, match=f"^schema: expected {SCHEMA}, got "):
        from_dict({"schema": schema})


def test_counts_stay_counts_and_fractions_fractions():
    three = {"clients": 3, "scheme": "sizes"}
    assert from_dict({"partition": {**three, "sizes": [3, 4, 5]}}).partition.sizes == (3, 4, 5)
    sizes = from_dict({"partition": {**three, "sizes": [1, 0.5, 1]}}).partition.sizes
    assert [type(size) for size in sizes] == [float, float, float]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"trainin": {}}, r"^trainin: unknown section \(did you mean training\?\); expected one of data, "),
        ({"rounds": 3}, r"^rounds: unknown section \(did you mean training\.rounds\?\); expected "),
        ({"data": {"optoins": {}}}, r"^data\.optoins: unknown key \(did you mean options\?\); expected"),
        ({"partition": {"scheme": "groups"}}, r"^partition\.scheme: .*got 'groups' \(did you mean group\?\)"),
        ({"data": {"name": "Table"}}, r"^data\.name: .*got 'Table' \(did you mean table\?\)"),
        ({"training": {"round": 1}}, r"^training\.round: unknown key \(did you mean rounds\?\); expected "),
        ({"report": {"date": "30.11.2026"}}, r"^report\.date: expected a day such as 2026-11-30, got '30"),
        ({"payment": {"currency": "euro"}}, r"^payment\.currency: expected a code such as EUR, or a sign"),
        ({"report": {"title": "two\nlines"}}, r"^report\.title: expected one line of at most 120 letters"),
        ({"report": {"language": "fr"}}, r"^report\.language: expected one of en, de, got 'fr'"),
        ({"training": 3}, r"^training: expected a section \[training\], got 3"),
        ({"training": {"rounds": True}}, r"^training\.rounds: expected a whole number, got True"),
        ({"training": {"rounds": 2.0}}, r"^training\.rounds: expected a whole number, got 2\.0"),
        ({"training": {"rounds": "3"}}, r"^training\.rounds: expected a whole number, got '3'"),
        ({"training": {"rounds": 0}}, r"^training\.rounds: expected at least 1 round, got 0"),
        ({"training": {"rounds": -1}}, r"^training\.rounds: expected at least 1 round, got -1"),
        ({"training": {"lr": math.nan}}, r"^training\.lr: expected a number, got nan"),
        ({"training": {"lr": math.inf}}, r"^training\.lr: expected a number, got inf"),
        ({"training": {"lr": 10**400}}, r"^training\.lr: expected a number, got 1000"),
        ({"training": {"lr": False}}, r"^training\.lr: expected a number, got False"),
        ({"training": {"lr": 0}}, r"^training\.lr: expected a number above 0, got 0"),
        ({"training": {"lr": -0.1}}, r"^training\.lr: expected a number above 0, got -0\.1"),
        ({"training": {"weight_cap": 2**32}}, r"^training\.weight_cap: expected 1 to 2\^32 - 1"),
        ({"training": {"weights": "equal"}},
         r"^training\.weights: expected one of uniform, roster, secret, scores, current-scores, got 'equal'"),
        ({"training": {"weights": ["uniform"]}}, r"^training\.weights: expected one of uniform"),
        ({"training": {"roster_weights": {"client-0": 1}}},
         r'^training\.roster_weights: only with training\.weights = "roster"'),
        ({"training": {"weights": "roster"}},
         r"^training\.roster_weights\.client-0: expected a weight above 0, got None"),
        ({"data": {"name": "mnist"}}, r"^data\.name: expected one of fashion-mini, npz, folder, table"),
        ({"data": {"options": {"when": tomllib.loads("d = 2024-01-01")["d"]}}},
         r"^data\.options: expected a table of text, numbers, true or false, or lists and tables"),
        ({"data": {"options": {"size": math.nan}}}, r"^data\.options: expected a table"),
        ({"data": {"test_size": -1}}, r"^data\.test_size: expected 0 or more samples, got -1"),
        ({"partition": {"mu": 0}}, r"^partition\.mu: expected a number above 0, got 0"),
        ({"partition": {"mu": -0.5}}, r"^partition\.mu: expected a number above 0, got -0\.5"),
        ({"partition": {"minimum": 0}}, r"^partition\.minimum: expected at least 1 sample"),
        ({"partition": {"clients": 2}}, r"^partition\.clients: expected 3 to 1024 members: with two, each "
                                        r"learns the other's update, got 2"),
        ({"partition": {"names": ["a", "b"]}}, r"^partition\.clients: expected 3 to 1024 members: with two"),
        ({"partition": {"clients": 1025}}, r"^partition\.clients: expected 3 to 1024"),
        ({"partition": {"clients": 4, "names": ["a", "b", "c"]}},
         r"^partition\.names: expected 4 different names, got \['a', 'b', 'c'\]"),
        ({"partition": {"names": ["a", "b", "a"]}}, r"^partition\.names: expected 3 different names"),
        ({"partition": {"names": ["a", "b", 3]}}, r"^partition\.names: expected a list of texts"),
        ({"partition": {"names": "abc"}}, r"^partition\.names: expected a list of texts, got 'abc'"),
        ({"partition": {"clients": 0}}, r"^partition\.clients: expected 3 to 1024 members"),
        ({"partition": {"scheme": "file", "clients": 0, "names": ["a", "b", "c"]}},
         r"^partition\.clients: expected 3 to 1024 members"),
        ({"partition": {"merge": {"North": ["a", "b"]}}},
         r'^partition\.merge: only with partition\.scheme = "group", got \'dirichlet\''),
        ({"partition": {"scheme": "group", "merge": {"North": []}}},
         r"^partition\.merge\.North: expected at least one group, got none"),
        ({"partition": {"scheme": "group", "merge": {"North": ["a", "b"], "South": ["c", "a"]}}},
         r"^partition\.merge: group 'a' is in both 'North' and 'South'"),
        ({"partition": {"scheme": "group", "merge": {"North": "a"}}},
         r"^partition\.merge: expected a table of a list of texts by name"),
        ({"corruption": {"duplicate": {"client-0": "x"}}},
         r"^corruption\.duplicate: unknown member 'x'; members are client-0, client-1"),
        ({"partition": {"sizes": [1, "2"]}},
         r"^partition\.sizes: expected a list of whole numbers or a list of numbers"),
        ({"corruption": {"label_noise": {"client-9": 0.5}}},
         r"^corruption\.label_noise: unknown member 'client-9'; members are client-0, client-1"),
        ({"corruption": {"label_noise": "slope"}},
         r'^corruption\.label_noise: expected a table of rates or "ramp", got \'slope\''),
        ({"corruption": {"label_noise": {"client-0": "0.5"}}},
         r"^corruption\.label_noise: expected a table of numbers by name or text"),
        ({"corruption": {"label_flip": ["x"]}}, r"^corruption\.label_flip: unknown member 'x'"),
        ({"corruption": {"label_flip": "client-0"}}, r"^corruption\.label_flip: expected a list of texts"),
        ({"participation": {"fraction": 0}}, r"^participation\.fraction: expected a number above 0, at most"),
        ({"participation": {"fraction": 1.5}}, r"^participation\.fraction: expected a number above 0"),
        ({"participation": {"away": {"client-0": [0]}}},
         r"^participation\.away\.client-0: expected numbers of rounds, 1 to 10, got \[0\]"),
        ({"participation": {"away": {"client-0": [2, 11]}}},
         r"^participation\.away\.client-0: expected numbers of rounds, 1 to 10, got \[2, 11\]"),
        ({"participation": {"lost": {"client-0": "11:masked"}}},
         r"^participation\.lost\.client-0: expected a round from 1 to 10, got '11:masked'"),
        ({"partition": {"sizes": [1] * 6}},
         r'^partition\.sizes: only with partition\.scheme = "sizes", got \'dirichlet\''),
        ({"partition": {"scheme": "sizes", "sizes": [1, 2]}},
         r"^partition\.sizes: expected 6 sizes, one per client, got 2"),
        ({"partition": {"names": ["a", "b", "A"]}},
         r"^partition\.names: expected names .*, got 'a' and 'A', which differ only in case"),
        ({"partition": {"names": ["../a", "b", "c"]}},
         r"^partition\.names: '\.\./a' cannot be a member's name, because it is part of file names"),
        ({"corruption": {"label_noise": {"client-0": 1.5}}},
         r"^corruption\.label_noise\.client-0: expected a rate from 0 to 1, got 1\.5"),
        ({"participation": {"away": {"client-0": 3}}},
         r"^participation\.away: expected a table of a list of whole numbers by name"),
        ({"participation": {"lost": {"client-0": "3"}}},
         r'^participation\.lost\.client-0: expected "ROUND:STAGE" with a stage of advertise, share'),
        ({"participation": {"lost": {"client-0": "²:masked"}}}, r"^participation\.lost\.client-0: expected"),
        ({"participation": {"lost": {"client-0": "0:masked"}}}, r"^participation\.lost\.client-0: expected"),
        ({"participation": {"lost": {"client-0": "1:lunch"}}}, r"^participation\.lost\.client-0: expected"),
        ({"scoring": {"utilities": []}}, r"^scoring\.utilities: expected at least one utility, each once"),
        ({"scoring": {"utilities": ["a", "a"]}},
         r"^scoring\.utilities: expected at least one utility, each once, got \['a', 'a'\]"),
        ({"scoring": {"truth": ["banzhaf"]}},
         r"^scoring\.truth: expected mr-shapley or round-shapley or shapley, got 'banzhaf'"),
        ({"scoring": {"solo": 1}}, r"^scoring\.solo: expected true or false, got 1"),
        ({"scoring": {"method": "paid"}}, r"^scoring\.method: expected one of settled, both, reports, got"),
        ({"scoring": {"method": "settled", "game": "renormalised"}},
         r"^scoring\.game: \"renormalised\" needs measurements in the rounds, .* use 'both' or 'reports'"),
        ({"scoring": {"method": "settled", "solo": True}}, r"^scoring\.solo: true needs measurements"),
        ({"scoring": {"method": "settled", "truth": ["shapley"]}},
         r'^scoring\.truth: \["shapley"\] needs measurements'),
        ({"scoring": {"method": "settled"}, "training": {"weights": "scores"}},
         r'^training\.weights: "scores" needs measurements'),
        ({"scoring": {"method": "settled"}, "training": {"weights": "current-scores"}},
         r'^training\.weights: "current-scores" needs measurements'),
        ({"scoring": {"method": "settled"}, "corruption": {"test_set": ["client-0"]}},
         r'^corruption\.test_set: \["client-0"\] needs measurements'),
        ({"scoring": {"method": "settled"}, "data": {"test_reveal": "fixed"}},
         r"^data\.test_reveal: expected end \(or leave the key out\) with scoring\.method = 'settled', got"),
        ({"scoring": {"method": "both"}, "data": {"test_reveal": "end"}},
         r"^data\.test_reveal: expected fixed or per-round with scoring\.method = 'both', got 'end'"),
        ({"scoring": {"method": "reports"}, "data": {"test_reveal": "end"}},
         r"^data\.test_reveal: expected fixed or per-round with scoring\.method = 'reports', got 'end'"),
        *[({"scoring": {"method": method, "utilities": [name, "brier"]}},
           rf"^scoring\.utilities: '{method}' settles the first utility along its gradient, and '{name}' has "
           "none: put sharpened-accuracy or expected-accuracy first")
          for method in ("settled", "both") for name in ("accuracy", "balanced-accuracy")],
        ({"scoring": {"method": "both"}, "corruption": {"misstate": {"x": 1.01}}},
         r"^corruption\.misstate: unknown member 'x'"),
        ({"scoring": {"method": "both"}, "corruption": {"misstate": {"client-0": 1}}},
         r"^corruption\.misstate\.client-0: expected a factor other than 1"),
        ({"scoring": {"method": "both"}, "corruption": {"misstate": {"client-0": math.inf}}},
         r"^corruption\.misstate: expected a table of numbers by name, got"),
        ({"scoring": {"method": "reports"}, "corruption": {"misstate": {"client-0": 2.0}}},
         r'^corruption\.misstate: only with scoring\.method = "settled" or "both"'),
        ({"settlement": {"blocks": 1}}, r"^settlement\.blocks: expected 2 to 64 blocks, got 1"),
        ({"settlement": {"blocks": 65}}, r"^settlement\.blocks: expected 2 to 64 blocks, got 65"),
        ({"settlement": {"detail": "all"}}, r"^settlement\.detail: expected one of rounds, run, got 'all'"),
        ({"settlement": {"window_days": -1}}, r"^settlement\.window_days: expected 0 to 36500 days, got -1"),
        ({"secure_aggregation": {"bound": 0}}, r"^secure_aggregation\.bound: expected a number above 0"),
        ({"secure_aggregation": {"threshold": 3}},
         r"^secure_aggregation\.threshold: expected 4 to 6, more than half of the 6 members, got 3"),
        ({"secure_aggregation": {"threshold": 7}},
         r"^secure_aggregation\.threshold: expected 4 to 6, more than half of the 6 members, got 7"),
        ({"run": {"seed": -1}}, r"^run\.seed: expected 0 or more, got -1"),
        ({"run": {"seed": 2**63}}, r"^run\.seed: expected 0 or more, at most 2\^63 - 1, got 92"),
        ({"run": {"device": 0}}, r"^run\.device: expected text, got 0"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_named_with_their_path_and_what_is_allowed(raw, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_dict(raw)
    named = re.match(r"(\w+\.\w+)[:.]", str(caught.value))  # a section alone, or the schema, is no setting
    assert caught.value.setting == (named[1] if named else "")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"secure_aggregation": {"least": 4}},
         r"^secure_aggregation\.least: expected 5 to 6, since 5 of the 6 members must stay .*, got 4"),
        ({"secure_aggregation": {"least": 7}}, r"^secure_aggregation\.least: expected 5 to 6, .*, got 7"),
        ({"secure_aggregation": {"least": 5, "threshold": 6}},
         r"^secure_aggregation\.least: expected 6 to 6, since 6 of the 6 members must stay .*, got 5"),
        ({"participation": {"fraction": 0.5}},
         r"^participation\.fraction: expected at least 0\.751, since 5 of the 6 members must stay to the end "
         r"of a round, got 0\.5, which schedules 3"),
        ({"participation": {"fraction": 0.9}, "secure_aggregation": {"threshold": 6}},
         r"^participation\.fraction: expected at least 0\.917, since 6 of .* got 0\.9, which schedules 5"),
        ({"participation": {"fraction": 0.5}, "secure_aggregation": {"enabled": False}},
         r"^participation\.fraction: expected at least 0\.751"),
    ],
    ids=str,
)  # fmt: skip
def test_rounds_that_could_never_finish_are_refused_before_a_run(raw, message):
    """What was recorded when that was allowed is read all the same."""
    config = from_dict(raw)
    with pytest.raises(ConfigError, match=message):
        check_schedule(config)


@given(members=st.integers(3, 1024), threshold=st.integers(0, 1024))
def test_the_fraction_that_is_named_is_allowed(members, threshold):
    t = threshold if members / 2 < threshold <= members else 0
    given = {"partition": {"clients": members}, "secure_aggregation": {"threshold": t}}
    few = from_dict({**given, "participation": {"fraction": 0.5}})
    try:
        check_schedule(few)
    except ConfigError as error:
        named = float(re.search(r"expected at least ([\d.]+),", str(error))[1])
        check_schedule(from_dict({**given, "participation": {"fraction": named}}))
    else:  # 3 of 3 or 4 members are scheduled whatever the fraction
        assert few.threshold == 3


def test_the_pool_of_a_settled_run_is_shown_at_its_end_also_if_the_key_is_left_out():
    settled = from_dict({"scoring": {"method": "settled"}, "data": {"test_size": 100}})
    assert settled.data.test_reveal == "end"
    assert recorded(settled.to_toml()) == settled
    assert from_dict({}, ["scoring.method=settled"]).data.test_reveal == "end"
    assert from_dict({"scoring": {"method": "both"}}).data.test_reveal == "fixed"
    with raises(ConfigError, setting="data.test_reveal"):
        Config(scoring=Scoring(method="settled"))


@pytest.mark.parametrize(
    ("method", "reports", "settles", "word_bytes"),
    [("settled", False, True, 8), ("both", True, True, 8), ("reports", True, False, 4)],
)
def test_methods_say_what_is_done_and_only_traced_statements_need_long_words(
    method, reports, settles, word_bytes
):
    config = from_dict({"scoring": {"method": method}})
    assert (config.reports, config.settles, config.word_bytes) == (reports, settles, word_bytes)
    for short in ("settlement.naming=false", "secure_aggregation.enabled=false"):
        assert from_dict({"scoring": {"method": method}}, [short]).word_bytes == 4


@pytest.mark.parametrize(
    ("scoring", "method"),
    [
        ({}, "both"),
        ({"utilities": ["brier", "accuracy"]}, "both"),
        ({"utilities": ["accuracy"]}, "reports"),
        ({"utilities": ["balanced-accuracy", "brier"]}, "reports"),
        ({"game": "renormalised"}, "reports"),
    ],
)
def test_a_method_that_is_left_out_is_reports_where_nothing_can_be_settled(scoring, method):
    found = from_dict({"scoring": scoring})
    assert (found.scoring.method, found.method_open) == (method, True)
    again = recorded(found.to_toml())
    assert (again, again.method_open) == (found, False)
    if "utilities" in scoring and method == "reports":
        with raises(ConfigError, setting="scoring.utilities") as caught:
            from_dict({"scoring": {"method": "both", **scoring}})
        assert "or take scoring.method = 'reports'" in str(caught.value)


def test_settings_made_in_python_are_checked_too():
    with raises(ConfigError, setting="training.rounds"):
        Config(training=Training(rounds="3"))
    with raises(ConfigError, setting="partition.clients"):
        Config(partition=Partition(clients=2))


@pytest.mark.parametrize(
    "name",
    [
        "",
        " a",
        "a ",
        "a\nb",
        "a\0",
        "a/b",
        "a\\b",
        "..",
        ".",
        "server",
        "a\x1b[2J",
        "e\u0301",
        "x" * 65,
        "🏥" * 60,
    ],
)
def test_names_that_could_be_mistaken_or_break_a_file_name(name):
    with raises(ConfigError, setting="partition.names"):
        from_dict({"partition": {"names": ["fine", "also fine", name]}})


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.rounds=3", "training", "rounds", 3),
        (" training . rounds = 3 ", "training", "rounds", 3),
        ("model.name=mlp", "model", "name", "mlp"),
        ('model.name="mlp"', "model", "name", "mlp"),
        ("data.path=/a b/c=d", "data", "path", "/a b/c=d"),
        ("data.path=", "data", "path", ""),
        ("secure_aggregation.enabled=false", "secure_aggregation", "enabled", False),
        ("corruption.label_noise={client-1 = 0.5}", "corruption", "label_noise", {"client-1": 0.5}),
        ('partition.names=["a","b","c"]', "partition", "names", ("a", "b", "c")),
    ],
)
def test_overrides(override, section, key, value):
    assert getattr(getattr(from_dict({}, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.rounds", "expected section.key=value, such as training.rounds=3, got 'training.rounds'"),
        ("rounds=3", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        (".rounds=3", "expected section.key=value"),
        ("training.=3", "expected section.key=value"),
        ("training.rounds=three", r"training\.rounds: expected a whole number, got 'three'"),
        ("training.rounds=", r"training\.rounds: expected a whole number, got ''"),
        (
            "training.round=3",
            r"training\.round: unknown key \(did you mean rounds\?\); expected one of rounds",
        ),
        ("trainin.rounds=3", "trainin: unknown section"),
        ("training.lr=nan", r"training\.lr: expected a number, got nan"),
        ("partition.names=[a, b, c]", r"partition\.names: not a TOML value: '\[a, b, c\]'"),
        ('model.name="mlp', r"model\.name: not a TOML value"),
        ("data.options=" + "[" * 5000, r"data\.options: not a TOML value"),
        ("training.rounds=3\nlr=1", r"training\.rounds: expected one value, got '3\\nlr=1'"),
        ("training.rounds=" + "9" * 5000, r"training\.rounds: expected a whole number, got '999"),
    ],
    ids=lambda v: v[:40],
)
def test_overrides_that_cannot_be_meant(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_dict({}, [override])
    assert len(str(caught.value)) < 400
    assert (caught.value.setting in asked_for([override])) == (message != "trainin: unknown section")


def test_the_last_override_wins_and_the_given_mapping_is_left_alone():
    raw = {"training": {"rounds": 1}}
    assert from_dict(raw, ["training.rounds=2", "training.rounds=3"]).training.rounds == 3
    assert raw == {"training": {"rounds": 1}}
    assert from_dict(DEMO).clients[-1] == "Harbour"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[training\n", "not TOML: .*line 1"),
        (b"\xff\xfe", "expected text in UTF-8, got byte 0xff"),
        (b"a = " + b"[" * 5000, "not TOML"),
        (b"[run]\nseed = " + b"1" * 5000, "not TOML"),
        (b"[run]\nseed = 1\nseed = 2\n", "not TOML: Cannot overwrite a value"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_files_that_are_not_toml(tmp_path, data, message):
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"run\.toml: {message}"):
        load(path)


def test_a_file_that_is_not_there_and_one_with_a_byte_order_mark(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nrounds = 4\r\n")
    assert load(tmp_path / "windows.toml").training.rounds == 4


def test_errors_of_a_file_name_it_and_errors_of_overrides_do_not(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nrounds = 0\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: training.rounds: expected at least 1 round, got 0"
    with pytest.raises(ConfigError) as caught:
        load(path, ["training.lr=0.1"])
    assert str(caught.value).startswith(f"{path}: training.rounds: ")
    path.write_text("[training]\nround = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: training.round: unknown key")
    path.write_text("")
    for override, message in (
        ("training.rounds=0", "training.rounds: expected at least 1 round, got 0"),
        ("rounds", "expected section.key=value, such as training.rounds=3, got 'rounds'"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(path, [override])
        assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "[data.options]\n" + "a." * 8000 + "a = 1",
        "[data.options]\n" + "a . " * 8000 + "a = 1",
        "[data.options]\n" + '"a".' * 8000 + "a = 1",
        "[data.options]\n" + "'a.b'\t.\t" * 8000 + "a = 1",
        "[data.options." + "a." * 8000 + "a]",
        "[[data.options." + "a." * 8000 + "a]]",
        "[data]\noptions = {" + "a." * 8000 + "a = 1}",
        '[data]\nname = """x"""""\noptions = {' + "a." * 8000 + "a = 1}",
        "[data]\nname = '''x'''\noptions = [{" + "a." * 8000 + "a = 1}]",
        "[data]\nname = '\\'\noptions = {" + "a." * 8000 + "a = 1}",
        "[data]\nname = 'x' # \"\n" + "a." * 8000 + "a = 1",
    ],
)
def test_a_key_of_thousands_of_parts_is_refused_before_it_is_parsed(text):
    """A parser takes the square of their number in time and memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="expected keys of at most 16 parts"):
            recorded(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unclosed", ['\\"""\n', "\\'''\n", '"\\\n', "'''\n'", '"""\\'])
def test_text_that_is_no_toml_is_refused_in_one_pass(unclosed):
    with pytest.raises(ConfigError):
        recorded(unclosed * 20_000)


@pytest.mark.parametrize(
    "value",
    [
        "[" * 40 + "]" * 40,
        "{a = " * 40 + "1" + "}" * 40,
        "[" * 5000 + "]" * 5000,
        "{a.b.c = [" * 9 + "]}" * 9,
    ],
)
def test_values_that_are_too_deep_are_refused(value):
    with pytest.raises(ConfigError):
        recorded(f"[data]\noptions = {{x = {value}}}")


@pytest.mark.parametrize(
    "key", ["training.rounds", "training.lr", "data.test_size", "schema", "data.options"]
)
def test_numbers_that_no_one_can_print_are_refused(key):
    section, _, name = key.rpartition(".")
    huge = "0x" + "f" * 6000
    value = f"{{size = {huge}}}" if name == "options" else huge
    with pytest.raises(ConfigError, match="whole numbers of at most 128 bits"):
        recorded(f"[{section}]\n{name} = {value}" if section else f"{name} = {value}")
    with pytest.raises(ConfigError, match=r"at least 1 round, at most 2\^31"):
        recorded(f"[training]\nrounds = {2**31 + 1}")


@given(
    names=st.lists(
        st.text(st.sampled_from("ab.'\"\\#[]{}="), min_size=1, max_size=64).filter(
            lambda name: "\\" not in name and name not in (".", "..")
        ),
        min_size=3, max_size=30, unique_by=str.casefold,
    )
)  # fmt: skip
def test_names_may_hold_as_many_dots_as_they_like(names):
    """In every place where settings name members."""
    again = {
        "partition": {"names": names, "clients": len(names)},
        "training": {"weights": "roster", "roster_weights": dict.fromkeys(names, 1.5)},
        "participation": {"away": {name: [1] for name in names}},
        "corruption": {"label_noise": dict.fromkeys(names, 0.5), "label_flip": names},
    }
    config = from_dict(again)
    assert recorded(config.to_toml()) == config


def test_a_threshold_of_more_than_all_members_is_refused():
    given = {"partition": {"scheme": "group", "clients": 4}, "secure_aggregation": {"threshold": 1000}}
    with raises(ConfigError, setting="secure_aggregation.threshold"):
        check_schedule(from_dict(given))


def test_a_day_may_be_written_as_toml_has_days_without_quotation_marks(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[report]\ndate = 2026-11-30\n")
    assert load(path).report.date == "2026-11-30"
    assert from_dict({}, ["report.date=2026-11-30"]) == load(path)
    with pytest.raises(ConfigError, match=r"^report\.date: expected text, got datetime\.datetime"):
        from_dict({}, ["report.date=2026-11-30T00:00:00Z"])


def test_a_file_of_settings_in_other_letters_is_refused_in_plain_words(tmp_path):
    path = tmp_path / "my.toml"
    path.write_bytes('[report]\ntitle = "Köln"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"my\.toml: expected text in UTF-8, got byte 0xf6 at place 19: "):
        load(path)
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        load(tmp_path)
