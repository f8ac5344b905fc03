"""Settings: what is read is what is written, and what cannot mean anything is refused by name."""

import math
import re
import tomllib
import tracemalloc
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.cli.run import DEMO, FIRST, commented_config
from fedmerit.config import (
    SCHEMA,
    SECTIONS,
    Config,
    asked_for,
    check_schedule,
    difference,
    from_dict,
    load,
    recorded,
    recorded_hash,
)
from fedmerit.errors import ConfigError, InputError
from fedmerit.notes import two_spellings
from fedmerit.settings import Data, Heading, Partition, Scoring, Training
from raising import raises

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


@st.composite
def configs(draw):
    """Settings with whatever text, numbers and names their users may write."""
    names = draw(NAMES.filter(lambda names: two_spellings(names) is None))

    def by_name(values):
        return draw(st.dictionaries(st.sampled_from(names), values))

    return from_dict(
        {
            "data": {"path": draw(TEXT), "options": draw(st.dictionaries(TEXT, PLAIN, max_size=3))},
            "partition": {"names": names, "mu": draw(POSITIVE | st.integers(1, 9))},
            "corruption": {
                "label_noise": draw(st.just("ramp")) if draw(st.booleans()) else by_name(st.floats(0, 1)),
                "label_flip": draw(st.lists(st.sampled_from(names), unique=True)),
                "free_rider": by_name(st.sampled_from(["zero", "noise", "stale"])),
                "misstate": by_name(st.floats(-9, 9).filter(lambda factor: factor != 1)),
            },
            "model": {"name": draw(TEXT)},
            "training": {
                "rounds": draw(st.integers(99, 10**6)),
                "lr": draw(POSITIVE),
                "weight_decay": draw(st.just(0) | POSITIVE),
                "weights": draw(st.just("secret") | st.fixed_dictionaries(dict.fromkeys(names, POSITIVE))),
            },
            "participation": {"away": by_name(st.lists(st.integers(1, 99)))},
            "scoring": {
                "method": "both",
                "utilities": draw(st.lists(TEXT, min_size=1, max_size=4, unique=True)),
            },
            "run": {"seed": draw(st.integers(0, 2**63 - 1)), "device": draw(TEXT)},
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


def test_an_empty_file_is_a_valid_run_and_the_commented_one_is_a_first_run(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "init.toml").write_text(commented_config())
    assert load(tmp_path / "empty.toml") == Config()
    assert load(tmp_path / "init.toml") == from_dict(FIRST)
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nrounds = 4\r\n")
    assert load(tmp_path / "windows.toml").training.rounds == 4


def test_the_commented_file_explains_every_choice_and_names_every_default_that_it_changes():
    lines = {line.partition(" = ")[0]: line for line in commented_config().splitlines()}
    assert lines["test_reveal"].endswith('  # one of "fixed", "per-round"')
    assert lines["outputs"].endswith('""  # one of "logits", "probabilities", "standardised", "plain"')
    assert lines["rule"].endswith('  # one of "fenced", "fair", "impartial", "equal", "hands"')
    assert max(map(len, commented_config().splitlines())) <= 120
    assert lines["away"].startswith("away = {}  # {client-2 = [3]}")
    assert "# Who takes part when." in commented_config()
    assert "called as factory(input_shape, outputs)" in commented_config()
    changed = {line.partition(" = ")[0] for line in commented_config().splitlines() if "# default " in line}
    assert changed == {key for section in FIRST.values() for key in section}
    assert lines["rounds"].startswith("rounds = 5  # default 10")


def test_there_are_few_settings():
    assert sum(map(len, Config().as_dict().values())) <= 59


def _variants():
    """For every setting a value that differs from its default and is allowed on its own."""
    other = {
        "path": "x", "options": {"size": 64}, "scheme": "iid", "name": "my:own", "loss": "mse",
        "device": "cpu", "weights": "secret",
        "label_noise": {"client-1": 0.5}, "label_flip": ["client-1"], "free_rider": {"client-1": "zero"},
        "away": {"client-1": [1]}, "utilities": ["brier"], "truth": ["shapley"],
        "threshold": 5, "fraction": 0.5, "names": list("abcdef"), "title": "x",
        "currency": "CHF", "equal": 0.5, "floor": 0.1, "cap": 0.5, "forfeit": 0.5,
        "held_out": 0.3, "delta": 1e-4,
    }  # fmt: skip
    for section in SECTIONS:
        part = getattr(Config(), section)
        for key, hint in typing.get_type_hints(type(part)).items():
            value = getattr(part, key)
            if key in ("sizes", "misstate", "judge"):
                continue  # stand with a scheme or method of another kind only, see below
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
    assert recorded(changed.to_toml()) == changed


WEIGHTS = dict.fromkeys(Config().clients, 1.0)


@pytest.mark.parametrize(
    ("section", "key", "one", "other", "more"),
    [
        ("training", "weights", WEIGHTS, WEIGHTS | {"client-0": 2.0}, {}),
        ("partition", "sizes", [1, 1, 1], [1, 1, 2], {"clients": 3, "scheme": "sizes"}),
        ("corruption", "misstate", {"client-2": 1.01}, {"client-2": 2}, {}),
    ],
)
def test_lists_and_tables_are_compared_value_by_value(section, key, one, other, more):
    there, here = (from_dict({section: {key: value, **more}}) for value in (one, other))
    assert difference(there, here).startswith(f"{section}.{key} is ")
    if isinstance(one, dict):  # but the order of names does not count
        assert difference(there, from_dict({section: {key: dict(reversed(one.items()))}})) == ""


def test_members_that_the_data_names_are_checked_once_they_are_known():
    raw = {
        "partition": {"scheme": "group"},
        "corruption": {"label_flip": ["Site 10"], "label_noise": {"Site 2": 0.5}},
        "participation": {"away": {"Site 1": [1]}},
        "training": {"weights": {"Site 1": 2.0}},
        "secure_aggregation": {"threshold": 9},
    }
    config = from_dict(raw)
    assert not config.resolved
    assert config.clients == ()
    assert (config.partition.names, config.partition.clients) == ((), 0)
    assert from_dict(tomllib.loads(config.to_toml())) == config
    with raises(ConfigError, setting="corruption.label_noise"):
        from_dict({**raw, "partition": {"scheme": "group", "names": ["Site 1", "Site 10", "Site 3"]}})
    with raises(ConfigError, setting="corruption.label_noise"):
        from_dict({**raw, "corruption": {"label_noise": {"Site 2": 1.5}}})
    with raises(ConfigError, setting="partition.clients"):
        from_dict({**raw, "partition": {"scheme": "group", "clients": 2}})


def test_one_and_one_point_zero_are_the_same_setting():
    whole, broken = (from_dict({"partition": {"mu": mu}}) for mu in (1, 1.0))
    assert whole == broken
    assert difference(Config(partition=Partition(mu=1)), broken) == ""
    assert whole.to_toml() == broken.to_toml()
    for sizes, kind in (([3, 4, 5], int), ([1, 0.5, 1], float)):  # counts stay counts
        read = from_dict({"partition": {"clients": 3, "scheme": "sizes", "sizes": sizes}}).partition.sizes
        assert (read, {*map(type, read)}) == (tuple(sizes), {kind})


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, -1, True, 1.0, "2", [2]])
def test_settings_of_an_unknown_schema_are_refused(schema):
    with pytest.raises(ConfigError) as caught:
        from_dict({"schema": schema})
    assert str(caught.value).startswith(f"schema: expected {SCHEMA}, got ")


