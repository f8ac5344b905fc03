"""What FINDINGS.md says of the paper's claims, each tried by the authors' protocol, by the text, by ours."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from cells import Result, Row, datasets
from evidence import LAST, Claims, Evidence, Facts, between, lines, mean
from grid import grid, settled, text
from measures import NOT_MEASURED, curve, flipper_of, influences, is_thin, reports, spread, within
from overview import PRINTED_WAY
from protocols import (
    AUTHORS,
    OURS,
    PROTOCOLS,
    TEXT,
    UTILITY,
    compared,
    influences_of,
    is_turned,
    kept,
    last_in,
    vectors,
)
from retrained import bounds, sign_test
from sections import done

from fedmerit import agreement, ee, fp, normalise

PAPERS_DATA = ("cifar10", "brain_mri", "isic2019_slow")
"""The paper's data, of which we have subsets; the lung tissue stands in for PCam and does not count here."""
CNN = ("cifar10", "brain_mri")
OTHER_GAME = "renormalised game"
"""The rows of tab:error whose truth and scores are those of the scripts' game."""
ABLATIONS = ("tab:error", "tab:round", "tab:client", "tab:alpha")
HOLDS, ONLY, NOT = "holds", "holds under the authors' protocol only", "not seen here"
AT_THE_END = "holds in the last round only"
Column = tuple[str, bool | str | None]
"""What a protocol shows, and whether the claim holds there (or a verdict); None if it cannot say."""
NOTHING: Column = ("–", None)


def verdict(columns: Mapping[str, Column]) -> str:
    """Over the authors' protocol and the text; ours is beside the point.

    >>> verdict({AUTHORS: ("", True), TEXT: ("", False), OURS: ("", True)})
    "holds under the authors' protocol only"
    """
    said = {protocol: columns[protocol][1] for protocol in (AUTHORS, TEXT)}
    if isinstance(said[TEXT], str):
        return said[TEXT]
    if said[TEXT] and said[AUTHORS] is not False:
        return HOLDS
    return ONLY if said[AUTHORS] else NOT


def lead(values: Sequence[float]) -> Column:
    """A mean difference, its 95 % interval, and whether that lies above 0."""
    low, high = bounds(np.array(values))
    shown = [text(value, "+.2f") for value in (mean(list(values)), low, high)]
    return f"{shown[0]} ({shown[1]} to {shown[2]}; {len(values)})", grid(low) > 0


def near(cell: Result, protocol: str, at: int, score: str, truth: str) -> float | None:
    """Spearman of one score of one run."""
    every = vectors(cell, protocol, at)
    if score not in every or truth not in every:
        return None
    return agreement(every[score], every[truth]).spearman


def differences(pairs: Sequence[tuple[float | None, float | None]]) -> list[float]:
    """Of the pairs in which both are defined."""
    return [one - other for one, other in pairs if one is not None and other is not None]


