"""One table of attacks on the settlement: who does what in which exchange, and what comes of it.

Whatever is tried, everybody else keeps what it is due. Each row is tried in a run of five members and one
round; attacks that need more than one step, or another end, are in the files beside this one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from attacked import attacked, due_in
from fedmerit.identity import SERVER, canonical
from fedmerit.protocol import clearing, direction
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.direction import Entry, Manifest
from fedmerit.protocol.messages import pack
from fedmerit.protocol.settlement import DAY
from linear_federation import LIAR, Federation, committing_falsely, false_sum, spoiling
from wire import unpack

RING = 2**64
FRIEND = "client-3"
Lie = Callable[[Federation, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Attack:
    """A lie, what comes of it, and the federation it is told in.

    Of the settlement that comes of it the ``verdict`` names attributes, and four things more: ``refuses``
    (who refuses which exchanges), ``noted`` (whom the server refuses), ``unsigned`` (who countersigns
    nothing) and ``moves`` (another sum, so everybody's products are others). None: nothing is settled,
    because nobody states.
    """

    lie: Lie
    verdict: Mapping[str, Any] | None
    given: Mapping[str, Any] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------- how to lie


def states(change: Any, who: str = LIAR) -> Lie:
    return lambda federation, patch: federation.stating(change, who)


def tables(change: Callable[[dict[str, Any]], Any], who: str = LIAR) -> Lie:
    """Masks are asked for because a member states one too much; this one signs other ones."""

    def lie(federation, patch):
        federation.stating(1)
        federation.tabling(change, who)

    return lie


def answers(
    exchange: str, change: Callable[[bytes], bytes | None], who: str = LIAR, first: Lie | None = None
):
    def lie(federation, patch):
        if first is not None:
            first(federation, patch)
        federation.answering(exchange, 1, change, who)

    return lie


def told(exchange: str, change: Callable[[dict[str, Any]], Any], who: str = LIAR) -> Lie:
    """The server tells one member something else."""
    return lambda federation, patch: federation.telling(exchange, 1, change, who)


def ended(change: Callable[[dict[str, Any], dict[str, Any]], Any], *before: Lie, who: str = LIAR) -> Lie:
    """The server shows one member another end of the settlement: the body, and all that it is told."""

    def end(shown):
        body = json.loads(shown["settled"])
        change(body, shown)
        shown["settled"] = canonical(body)

    def lie(federation, patch):
        for first in before:
            first(federation, patch)
        federation.telling("settle", 1, end, who)

    return lie


def loses(federation, patch):
    """A statement never arrives."""
    federation.losing("state")


def instead(name: str, **change: Any) -> Lie:
    """The server's manifest has an entry with other facts."""
    return lambda federation, patch: patch.setattr(
        clearing, "Entry", lambda **d: Entry(**{**d, **{key: made(d) for key, made in change.items()}})
    )


def twice_the_size(federation, patch):
    scale = direction.scale_of
    patch.setattr(clearing, "scale_of", lambda sizes: scale(2 * size for size in sizes))
    instead("size", size=lambda d: 2 * d["size"])(federation, patch)


def tilts(federation, patch):
    """The direction is not the gradient, by a thousandth of its largest coordinate."""
    real = direction.integers

    def tilted(values, scale, encoding):
        g = real(values, scale, encoding)
        g[3] += np.abs(g).max() // 1000
        return g

    patch.setattr(clearing, "integers", tilted)


def makes_up(federation, patch):
    """The server adds to the sum once it knows it, and a friend states that as its own."""
    more = 1000
    false_sum(patch, more)

    def change(body):
        g = federation.archive.load("direction", 1)["g"]
        body["rounds"]["1"] = str(int(body["rounds"]["1"]) + more * int(g[0]))

    federation.stating(change, FRIEND)


def unseen(lie: Lie) -> Lie:
    """Nobody saw the sum: members know which model they trained, and for whom they signed."""

    def both(federation, patch):
        federation.reaches = lambda name, ask: ask.exchange != "report"
        lie(federation, patch)

    return both


def another_m0(federation, patch):
    real = Clearing.rounds

    def moved(one):
        m0 = one.m0 + np.float32(0.5)
        return replace(one, m0=m0, m=m0 + (one.m - one.m0))

    patch.setattr(Clearing, "rounds", lambda self: map(moved, real(self)))


def another_number(body):
    """What FRIEND states, in the place of one's own."""
    body["rounds"]["1"] = str(another_number.due[FRIEND])


def retabled(federation, answer):
    """The same statement, with tables that its author signed and that are not those it states."""
    text, signature, tables = unpack(answer)
    bodies = [json.loads(table) for table, _ in tables]
    disputes(FRIEND)(bodies[0])
    return pack([text, signature, unpack(federation.stated(LIAR, {}, bodies))[2]])


def number_is(value):
    return lambda body: body["rounds"].update({"1": value})


def unsigned_number(value):
    def lie(answer):
        body = json.loads(unpack(answer)[0])
        body["rounds"]["1"] = value
        return pack([json.dumps(body).encode(), b"s" * 64, []])

    return lie


def masks_off(which, more=5):
    """As its false statement needs it, if it were one pair; or all."""

    def change(body):
        for peer in sorted(body["pairs"])[: {"one": 1, "all": 9}.get(which, 0)]:
            sign = 1 if peer < LIAR else -1
            body["pairs"][peer] = str((int(body["pairs"][peer]) + more * sign) % RING)

    return change


def agreed(few):
    return told("state", lambda body: body.update(agreed=few(body["agreed"])))


def moved(what):
    return told("agree", lambda body: body.update({what: body[what] + body[what].dtype.type(1)}))


def one_coordinate(body):
    body.update(g=np.eye(1, body["g"].size, dtype=np.int32)[0])


def disputes(peer):
    return lambda body: body["pairs"].update({peer: "5"})


def nothing(answer):
    return None


def commits_falsely(federation, patch):
    """A pair whose commitments differ has no mask, and hides no liar."""
    committing_falsely(patch, (LIAR, FRIEND))
    federation.stating(1)


def as_if_it_held(body, shown):
    for one in body["rounds"]:
        one.update(sum=one["product"], holds=True)
    body.update(named=[])


def parts(*values):
    return lambda body: body["blocks"].update({"1": [*values]})


# ------------------------------------------------------------------------------------------------ the table

NAMED = {"named": {1: {LIAR: "stated"}}, "final": True}
MISSING = {"missing": (LIAR,), "liars": ()}
UNSEEN = {**MISSING, "refuses": {LIAR: ["agree", "agreed"]}}
REFUSED = {**MISSING, "noted": LIAR}
NOTHING = None
UNSHOWN = {"silent": {1: (FRIEND,)}, "final": False}
UNSIGNED = {"missing": (), "unsigned": {LIAR}, "refuses": {LIAR: ["settle"]}}
FRIEND_REFUSES = {"unsigned": {LIAR, FRIEND}, "refuses": {FRIEND: ["settle"]}}
CLOSED = {"scoring": {"visibility": "coordinator"}}

MEMBERS_LIE = {
    "states one less": Attack(states(-1), NAMED),
    "states much more": Attack(states(2**40), NAMED),
    "states another's number": Attack(states(another_number), NAMED),
    "masks otherwise": Attack(
        lambda federation, patch: spoiling(patch, {(LIAR, 1): 1000}), {"liars": (LIAR,), "moves": True}
    ),
    **{
        f"states more and lies about {which}": Attack(
            lambda federation, patch, which=which: (
                federation.stating(5),
                federation.tabling(masks_off(which)),
            ),
            {"liars": (LIAR,)},
        )
        for which in ("one mask", "all masks")
    },
    **{
        f"states more, a dealer lost at {stage}": Attack(states(1), NAMED, {"lost": ((FRIEND, 1, stage),)})
        for stage in ("masked", "check", "unmask")
    },
    "lies about the mask with a lost dealer": Attack(
        tables(lambda body: body["pairs"].update({FRIEND: "1"}), "client-0"),
        {"named": {1: {"client-0": "pair", LIAR: "stated"}}},
        {"lost": ((FRIEND, 1, "masked"),)},
    ),
    **{
        f"states bytes: {what}": Attack(answers("state", lambda answer, data=data: data), MISSING)
        for what, data in {
            "garbage": b"garbage",
            "nested": pack([b"[" * 3000, b"s", []]),
            "json": pack([b"{", b"s", []]),
            "empty": pack([b"{}", b"s", []]),
            "number": pack([b"1", b"s", []]),
            "large": bytes(10**6),
        }.items()
    },
    **{
        f"states a number that no mask proves: {str(value)[:9]}": Attack(states(number_is(value)), MISSING)
        for value in (str(2**63), str(-(2**63)), "1" * 39, "1" * 10_000, "01", "1e3")
    },
    **{
        f"states no text: {value!r}": Attack(answers("state", unsigned_number(value)), MISSING)
        for value in (1, 1.5, None, True)
    },
    "states unsigned": Attack(
        answers("state", lambda answer: pack([unpack(answer)[0], bytes(64), unpack(answer)[2]])),
        {**MISSING, "noted": "did not sign"},
    ),
    **{
        f"states parts of {part}": Attack(states(parts(*[part.hex()] * 16)), REFUSED)
        for part in (1.7e308, 1e149, float("inf"), float("nan"))
    },
    **{
        f"states more and answers no {exchange}": Attack(
            answers(exchange, nothing, first=states(2**40)), NAMED
        )
        for exchange in ("seal", "pairs", "drawn")
    },
    **{
        f"states more and answers no {exchange}": Attack(
            answers(exchange, nothing, first=states(2**40)),
            {"silent": {1: (LIAR,)}, "named": {1: {LIAR: "stated"}}, "final": False},
        )
        for exchange in ("draw", "witness")
    },
    "states more, and disputes a mask": Attack(
        answers("pairs", nothing, FRIEND, answers("pairs", nothing, first=tables(disputes(FRIEND)))),
        {"liars": (LIAR,), "final": True},
    ),
    "states more, disputes among four, and nobody opens a key": Attack(
        answers("pairs", nothing, FRIEND, answers("pairs", nothing, first=tables(disputes(FRIEND)))),
        {"silent": {1: (LIAR, FRIEND)}, "final": False},
        {"members": 4},
    ),
    "commits falsely to a mask": Attack(commits_falsely, {"liars": (LIAR,)}),
    "states another settlement": Attack(states(lambda body: body.update(settlement="0" * 64)), REFUSED),
    "states another run": Attack(states(lambda body: body.update(run="another")), REFUSED),
    "states fewer rounds": Attack(states(lambda body: body["rounds"].pop("1")), REFUSED),
    "states more rounds": Attack(states(lambda body: body["rounds"].update({"4": "1"})), REFUSED),
    "states fewer parts": Attack(states(parts("0x1p+0")), REFUSED),
    "states more fields": Attack(states(lambda body: body.update(more=1)), REFUSED),
    **{
        f"states with tables as {what}": Attack(
            answers(
                "state", lambda answer, change=change: pack([*unpack(answer)[:2], change(unpack(answer)[2])])
            ),
            MISSING,
        )
        for what, change in {
            "none": lambda tables: [],
            "two": lambda tables: tables * 2,
            "garbage": lambda tables: [[b"garbage", tables[0][1]]],
            "nested": lambda tables: [[b"[" * 20_000, tables[0][1]]],
            "json": lambda tables: [[b"{", tables[0][1]]],
            "large": lambda tables: [[bytes(10**6), tables[0][1]]],
            "unsigned": lambda tables: [[tables[0][0], bytes(64)]],
        }.items()
    },
    "signs other tables than those of its statement": Attack(
        lambda federation, patch: federation.answering(
            "state", 1, lambda answer: retabled(federation, answer)
        ),
        {**MISSING, "noted": "other tables"},
    ),
    **{
        f"opens no key: {key!r}": Attack(
            answers(
                "pairs",
                lambda answer, key=key: pack([[LIAR, key]]),
                "client-0",
                first=tables(disputes("client-0")),
            ),
            {"liars": (LIAR,), "unproved": ("client-0", LIAR), "noted": "client-0"},
            {"members": 4},
        )
        for key in (b"k" * 32, b"", 5, None)
    },
}
FACTS = {
    "size": twice_the_size,
    "direction": tilts,
    "coordinates": lambda federation, patch: patch.setattr(
        clearing, "Manifest", lambda *given: Manifest(*given[:6], 1, given[7])
    ),
    "product": lambda federation, patch: patch.setattr(
        clearing, "product", lambda *given: direction.product(*given) + 1
    ),
    "empty": instead("empty", empty=lambda d: 0.9),
    "rest": instead("rest", rest=lambda d: 0.5),
    "weight": instead("weight", weight=lambda d: 4.0),
    "step": instead("step", step=lambda d: 2 * d["step"]),
    "blocks": instead("blocks", blocks=lambda d: tuple(2 * one for one in d["blocks"])),
    "m": instead("m", m=lambda d: "0" * 64),
    "participants": instead("participants", participants=lambda d: d["participants"][:-1]),
}
SERVERS_LIE = {  # what a member is shown
    "another sum": Attack(
        lambda federation, patch: false_sum(patch), {"named": {1: {SERVER: "sum"}}, "moves": True}
    ),
    "another sum that a friend makes up for": Attack(
        makes_up,
        {"named": {1: {SERVER: "sum", FRIEND: "stated"}}, "holding": 1, "final": True, "moves": True},
    ),
    **{f"a manifest with a false {what}": Attack(lie, NOTHING) for what, lie in FACTS.items()},
    **{
        f"a sum that nobody saw, with another {what}": Attack(unseen(lie), NOTHING)
        for what, lie in {"list": FACTS["participants"], "m": FACTS["m"], "m0": another_m0}.items()
    },
    "a sum that nobody saw, with another member": Attack(
        unseen(instead("participants", participants=lambda d: ("client-0", LIAR, "client-2", "client-4"))),
        NOTHING,
        {"lost": (("client-4", 1, "masked"),)},
    ),
    **{f"another {what}": Attack(moved(what), UNSEEN) for what in ("m0", "sum", "g")},
    "one coordinate": Attack(told("agree", one_coordinate), UNSEEN),
    "no direction": Attack(
        lambda federation, patch: setattr(
            federation, "reaches", lambda name, ask: (name, ask.exchange) != (LIAR, "agree")
        ),
        MISSING,
    ),
    "another pool": Attack(told("open", lambda body: body.update(y=body["y"] + 1)), MISSING),
    "a direction for masks": Attack(
        told("witness", one_coordinate),
        {"silent": {1: (LIAR,)}, "named": {1: {}}, "refuses": {LIAR: ["witness"]}},
    ),
    **{
        f"agreements of {what}": Attack(agreed(few), {**MISSING, "refuses": {LIAR: ["state"]}})
        for what, few in {
            "three of five": lambda signed: dict([*signed.items()][:3]),
            "one, for all": lambda signed: dict.fromkeys(signed, signed["client-0"]),
            "nobody": lambda signed: {name: [*rounds, b"x" * 64] for name, (*rounds, _) in signed.items()},
            "another list": lambda signed: {
                name: [wrong, [1], *own] for name, (wrong, _, *own) in signed.items()
            },
            "strangers": lambda signed: {f"{name}?": own for name, own in signed.items()},
        }.items()
    },
    **{
        f"an end with {what}": Attack(ended(change), UNSIGNED)
        for what, change in {
            "another sum": lambda body, shown: body["rounds"][0].update(sum="1", holds=False),
            "no equation that holds": lambda body, shown: body["rounds"][0].update(holds=False),
            "another product": lambda body, shown: body["rounds"][0].update(product="1"),
            "fewer participants": lambda body, shown: body["rounds"][0].update(participants=[LIAR]),
            "no round": lambda body, shown: body["rounds"].clear(),
            "its reader named": lambda body, shown: body.update(named=[LIAR]),
            "its reader missing": lambda body, shown: body.update(missing=[LIAR]),
            "another missing": lambda body, shown: body.update(missing=[FRIEND], final=True),
            "its reader's statement left out": lambda body, shown: shown["statements"].pop(LIAR),
            "another statement left out": lambda body, shown: shown["statements"].pop(FRIEND),
            "a forged statement": lambda body, shown: shown["statements"].update(
                {FRIEND: shown["statements"][LIAR]}
            ),
            "another settlement": lambda body, shown: body.update(settlement="0" * 64),
        }.items()
    },
    **{
        f"an end with {what}, statements withheld": Attack(ended(change), UNSIGNED, CLOSED)
        for what, change in {
            "another sum": lambda body, shown: body["rounds"][0].update(sum="1"),
            "no equation that holds": lambda body, shown: body["rounds"][0].update(holds=False),
            "another product": lambda body, shown: body["rounds"][0].update(product="1", sum="1"),
            "fewer participants": lambda body, shown: body["rounds"][0].update(participants=[LIAR]),
            "another round": lambda body, shown: body["rounds"][0].update(round=2),
            "no round": lambda body, shown: body["rounds"].clear(),
            "no own statement": lambda body, shown: shown["statements"].clear(),
            "its reader missing": lambda body, shown: body.update(missing=[LIAR]),
        }.items()
    },
    **{
        f"an end with another named, and no masks, {'shown' if scoring is None else 'withheld'}": Attack(
            ended(lambda body, shown: body.update(named=[FRIEND])),
            UNSIGNED,
            {"naming": False, "scoring": scoring},
        )
        for scoring in (None, CLOSED["scoring"])
    },
    "a statement left out": Attack(loses, {**MISSING, "unsigned": {LIAR}, "final": False}),
    **{
        f"a window of {days} days": Attack(
            ended(
                lambda body, shown, days=days: body.update(closes=int(time.time() + days * DAY)),
                loses,
                who=FRIEND,
            ),
            {"missing": (LIAR,), "unsigned": {LIAR, FRIEND}, "refuses": {FRIEND: ["settle"]}},
        )
        for days in (13, 0, -1)
    },
    "a lie of another": Attack(
        ended(lambda body, shown: body.update(named=[FRIEND]), states(5), who=FRIEND), FRIEND_REFUSES
    ),
    "a false equation that holds": Attack(ended(as_if_it_held, states(5), who=FRIEND), FRIEND_REFUSES),
}


@pytest.mark.parametrize("attack", MEMBERS_LIE.values(), ids=MEMBERS_LIE.keys())
def test_members_who_lie_come_to_what_the_table_says(attack, truth, tmp_path, monkeypatch):
    check(attack, truth, tmp_path, monkeypatch)


@pytest.mark.parametrize("attack", SERVERS_LIE.values(), ids=SERVERS_LIE.keys())
def test_servers_that_lie_come_to_what_the_table_says(attack, truth, tmp_path, monkeypatch):
    check(attack, truth, tmp_path, monkeypatch)


def check(attack, truth, home, monkeypatch):
    """Everybody else keeps what it is due."""
    due = another_number.due = truth(attack.given.get("lost", ()), attack.given.get("members", 5))
    federation = attacked(home, **attack.given)
    with monkeypatch.context() as patch:
        if attack.verdict is NOTHING:
            patch.setattr(Manifest, "off_gain", False)  # which a few of these are too
        attack.lie(federation, patch)
        federation.run()
    found = federation.coordinator.settled
    if attack.verdict is NOTHING:
        assert found is None
        assert "state" not in {one.ask.exchange for one in federation.passed}
        return
    verdict = {"refuses": {}, **attack.verdict}
    moves = verdict.pop("moves", False)
    assert {name: federation.refusals(name) for name in verdict["refuses"]} == verdict.pop("refuses")
    if (noted := verdict.pop("noted", None)) is not None:
        assert any(noted in note for note in federation.notes), federation.notes
    if (unsigned := verdict.pop("unsigned", None)) is not None:
        signed = {name for name, _, _ in federation.coordinator.recorder.signed("countersigned")}
        assert signed == {*federation.names} - unsigned
    assert {name: getattr(found, name) for name in verdict} == verdict
    got = due_in(federation)
    harmed = {*found.missing, *found.unproved} | {name for name in (LIAR,) if got[name] is None}
    assert moves or {n: v for n, v in got.items() if n not in harmed} == {
        n: v for n, v in due.items() if n not in harmed
    }