SETTLED, BOTH, REPORTS = ({"scoring": {"method": method}} for method in ("settled", "both", "reports"))
BAD = {  # by setting: values that are refused beside nothing else
    "data.optoins": [{}],
    "data.name": ["Table", "mnist"],
    "data.options": [{"when": tomllib.loads("d = 2024-01-01")["d"]}, {"size": math.nan}],
    "data.test_size": [-1],
    "partition.scheme": ["groups"],
    "partition.mu": [0],
    "partition.clients": [2, 1025, 0],
    "partition.names": [["a", "b", "a"], ["a", "b", 3], "abc", ["a", "b", "A"], ["../a", "b", "c"]],
    "partition.sizes": [[1, "2"], [1] * 6],
    "training.round": [1],
    "training.rounds": [True, "3", 0],
    "training.lr": [math.nan, 10**400, 0],
    "training.weight_cap": [2**32],
    "training.weights": ["equal", ["uniform"], {"client-0": 1}, {"x": 1}],
    "corruption.label_noise": [{"client-9": 0.5}, {"client-0": "0.5"}, {"client-0": 1.5}, "slope"],
    "corruption.free_rider": [{"client-0": "lazy"}, {"client-0": "honest"}],
    "corruption.label_flip": [["x"]],
    "participation.fraction": [0, 1.5],
    "participation.away": [{"client-0": [2, 11]}, {"client-0": 3}],
    "scoring.utilities": [[], ["a", "a"], ["rmse"], ["rmse-skill:0"]],
    "scoring.truth": [["banzhaf"]],
    "scoring.solo": [1],
    "scoring.method": ["paid"],
    "payment.currency": ["euro"],
    "payment.rule": ["impartial"],
    "payment.score": ["MERIT"],
    "payment.floor": [0.2],
    "payment.cap": [0.1],
    "settlement.window_days": [-1],
    "panel.held_out": [0, 1],
    "panel.coordinates": [99],
    "panel.most": [0.5],
    "panel.noise": [-1],
    "panel.blur": [11],
    "panel.epsilon": [-1],
    "panel.delta": [0.5],
    "secure_aggregation.bound": [0],
    "secure_aggregation.threshold": [3],
    "run.seed": [2**63],
    "run.device": [0],
    "report.title": ["two\nlines"],
}