def verdicts(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The table with which FINDINGS.md begins."""
    said = functools.partial(claimed, evidence)
    tried = [
        ("FP, and EE, its twin, follow the Shapley value better than LOO (`tab:error`)",
         said("tab:error", ("FP", ""), ("LOO", "")),
         _against(evidence, "LOO", "tab-error", PAPERS_DATA, "truth")),
        ("... also in the renormalised game, which the scripts play",
         said("tab:error", ("FP", ""), ("LOO", "")),
         _against(evidence, "LOO", "tab-error", CNN, "truth", OTHER_GAME)),
        ("... and the retrained value (`tab:error_game`; 6 members here)",
         said("tab:error_game", ("FP", ""), ("LOO", "")),
         _against(evidence, "LOO", "tab-error-game", CNN, "SV")),
        ("MR-SV is nearly the retrained value: Spearman above 0.95, a threshold of ours",
         said("tab:error_game", ("MR-SV", "")), _mrsv(evidence)),
        ("FP follows better than COS (here of updates)",
         said("tab:error", ("FP", ""), ("COS", "")),
         _against(evidence, "COS", "tab-error", PAPERS_DATA, "truth")),
        ("... of models, in the renormalised game",
         said("tab:error", ("FP", ""), ("COS", "")),
         _against(evidence, "COS", "tab-error", CNN, "truth", OTHER_GAME)),
        ("later rounds are followed better: FP, round 15 less 5 (`tab:round`)",
         said("tab:round", ("FP", "15"), ("FP", "5")), _rounds(evidence)),
        ("more members are followed less: FP, 6 less 15 (`tab:client`)",
         said("tab:client", ("FP", "6"), ("FP", "15")), _paired(evidence, "tab-client", "6", "15")),
        ("similar members are followed less: FP, mu 0.1 less 1.0 (`tab:alpha`)",
         said("tab:alpha", ("FP", "0.1"), ("FP", "1.0")), _paired(evidence, "tab-alpha", "0.1", "1.0")),
        ("one member's influence on another's EE has a variance below 0.01 (`tab:attack`)",
         between([v for row in evidence.paper["influence"]["values"] for v in row if v], ".2f"),
         _influence(evidence)),
        ("weights by FP beat FedAvg in the loss of the last round (`fig:perf`)",
         _drawn(evidence, "FedAvg"), _weights(evidence, "FedAvg")),
        ("... and weights by LOO", _drawn(evidence, "LOO"), _weights(evidence, "LOO")),
        ("FP finds a label flipper more often than LOO (`fig:misbeh`)",
         "{FP}; LOO {LOO}".format(**evidence.paper["detection"]["values"]["CIFAR10"]), _detection(evidence)),
        ("FP lies closer to the Shapley value than LOO: LOO's squared L2 less FP's (`tab:error`)",
         said("tab:error", ("LOO", ""), ("FP", ""), "l2"), _distances(evidence)),
    ]  # fmt: skip
    head = ["the paper's claim", "the paper", *PROTOCOLS, "verdict"]
    body = [
        [claim, said, *(columns[p][0] for p in PROTOCOLS), f"**{verdict(columns)}**"]
        for claim, said, columns in tried
    ]
    facts["verdict table"] = lines(head, body)
    found = [verdict(columns) for _, _, columns in tried]
    claims["FP and EE beat LOO by the authors' protocol only"] = found[:3] == [ONLY, ONLY, ONLY]
    facts["main lead"], facts["main lead, text"] = (tried[0][2][p][0] for p in (AUTHORS, TEXT))
    facts["main lead, both games"] = tried[1][2][AUTHORS][0]
    facts["main lead, retrained"] = tried[2][2][AUTHORS][0]
    brain = compared(evidence.cells("tab-error-game", "brain_mri"), AUTHORS, 10, "SV")["FP"]["spearman"]
    facts["retrained Brain"] = spread(brain)
    hits = last_in(evidence.cells("fig-misbeh", "cifar10"), AUTHORS, 10, flipper_of)
    claims["what is not reproduced"] = (
        [place for place, one in enumerate(found) if one == NOT] == [3, 6, 7, 8, 11, 12]
        and found[10] == AT_THE_END
        and mean(brain) < 0.9
        and tried[8][2][AUTHORS][0].startswith("-")
        and min(hits["LOO"][0], hits["COS"][0]) >= 9
    )
    _rows(evidence, facts, claims)
    _signs(evidence, facts, claims)


def claimed(
    evidence: Evidence,
    label: str,
    first: tuple[str, str],
    other: tuple[str, str] | None = None,
    metric: str = "spearman",
) -> str:
    """The paper's number for a score and row, or its lead over another: the range over its data."""
    known: dict[tuple[str, str], dict[str, float]] = {}
    for one in evidence.paper["numbers"]:
        if (one["label"], one["metric"]) == (label, metric):
            known.setdefault((one["score"], one["row"]), {})[one["dataset"]] = one["mean"]
    if other is None:
        return between([*known[first].values()], ".2f")
    return between([value - known[other][data] for data, value in known[first].items()], "+.2f")


def _drawn(evidence: Evidence, other: str) -> str:
    """The paper's lead of FP in the loss of the last round."""
    known = evidence.paper["performance"]["values"]
    return between([values["FP"] - values[other] for values in known.values()], "+.2f")


def _against(
    evidence: Evidence, other: str, table: str, data: Sequence[str], truth: str, row: str = ""
) -> dict[str, Column]:
    """By how much FP is closer to the truth than another score."""
    cells = [cell for dataset in data for cell in evidence.cells(table, dataset, row)]
    found = {}
    for p in PROTOCOLS:
        than = kept(cells, other, p)
        found[p] = differences([(near(c, p, 10, "FP", truth), near(c, p, 10, than, truth)) for c in cells])
    return {p: lead(values) if values else NOTHING for p, values in found.items()}


def _distances(evidence: Evidence) -> dict[str, Column]:
    """By how much FP is closer than LOO in squared L2, run by run."""
    found: dict[str, Column] = {}
    for p in PROTOCOLS:
        each = [compared([cell], p, 10) for data in PAPERS_DATA for cell in evidence.cells("tab-error", data)]
        found[p] = lead([one["LOO"]["l2"][0] - one["FP"]["l2"][0] for one in each if one])
    return found


def _mrsv(evidence: Evidence) -> dict[str, Column]:
    cells = [cell for dataset in CNN for cell in evidence.cells("tab-error-game", dataset)]
    found = {}
    for p in PROTOCOLS:
        values = [value for c in cells if (value := near(c, p, LAST, "MR-SV", "SV")) is not None]
        low, high = bounds(np.array(values))
        shown = [text(value, ".2f") for value in (mean(values), low, high)]
        found[p] = f"{shown[0]} ({shown[1]} to {shown[2]}; {len(values)})", grid(low) > 0.95
    return found


def _rounds(evidence: Evidence) -> dict[str, Column]:
    """Within the runs of 15 rounds."""
    cells = [cell for dataset in CNN for cell in evidence.cells("tab-round", dataset, "15")]
    return {
        p: lead(differences([(near(c, p, 15, "FP", "truth"), near(c, p, 5, "FP", "truth")) for c in cells]))
        for p in PROTOCOLS
    }


def _paired(evidence: Evidence, table: str, one: str, other: str) -> dict[str, Column]:
    """Of two rows, seed by seed."""
    found = {}
    for p in PROTOCOLS:
        values: list[tuple[float | None, float | None]] = []
        for dataset in CNN:
            known = [
                {c["seed"]: near(c, p, 10, "FP", "truth") for c in evidence.cells(table, dataset, row)}
                for row in (one, other)
            ]
            values += [(known[0][seed], known[1][seed]) for seed in known[0] if seed in known[1]]
        found[p] = lead(differences(values))
    return found


def _influence(evidence: Evidence) -> dict[str, Column]:
    cells = evidence.cells("tab-attack", "brain_mri")
    found: dict[str, Column] = {OURS: ("0: nobody moves another's alpha", None)}
    for p, every in ((AUTHORS, influences_of(cells, 10)), (TEXT, influences(cells, UTILITY[TEXT], 10))):
        single = every[:, ~np.eye(every.shape[1], dtype=bool)]
        average, most = settled(single.mean(0)).tolist(), float(single.var(0).max())
        shown = text(most, ".4f" if most < 0.01 else ".0f")
        found[p] = f"{between(average, '.2f')}; variance up to {shown} ({len(every)})", most < 0.01
    return found


def _weights(evidence: Evidence, other: str) -> dict[str, Column]:
    """The text's weights of the same round, as printed; ours are of the rounds before, and clipped."""

    def ahead(way: str, than: str, back: int) -> Column:
        base, own = (
            {c["seed"]: curve(c, "neg-loss")[-back] for c in evidence.cells("fig-perf", "cifar10", one)}
            for one in (than, way)
        )
        return lead([value - base[seed] for seed, value in own.items()])

    last, before = (ahead(f"FP = EE{PRINTED_WAY}", f"{other}{PRINTED_WAY}", back) for back in (1, 2))
    said = f"{last[0]}; a round earlier {before[0]}", AT_THE_END if last[1] and not before[1] else last[1]
    return {AUTHORS: NOTHING, TEXT: said, OURS: ahead("summed alpha (ours)", other, 1)}


def _detection(evidence: Evidence) -> dict[str, Column]:
    cells = evidence.cells("fig-misbeh", "cifar10")
    found = {}
    for p in PROTOCOLS:
        hits = {name: [last_in([c], p, LAST, flipper_of)[name][0] for c in cells] for name in ("FP", "LOO")}
        counts = {
            name: f"{sum(each)} of {len(each)} ({within(sum(each), len(each))})"
            for name, each in hits.items()
        }
        more = np.subtract(hits["FP"], hits["LOO"]).astype(float)
        found[p] = f"{counts['FP']}; LOO {counts['LOO']}", bool(more.sum() > 0 and sign_test(more) < 0.05)
    return found


def _rows(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """In how many rows of the paper's data FP is ahead of LOO."""
    ahead: dict[str, list[bool]] = {p: [] for p in PROTOCOLS}
    for row, cells in counted(evidence, ABLATIONS):
        for p in PROTOCOLS:
            if found := compared(cells, p, row.at):
                ahead[p].append(mean(found["FP"]["spearman"]) > mean(found["LOO"]["spearman"]))
    facts["rows ahead"], facts["rows ahead, text"] = (
        f"{sum(ahead[p])} of {len(ahead[p])}" for p in (AUTHORS, TEXT)
    )
    claims["FP is ahead of LOO in every row by the authors' protocol"] = all(ahead[AUTHORS])
    body: list[list[str]] = []
    gaps: dict[str, list[float]] = {"": [], OTHER_GAME: []}
    for dataset, row in [*((one, "") for one in PAPERS_DATA), *((one, OTHER_GAME) for one in CNN)]:
        cells = evidence.cells("tab-error", dataset, row)
        name = ", ".join(filter(None, (datasets()[dataset]["short"], row)))
        for score in ("LOO", "FP"):
            said = evidence.said("tab:error", "spearman", datasets()[dataset]["paper"], score)
            every = [compared(cells, p, 10) for p in PROTOCOLS]
            each = [spread(one[score]["spearman"]) if one else NOT_MEASURED for one in every]
            body.append([name, str(len(cells)), score, text(said, ".3f"), *each])
            if score == "FP":
                gap = grid(abs(mean(compared(cells, AUTHORS, 10)[score]["spearman"]) - said))
                gaps[row].append(gap)
    facts["gap additive"], facts["gap renormalised"] = (text(max(each), ".2f") for each in gaps.values())
    claims["FP by the authors' protocol is near the paper's"] = max(map(max, gaps.values())) < 0.07
    facts["protocol table"] = lines(["data", "seeds", "score", "the paper", *PROTOCOLS], body)


def counted(evidence: Evidence, labels: Sequence[str]) -> list[tuple[Row, list[Result]]]:
    """Rows of the paper's data with enough seeds; the same runs at the same round count once."""
    known: dict[tuple[int, ...], tuple[Row, list[Result]]] = {}
    for row in evidence.rows:
        cells = done(row, evidence.results)
        if row.label in labels and row.dataset in PAPERS_DATA and not is_thin(cells):
            known.setdefault((row.at, *sorted(cell["name"] for cell in cells)), (row, cells))  # type: ignore[arg-type]
    return list(known.values())


def _signs(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """How often a sign turns, by each convention, and how far FP and EE differ where none does."""
    total = zero = literal = same = 0
    worst = 0.0
    for name in sorted(evidence.results):
        cell = evidence.results[name]
        if "accuracy" not in cell["utilities"]:
            continue
        for one in reports(cell, "accuracy"):
            total += 1
            first, second = fp(one), ee(one)
            literal += "reversed" in (first.status, second.status)
            zero += "reversed" in (fp(one, empty="zero").status, ee(one, empty="zero").status)
            if first.status == second.status == "ok":
                same += 1
                worst = max(worst, float(np.abs(normalise(first.values) - normalise(second.values)).max()))
    facts |= {
        "accuracy rounds": f"{total:,}",
        "turned by the text": f"{literal:,}",
        "rounds both ok": f"{same:,}",
    }
    claims["with nobody worth 0 no sign turns"] = zero == 0
    claims["FP and EE are one normalised vector unless a sign turns"] = worst < 1e-9
    cells = [cell for dataset in PAPERS_DATA for cell in evidence.cells("tab-error", dataset)]
    facts["turned at the 10th"] = f"{sum(is_turned(cell, TEXT, 10) for cell in cells)} of {len(cells)}"
