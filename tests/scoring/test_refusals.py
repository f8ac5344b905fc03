"""What scoring refuses: the class of the error, and what it names."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

import fedmerit as fm
from fedmerit.errors import InputError, NeedsTable, ReportError, UndefinedScore, ValueRefused
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.amounts import division, payouts
from fedmerit.scoring.ground_truth import agreement, banzhaf, multi_round, sampled_shapley, semivalue, shapley
from fedmerit.scoring.panel import share_errors
from fedmerit.scoring.rewards import share_intervals, shares
from fedmerit.scoring.sampling import resolvable_gap
from fedmerit.scoring.scores import SCORES, alpha, cos_model, ee, fp, influence, solo
from fedmerit.scoring.types import Reports, Scores, Table
from fedmerit.scoring.uncertainty import (
    compare_pairs,
    indistinguishable,
    intervals,
    pair_errors,
    rank_intervals,
    repeats,
)

nan, inf, huge = math.nan, math.inf, 10**400
GOOD = {"empty": 0.0, "grand": 3.0, "alone": [0, 1, 2], "without": [3, 2, 1]}
REPORTS = Reports(**GOOD)
TABLE = Table([0, 1, 2, 5], ["A", "B"])
BLOCKS = {"blocks": [[1, 2], [2, 1]], "sizes": [1, 2]}
SKETCHED = {"sketch": [[1.0], [2.0], [3.0]], "freedom": 9, "slice": "s"}
COUNTS = "must be a whole number of at least"


def report(**change):
    return lambda: Reports(**(GOOD | change))


def scores(raw=(1, 2), score="ALPHA", clients="ABCD", **change):
    given = {"values": raw, "raw": raw, "gain": 3} | change
    return Scores(score=score, clients=tuple(clients[: len(raw)]), **given)


def scored(**change):
    return lambda: scores(**change)


def table(values):
    return lambda: Table(values)


def summed(rounds, **options):
    return lambda: accumulate(rounds, **options)


def made(number, clients="ABC", **extra):
    n = len(clients)
    given = {"empty": 0.25, "grand": 0.75, "alone": [0.5] * n, "without": [0.5] * n} | extra
    return Reports(clients=list(clients), round=number, **given)


def weighed(weights):
    return lambda: semivalue(TABLE, weights)


def near(x, y, **options):
    return lambda: agreement(x, y, **options)


def sampled(clients=18, **settings):
    return lambda: sampled_shapley(lambda mask: 0.0, clients, **({"budget": 100} | settings))


def phi(updates, gradient, **options):
    return lambda: fm.aumann_shapley(updates, gradient, **options)


def judged(matrix, **options):
    return lambda: fm.hands(matrix, **options)


def panel(gradients, updates=((1, 2), (3, 4)), clients=None):
    return lambda: fm.panel(updates, gradients, clients)


def divided(raw=(1, 2), rule="fair", score="ALPHA", **options):
    return lambda: shares(scores(raw, score), rule, **options)


def paid(of=None, budget="1.00"):
    return lambda: payouts({"A": 1.0} if of is None else of, budget)


def labelled(values, labels):
    return pd.Series(values, index=list(labels))


SURE = scores([1, 2], stderr=[1, 1])
PHI = scores([1, 2], "PHI")
PANEL = fm.Panel([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
masked = np.ma.array([0, 1, 2], mask=[False, True, False])

REFUSED = {
    ValueRefused: [
        (report(empty=nan), "empty must be a finite number, at most 1e+100, got nan"),
        (report(grand=1e300), "grand must be a finite number, at most 1e+100, got 1e+300"),
        *((report(grand=bad), "grand: expected a number, got")
          for bad in ("three", "0", True, np.bool_(True), np.ones(1), 3 + 0j)),
        (report(alone=[0, nan, 2]),
         "alone of client 'client-1' must be a finite number, at most 1e+100, got nan"),
        (report(without=[3, None, 1]), "without of client 'client-1' is missing"),
        (report(alone=[[0], [1], [2]]), "alone of client 'client-0': expected a number, got [0]"),
        *((report(alone=[0, bad, 2]), f"alone of client 'client-1': expected a number, got {bad!r}")
          for bad in ("1", True, 1j)),
        (report(alone=np.array([0, "1", 2], dtype=object)), "alone of client 'client-1': expected a number"),
        (report(utility="accuracy"), "grand must lie in [0, 1] (as utility 'accuracy' promises), got 3"),
        (report(se_alpha=[0.1, -0.1, 0]), "se_alpha of client 'client-1' must lie in [0, inf], got -0.1"),
        (report(cosine=[0, 1.5, None]), "cosine of client 'client-1' must lie in"),
        (report(cosine=[np.ones(2), 0, 0]), "cosine of client 'client-0': expected a number, got array"),
        (report(round=7, empty=nan), "round 7: empty must be"),
        (report(samples=[1, 1.5, 2]), "samples of client 'client-1' must be a whole number, got 1.5"),
        (report(samples=[1, -2, 2]), "samples of client 'client-1' must lie in [0, inf], got -2"),
        (report(samples=[1, inf, 2]), "samples of client 'client-1' must be a finite number"),
        (scored(values=[1e160, 1]), "values of client 'A' must be a finite number, at most 1e+150, got 1e"),
    ],
    ReportError: [
        (report(without=[3, 2]), "without: expected 3 values, one per client, got shape (2,)"),
        *((report(alone=bad), f"alone: expected a sequence of numbers, got {name}") for bad, name in (
            ("abc", "str"), ({"A": 1}, "dict"), (None, "NoneType"), ({0, 1, 2}, "set"), (iter([0]),
             "list_iter"))),
        *((report(alone=np.array(bad)), f"alone: expected numbers, got an array of {name}") for bad, name in (
            (["0", "1", "2"], "<U1"), ([True, False, True], "bool"), ([0, 1j, 2], "complex128"))),
        (report(alone=masked), "alone: expected a number in every place, got an array with masked entries"),
        (report(alone=[0, huge, 1]), "alone: expected numbers"),
        (report(cosine=[0, Decimal("sNaN"), 0]), "cosine: expected numbers, got"),
        (report(clients=["A", "B"]), "expected 3 client names, one per value, got 2"),
        (report(clients=["A", "B", "A"]), "client 'A' appears more than once"),
        (report(clients=["A", "", "C"]), "client names must be non-empty strings, got ''"),
        *((report(clients=bad), "must be a list of names, got") for bad in ("ABC", 5, np.array("ABC"))),
        (report(silent=5), "must be a list of names, got 5"),
        (report(clients=["A", "B", "C"], silent=["B"]), "client 'B' is listed as silent but has a report"),
        (lambda: Reports(empty=0, grand=1, alone=[1], without=[0]), "expected at least 2 clients, got 1"),
        (report(utility=["accuracy"]), "utility must be a name"),
        (report(slice=3), "slice must be text, got 3"),
        *((report(round=bad), f"round must be a whole number, 0 or more, got {bad!r}")
          for bad in ("1", True, -1, 1.5, inf)),
        (report(solo=[0.75, 0.5, 0]), "solo needs solo_empty"),
        *((report(**SKETCHED | change), "sketch and freedom (1 or more) belong together")
          for change in ({"freedom": None}, {"sketch": None}, {"freedom": 0})),
        (report(**SKETCHED | {"freedom": 1.5}), "freedom must be a whole number, 0 or more, got 1.5"),
        (report(**SKETCHED | {"slice": None}), "sketches are about a test slice, which must be named"),
        *((report(**SKETCHED | {"sketch": bad}), "sketch must be finite numbers of shape (3, K)")
          for bad in ([[1.0], [2.0]], [[1.0], [2.0], [nan]], [1.0, 2.0, 3.0])),
        *((scored(**BLOCKS | {"sizes": bad}),
          "ALPHA: sizes must be positive numbers, one per block, got")
          for bad in ([0, 0], [1, nan], [[1, 2], [3, 4]])),
        (scored(blocks=[[1.0, 2.0]]), "belong together"),
        (scored(blocks=[[1.0, 2.0]], sizes=[1, 2]), "shape (2, 2)"),
        (scored(freedom=0), "ALPHA: freedom must be 1 or more, got 0"),
        (scored(freedom=-1), "ALPHA: freedom must be a whole number, 0 or more, got -1"),
        (scored(freedom="many"), "ALPHA: freedom must be a whole number, 0 or more, got 'many'"),
        (scored(sketch=[[1.0]], freedom=3), "sketch must be finite numbers of shape (K, 2)"),
        *((table(bad), "2^N utilities with N >= 1, got shape")
          for bad in ([0, 1, 2], [1], [], [[0, 1], [2, 3]])),
        (table([0, 1, 2, nan]), "utility of coalition 0b11 is nan"),
        (table(np.broadcast_to(0.0, 1 << 27)), "at most 26 clients"),
        (table("abc"), "expected a sequence of numbers"),
        (table([0, 1e101]), "coalition 0b1 is 1e+101, expected a finite number, at most 1e+100"),
        *((lambda name=name: SCORES[name].function({}), "takes Reports, got dict") for name in SCORES
          if SCORES[name].reported),
        (lambda: cos_model([[1, 2], [3, 4]], [1, 2, 3]), "got 2 and 3"),
        (lambda: cos_model([[1.0, 2.0]], [nan, 0.0]), "COS-MODEL: start"),
        (summed([]), "nothing to accumulate: 0 rounds"),
        (summed(made(1)), "accumulate takes a list of Reports, got Reports"),
        (summed([made(2), made(2)]), "each once: 2 follows 2"),
        (summed([made(1), made(2, utility="accuracy")]),
         "different utilities cannot be added: None, accuracy"),
        (summed([alpha(made(1))]), "takes a list of Reports, got Scores"),
        (summed([REPORTS], score="PHI"), "Scores for PHI, got Reports"),
        (summed([alpha(REPORTS)], score="PHI"), "Scores for PHI, got ALPHA"),
        (summed([], score="PHI"), "nothing to accumulate"),
        (scored(raw=(), clients=""), "ALPHA: expected at least 1 client, got none"),
        (table(labelled([0, 1], [1, 0])), "labels must be the bitmasks 0, 1, 2, ..., got 1 first"),
        (report(alone=labelled([0, 1, 2], [2, 1, 0])), "got 2, 1, 0"),
        *((report(clients=list("ABC"), without=labelled(range(len(bad)), bad)), says)
          for bad, says in (("ABD", "got 'A', 'B', 'D'"), ("ABCC", "got 'A', 'B', 'C', 'C'"))),
        (near(scores(), labelled([1, 2], "BC")), "client 'A' is only in ALPHA"),
        (near(labelled([1, 2], "AA"), [1, 2]), "scores: label 'A' appears more than once"),
        (near(labelled([1, 2], "AB"), labelled([1, 2], "AC")), "client 'B' is only in scores"),
        (near([1, 2], [1, 2, 3]), "same length, got 2 scores and 3 true values"),
        (near([1], [2]), "at least 2 clients, got 1"),
        (near([1, nan], [1, 2]), "scores[1] must be a finite number, got nan"),
        (near([1, 2], [inf, 2]), "truth[0] must be a finite number, got inf"),
        (near([], []), "scores: expected one number per client, got shape (0,)"),
        (near([[1, 2]], [1, 2]), "scores: expected one number per client, got shape (1, 2)"),
        (near(scores([1, 2, 3]), scores([1, 2, 3, 4], "SV")),
         "client 'D' is only in SV; both need the same clients"),
        (near(scores([1, 2, 3]), scores([1, 2], "SV", "BC")), "client 'A' is only in ALPHA"),
        (weighed(None), "weights: expected a sequence of numbers, got NoneType"),
        (lambda: multi_round([TABLE, Table([0] * 4, ["B", "C"])]),
         "client 'A' is only in table 1; all need the same"),
        (lambda: multi_round([TABLE, Table([0] * 8, list("ABC"))]), "client 'C' is only in table 2"),
        (lambda: multi_round([]), "at least one table, got none"),
        (lambda: multi_round(TABLE), "multi_round needs a list of tables, one per round, got Table"),
        (sampled("AB"), "sampled_shapley: clients must be a list of names, got 'AB'"),
        (lambda: sampled_shapley(lambda mask: nan, 3, budget=8),
         "utility of coalition {client-0, client-1, client-2} is"),
        *((lambda bad=bad: sampled_shapley(lambda mask: bad, ["A", "B"], budget=4),
          "utility of coalition {A, B} is")
          for bad in (None, "1.5", True, 1j, np.ones(1), 1e101)),
        *((lambda function=function: function(scores()), "ALPHA carries no standard errors") for function in (
            intervals, pair_errors, compare_pairs, rank_intervals, indistinguishable)),
        *((lambda function=function: function([1, 2]), "expected Scores, got list") for function in (
            intervals, pair_errors, compare_pairs, rank_intervals, indistinguishable)),
        (phi([[1, 2]], [1, 2, 3]), "the same length, got 2 and 3"),
        *((phi(bad, [1, 2]), "updates must have shape (clients, P)") for bad in ([1, 2], [])),
        (phi([[]], []), "updates must have shape"),
        (phi([[1, 2]], [[[1, 2]]]), "gradient must have shape (P,) or (blocks, P)"),
        (phi([[1, nan]], [1, 2]), "client 0 has another one"),
        (phi([[1, 2]], [[1, 2], [inf, 2]]), "block 1 has another one"),
        (phi([["a", "b"]], [1, 2]), "expected a number"),
        (phi([[1]], [[1], [2]], sizes=[1]), "sizes must be 2 positive numbers"),
        (phi([[1]], [[1], [2]], sizes=[1, 0]), "sizes must be 2 positive numbers"),
        (phi([[1], [2]], [1], clients=["A", "A"]), "client 'A' appears more than once"),
        (panel([[1, 2, 3], [4, 5, 6]]), "as 2 updates of 2 coordinates, got 2 of 3"),
        (panel([[1, 2]]), "as 2 updates of 2 coordinates, got 1 of 2"),
        *((panel(bad), f"gradients must have shape (N, P), or (N, 2, P) by half, got {shape}")
          for bad, shape in (([1, 2], "(2,)"), (np.ones((2, 3, 2)), "(2, 3, 2)"))),
        (panel([[1, 2], [nan, 4]]), "at most 1e+100; judge 1 has another one"),
        (panel([[[1, 2]] * 2, [[1, 2], [3, inf]]]), "half 2 of judge 1 has another one"),
        (panel([[1, 2], [3, 4]], updates=[1, 2]), "PANEL: updates must have shape (clients, P)"),
        (panel([["a", 2], [3, 4]]), "PANEL: gradients: expected a number"),
        (panel([[1, 2], [3, 4]], clients=["A"]), "PANEL: expected 2 client names, one per value, got 1"),
        (panel([[1]], updates=[[1]]), "PANEL: expected at least 2 clients, got 1"),
        (lambda: fm.Panel(np.ones((2, 2)), apart=[[1, 2]]), "PANEL: apart must be finite numbers of shape"),
        *((judged(bad), "hands: matrix must have shape (N, N), got") for bad in (
            [1, 2, 3], np.ones((3, 4)), [[1, 2, 3], [4, 5], [6]], [np.ones((2, 2)), np.ones((2, 3))])),
        *((judged([[1, 2, 3], [4, 5, bad], [7, 8, 9]]), "hands: matrix[1, 2] must be a finite number, got")
          for bad in (nan, inf, "1", None, True, 1j, [6], Decimal("nan"))),
        (judged(np.ones((3, 3)), clients=["A", "A", "B"]), "hands: client 'A' appears more than once"),
        (lambda: repeats([PHI]), "expected at least 2 runs, got 1"),
        (lambda: repeats([PHI, scores([1, 2], "PHI", "AX")]),
         "run 2: expected the clients of run 1, but 'B'"),
        (lambda: repeats([PHI, scores([1, 2], "LOO")]), "run 2: expected score PHI, as in run 1, got LOO"),
    ],
    NeedsTable: [
        *((lambda given=given: Reports.from_table(given),
          f"from_table takes a Table of 2^N utilities, got {name}")
          for given, name in (([0, 1, 2, 3], "list"), (None, "NoneType"), (REPORTS, "Reports"))),
        (table(REPORTS), "all 2^N coalitions"),
        *((lambda name=name: SCORES[name].function(TABLE), "Reports.from_table") for name in SCORES
          if SCORES[name].reported),
        *((lambda value=value: value(REPORTS),
          "needs a Table with the utility of all 2^N coalitions, got Reports")
          for value in (shapley, banzhaf, lambda given: semivalue(given, [1, 0, 0]),
          lambda given: multi_round([given]))),
        *((lambda value=value: value([0, 1, 2, 3]), "needs a Table of 2^N utilities, got list")
          for value in (shapley, banzhaf, lambda given: semivalue(given, [1, 0, 0]))),
    ],
    UndefinedScore: [
        (lambda: solo(REPORTS), "SOLO needs"),
        (lambda: fm.cos(REPORTS), "COS needs the clients' cosines"),
        (summed([made(1)], score="MERIT"), "MERIT needs SOLO, which client 'A' never reported"),
        (summed([made(1, "AB"), made(2, "A", silent=["B"])], score="EE"), "needs a report from everyone"),
        *((lambda score=score: score(made(2, "AB", silent=["C"])), "round 2: ") for score in (
            fp, ee, fm.surplus, influence)),
        (lambda: influence(Reports(empty=0, grand=1, alone=[0, 2, 1], without=[1, -1, 0])),
         "the others' reports on client 'client-2' add up to zero"),
        (lambda: cos_model([[-1.0, 0.0], [0.0, 1.0]], [1.0, 0.0]), "COS-MODEL: a model is zero"),
        *((phi([[1, 2]], bad), "no gain to divide") for bad in ([0, 0], [[1, 1], [-1, -1]])),
    ],
    InputError: [
        (lambda: ee(REPORTS, combine="mode"), "combine must be 'mean' or 'median', got 'mode'"),
        (lambda: ee(REPORTS, combine=["mean"]), "combine must be 'mean' or 'median', got ['mean']"),
        *((lambda score=score: score(REPORTS, empty="none"), "got 'none'")
          for score in (alpha, fp, ee, influence)),
        (near([1, 2], [1, 3], minimum="never"), "minimum must be 'always' or 'negative', got 'never'"),
        (summed([made(1)], score="SURPLUS"), "ALPHA, LOO, IOI, FP, EE, COS, MERIT, PHI, got 'SURPLUS'"),
        (summed([made(1)], missing="skip"), "missing must be 'zero' or 'own-mean'"),
        (summed([PHI], score="PHI", missing="mean"), "missing must be 'zero' or 'own-mean'"),
        *((weighed(bad), f"expected 2 weights, one per size 0..1, got shape {shape}") for bad, shape in (
            ([1], "(1,)"), ([[0, 1]], "(1, 2)"))),
        *((weighed([0, bad]), f"weights[1] must be from 0 to 1e+100, got {bad}")
          for bad in (-0.5, nan, inf, 1e101)),
        (sampled(1), "needs 2 to 62 clients, got 1"),
        (sampled(10**9), "needs 2 to 62 clients, got 1000000000"),
        *((sampled(bad), f"clients, unless they are names, {COUNTS} 1, got {bad}") for bad in (None, 5.0)),
        *((sampled(budget=bad), f"budget for two pairs of orders of 18 clients {COUNTS} 70, got {bad!r}")
          for bad in (69, nan, "x", 100.5)),
        *((sampled(seed=bad), f"seed {COUNTS} 0, got {bad}") for bad in (-1, 0.5)),
        *((lambda function=function, bad=bad: function(SURE, level=bad),
          "level must lie between 0 and 1, got")
          for function in (intervals, compare_pairs, rank_intervals)
          for bad in (0, 1, -0.5, 95, nan, "x", None, 1j, [0.9], Decimal("nan"), huge)),
        (lambda: resolvable_gap(1, 1, level=0), "level must lie between 0 and 1"),
        *((call, f"{name} must be a finite number above 0, got {bad!r}"[:60])
          for bad in (0, -1, nan, inf, "x", None, 1j, [0.9], Decimal("nan"), huge)
          for name, call in (
              ("sd", lambda bad=bad: resolvable_gap(1, bad)),
              ("samples", lambda bad=bad: resolvable_gap(bad, 1)))),
        *((lambda bad=bad: resolvable_gap(1, 1, power=bad), "power must lie in [0.5, 1), got")
          for bad in (1, "x", None, nan, huge)),
        *((lambda bad=bad: resolvable_gap(1, 1, comparisons=bad), f"comparisons {COUNTS} 1, got")
          for bad in (0, nan, 1.5, "x", True, huge)),
        *((lambda bad=bad: resolvable_gap(1, 1, freedom=bad), f"freedom {COUNTS} 1, got")
          for bad in (0, 1.5)),
        (weighed(labelled([1, 0], [1, 0])), "the sizes 0, 1, 2, ..., got 1"),
        *((divided([1, 2], "impartial", score), f"(ALPHA, IOI, LOO); {score} is not") for score in (
            "EE", "SURPLUS", "COS", "SV", "SOLO", "MERIT", "FP")),
        (divided([1], "impartial"), "rule 'impartial' needs at least 2 clients, got 1"),
        *((divided([1, 1, 8], floor=bad), "floor must lie between 0 and 1/N = 0.333333 for 3 clients")
          for bad in (0.4, -0.1, nan)),
        *((divided([1, 1, 8], cap=bad), "cap must lie between 1/N = 0.333333 and 1 for 3 clients")
          for bad in (0.3, 1.1, nan)),
        *((divided([1, 1, 8], **{name: bad}), f"{name} must be a number, got {bad!r}") for name, bad in (
            ("floor", "a"), ("floor", None), ("cap", True), ("equal", "x"))),
        *((divided(equal=bad), "equal must lie between 0 and 1") for bad in (-0.1, 1.1, nan)),
        (divided(rule="equal", equal=0.5), "equal must be 0 under the rule 'equal', got 0.5"),
        (divided(rule="best"), "rule must be one of fair, fenced, impartial, equal, got 'best'"),
        (divided(forfeits={"X": 0.5}), "forfeits: expected clients that have a score, got 'X'"),
        (divided(forfeits={"A": 2}), "forfeits of 'A' must lie between 0 and 1, got 2"),
        (divided([0, 0, 3], cap=0.5),
         "cap=0.5 leaves a part that nobody may take: only 1 of 3 clients have a pos"),
        (divided([1, 0.8, 1e-17], cap=0.4),
         "cap=0.4 leaves a part that nobody may take: only 2 of 3 clients"),
        *((divided([1, 1e-49, 3e-318, 3e-318], cap=cap),
          "leaves a part that nobody may take: only 1 of 4 clients")
          for cap in (0.4, 0.5, 0.9)),
        (lambda: shares([1, 2, 3]), "shares takes Scores, got list"),
        (divided(rule="hands"), "shares takes a Panel under the rule 'hands', got Scores"),
        (divided(score="PANEL"), "PANEL ranks and pays nobody"),
        (lambda: shares(PANEL, "fair"), "shares divides a Panel by the rule 'hands', got 'fair'"),
        *((lambda given=given: shares(PANEL, "hands", **given), "the rule 'hands' takes no equal part, floor")
          for given in ({"equal": 0.5}, {"floor": 0.1}, {"cap": 0.5}, {"forfeits": {"A": 1.0}})),
        (lambda: share_intervals(PANEL.scores, PANEL.hands()), "takes shares of Scores; for rule 'hands'"),
        (judged(np.ones((2, 2))), "hands: expected at least 3 clients, because nobody judges itself, got 2"),
        (lambda: share_errors(fm.Panel(np.ones((2, 2)))), "hands: expected at least 3 clients"),
        *((judged(np.ones((3, 3)), most=bad), "most must be a finite number above 0, got")
          for bad in (0, -1, nan, inf, "3", None, True)),
        (lambda: share_intervals(shares(scores()), scores()),
         "share_intervals takes Scores and the Shares of them"),
        (lambda: share_intervals(scores([1, 2, 3], stderr=[1] * 3), shares(scores())),
         "got some without client 'C'"),
        *((paid(budget=bad), f"budget must be text, int or Decimal, like '10000.00', got {bad}")
          for bad in (100.0, True, None)),
        *((paid(budget=bad), "can be read as") for bad in ("10,000", "1.000")),
        *((paid(budget=bad),
          f"budget: expected an amount like 10000.00, 10,000.00 or 10 000,00 EUR, got {bad!r}")
          for bad in ("", "-1", "NaN", "Infinity", "1e3", "1_000", "2 000 000 00", "2 EURO", "+2", "2.",
          ".5", "\u0661\u0662")),
        (paid(budget="2 XYZ"), "budget: expected a currency such as EUR in '2 XYZ', got 'XYZ'"),
        *((paid(budget=bad), "budget must have at most 2 decimals, got")
          for bad in ("0.500", "1234.005", Decimal("1e-7"))),
        *((paid(budget=bad), "budget must be finite, at least 0 and below 1e24, got")
          for bad in (-1, Decimal("NaN"), Decimal("sNaN"), "1" + "0" * 24, Decimal("1e999999"))),
        *((paid(bad), "payouts takes a mapping of name to share, got") for bad in ({}, [0.5, 0.5])),
        (paid({"A": 0.7, "B": 0.7}), "shares must sum to at most 1, got 1.4"),
        (paid({"A": 1.5, "B": -0.5}), "share of 'B' must not be negative, got -0.5"),
        (paid({1: 0.5, "B": 0.5}), "names of clients must be text, got 1"),
        (lambda: division({"A": 0.5, "B": 0.5}, 1).cents_of("A", Fraction(1, 3)),
         "share of 'A' is not one of those that were divided: Fraction(1, 3)"),
        *((paid({"A": bad}), "share of 'A' must be a finite number, got")
          for bad in (nan, inf, "1", None, True, np.bool_(True), 1 + 0j)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "call", "says"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_it_is_refused_with_the_reason(kind, call, says):
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    assert says in str(caught.value)