@pytest.mark.parametrize(
    ("setting", "value", "beside"),
    [
        *[(setting, value, {}) for setting, values in BAD.items() for value in values],
        ("partition.clients", 0, {"partition": {"scheme": "file:x.json", "names": ["a", "b", "c"]}}),
        ("partition.names", ["a", "b", "c"], {"partition": {"clients": 4}}),
        ("partition.sizes", [1, 2], {"partition": {"scheme": "sizes"}}),
        ("scoring.game", "renormalised", SETTLED),
        ("scoring.solo", True, SETTLED),
        ("scoring.truth", ["shapley"], SETTLED),
        ("training.weights", "scores", SETTLED),
        ("data.test_reveal", "per-round", SETTLED),
        *[("data.test_reveal", "end", method) for method in (BOTH, REPORTS)],
        *[("scoring.utilities", [name, "brier"], method)
          for method in (SETTLED, BOTH) for name in ("accuracy", "balanced-accuracy")],
        *[("corruption.misstate", lie, BOTH)
          for lie in ({"x": 1.01}, {"client-0": 1}, {"client-0": math.inf})],
        ("corruption.misstate", {"client-0": 2.0}, REPORTS),
        ("payment.score", "PHI", REPORTS),
        ("payment.score", "ALPHA", SETTLED),
        ("payment.equal", 0.5, {"payment": {"rule": "equal"}}),
    ],
    ids=lambda it: str(it)[:40],
)  # fmt: skip
def test_bad_values_are_refused_by_the_path_of_their_setting(setting, value, beside):
    section, key = setting.split(".")
    raw = {**beside, section: {**beside.get(section, {}), key: value}}
    with raises(ConfigError, setting=setting) as caught:
        from_dict(raw)
    assert str(caught.value).startswith((f"{setting}: ", f"{setting}.client-"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"trainin": {}}, "trainin: unknown section (did you mean training?); expected one of data, "),
        ({"rounds": 3}, "rounds: unknown section (did you mean training.rounds?); expected one of data, "),
        ({"training": 3}, "training: expected a section [training], got 3"),
        ({"training": {"round": 1}}, "training.round: unknown key (did you mean rounds?); expected one of "),
        ({"training": {"rounds": 0}}, "training.rounds: expected at least 1 round, got 0"),
        ({"training": {"weights": {"client-0": 1}}},
         "training.weights.client-1: expected a weight above 0, got 0"),
        ({"partition": {"scheme": "groups"}}, "partition.scheme: expected one of iid, dirichlet, group, "),
        ({"partition": {"names": ["a", "b"]}},
         "partition.clients: expected 3 to 1024 members: with two, each learns the other's update, got 2"),
        ({"run": {"seed": 2**63}}, "run.seed: expected 0 or more, at most 2^63 - 1, got 92"),
        ({"data": {"options": {"size": math.nan}}},
         "data.options: expected a table of text, numbers, true or false, or lists and tables"),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_says_what_was_expected_and_what_was_found(raw, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(raw)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("fraction", "secure", "least"),
    [(0.5, {}, "0.751"), (0.9, {"threshold": 6}, "0.917"), (0.5, {"enabled": False}, "0.751")],
)
def test_rounds_that_could_never_finish_are_refused_before_a_run(fraction, secure, least):
    """What was recorded when that was allowed is read all the same."""
    config = from_dict({"participation": {"fraction": fraction}, "secure_aggregation": secure})
    with raises(ConfigError, setting="participation.fraction") as caught:
        check_schedule(config)
    assert f"expected at least {least}, since" in str(caught.value)
    few = {"partition": {"scheme": "group", "clients": 4}, "secure_aggregation": {"threshold": 1000}}
    with raises(ConfigError, setting="secure_aggregation.threshold"):
        check_schedule(from_dict(few))
    with raises(ConfigError, setting="training.weights"):
        check_schedule(from_dict({"training": {"weights": "roster"}}))


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


def test_no_round_of_a_settled_run_shows_a_part_of_the_pool():
    settled = from_dict({"scoring": {"method": "settled"}, "data": {"test_size": 100}})
    assert recorded(settled.to_toml()) == settled
    with raises(ConfigError, setting="data.test_reveal"):
        Config(scoring=Scoring(method="settled"), data=Data(test_reveal="per-round"))
    with raises(ConfigError, setting="training.rounds"):  # what is made in Python is checked too
        Config(training=Training(rounds="3"))


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
    ("override", "setting"),
    [
        *[
            (text, text.partition("=")[0] or text)
            for text in ("training.rounds", "rounds=3", "=3", ".rounds=3")
        ],
        *[(f"training.rounds={value}", "training.rounds") for value in ("three", "", "3\nlr=1", "9" * 5000)],
        ("training.=3", "training."),
        ("training.round=3", "training.round"),
        ("trainin.rounds=3", ""),
        ("training.lr=nan", "training.lr"),
        ("partition.names=[a, b, c]", "partition.names"),
        ('model.name="mlp', "model.name"),
        ("data.options=" + "[" * 5000, "data.options"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_overrides_that_cannot_be_meant(override, setting):
    with raises(ConfigError, setting=setting) as caught:
        from_dict({}, [override])
    assert len(str(caught.value)) < 400
    assert setting in ("", *asked_for([override]))


def test_the_last_override_wins_and_the_given_mapping_is_left_alone():
    raw = {"training": {"rounds": 1}}
    assert from_dict(raw, ["training.rounds=2", "training.rounds=3"]).training.rounds == 3
    assert raw == {"training": {"rounds": 1}}
    assert from_dict(DEMO).clients[-1] == "Harbour"


@pytest.mark.parametrize(
    ("data", "override", "message"),
    [
        (b"[training\n", "", "{path}: not TOML: "),
        (b"\xff\xfe", "", "{path}: expected text in UTF-8, got byte 0xff at place 0: "),
        (b"a = " + b"[" * 5000, "", "{path}: not TOML"),
        (b"[run]\nseed = " + b"1" * 5000, "", "{path}: not TOML"),
        (b"[run]\nseed = 1\nseed = 2\n", "", "{path}: not TOML: Cannot overwrite a value"),
        ("a folder", "", "{path}: cannot be read: Is a directory"),
        (None, "", "{path}: no such file"),
        (b"[training]\nrounds = 0\n", "", "{path}: training.rounds: expected at least 1 round, got 0"),
        (b"[training]\nrounds = 0\n", "training.lr=0.1", "{path}: training.rounds: "),
        (b"[training]\nround = 1\n", "", "{path}: training.round: unknown key"),
        (b"", "training.rounds=0", "training.rounds: expected at least 1 round, got 0"),
        (b"", "rounds", "expected section.key=value, such as training.rounds=3, got 'rounds'"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_errors_of_a_file_name_it_and_errors_of_overrides_do_not(tmp_path, data, override, message):
    path = tmp_path / "run.toml"
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif data:
        path.mkdir()
    with pytest.raises(ConfigError) as caught:
        load(path, [override] if override else [])
    assert str(caught.value).startswith(message.format(path=path))


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


NESTED = (
    "[" * 40 + "]" * 40,
    "{a = " * 40 + "1" + "}" * 40,
    "[" * 5000 + "]" * 5000,
    "{a.b.c = [" * 9 + "]}" * 9,
)
HUGE = "0x" + "f" * 6000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *[(f"[data]\noptions = {{x = {value}}}", "^not (settings|TOML): ") for value in NESTED],
        *[(f"{key} = {HUGE}", "whole numbers of at most 128 bits")
          for key in ("schema", "training.rounds", "training.lr", "data.test_size", "data.options.size")],
        (f"training.rounds = {2**31 + 1}", r"^training\.rounds: .*at most 2\^31"),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_values_that_are_too_deep_or_too_large_to_print_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        recorded(text)


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
        "training": {"weights": dict.fromkeys(names, 1.5)},
        "participation": {"away": {name: [1] for name in names}},
        "corruption": {"label_noise": dict.fromkeys(names, 0.5), "label_flip": names},
    }
    config = from_dict(again)
    assert recorded(config.to_toml()) == config


@pytest.mark.parametrize(
    "change", [{"title": "two\nlines"}, {"date": "2026-02-30"}, {"currency": "euro"}, {"contact": "x" * 500}]
)
def test_a_heading_is_checked(change):
    with raises(InputError):
        Heading(**change)
