"""tab:coalitions: what each score is built from, found by changing one thing at a time, and its axioms."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fedmerit import Reports, Scores, alpha, ee, fp, ioi, loo, surplus

BLOCKS = ("M0", "+Ui", "+Uj", "-Uj", "-Ui", "M")
AXIOMS = ("efficiency", "null player", "symmetry", "privacy", "incentive", "linearity")

LISTED: dict[str, tuple[Callable[[Reports], Scores], tuple[str, ...], tuple[str, ...]]] = {
    # score: function, the paper's axioms, ours
    "LOO": (loo, ("null player", "symmetry", "privacy"), ("null player", "symmetry", "privacy", "linearity")),
    "FP": (
        fp,
        ("efficiency", "null player", "symmetry", "privacy"),
        ("efficiency", "null player", "symmetry", "privacy"),
    ),
    "EE": (
        ee,
        ("efficiency", "symmetry", "privacy", "incentive"),
        ("efficiency", "symmetry", "privacy", "incentive"),
    ),
    "IOI": (ioi, (), ("null player", "symmetry", "privacy", "linearity")),
    "ALPHA": (alpha, (), ("null player", "symmetry", "privacy", "linearity")),
    "SURPLUS": (surplus, (), ("efficiency", "symmetry", "privacy", "linearity")),
}

TESTS = {
    "efficiency": ("tests/test_scores.py::test_fp_and_ee_add_up_to_the_pot_and_surplus_to_the_gain",),
    "null player": (
        "tests/test_scores.py::test_a_null_player_gets_nothing_from_fp_alpha_loo",
        "tests/test_scores.py::test_the_null_player_axiom_fails_for_ee_and_surplus",
        "tests/test_scores.py::test_the_papers_null_player_example",
    ),
    "symmetry": ("tests/test_scores.py::test_equal_reports_get_equal_scores",),
    "privacy": (
        "tests/federation/test_embedded.py::test_what_the_server_receives_holds_no_plain_update",
        "tests/federation/test_embedded.py::test_secure_aggregation_on_and_off_end_with_the_same_bytes",
    ),
    "incentive": (
        "tests/test_scores.py::test_raw_ee_of_i_ignores_report_i_bit_for_bit",
        "tests/test_scores.py::test_but_the_share_and_the_rank_of_i_do_move_with_report_i",
    ),
    "linearity": (
        "tests/test_scores.py::test_linear_scores_are_linear",
        "tests/test_scores.py::test_fp_and_ee_are_not_linear",
    ),
}
"""Where each axiom is checked: on random games, with counterexamples where it fails."""


def blocks(function: Callable[[Reports], Scores]) -> dict[str, str]:
    """Which utilities move the score of member 0: "●" its raw score, "○" the published, rescaled one only."""
    rng = np.random.default_rng(0)
    alone, without = rng.uniform(0.2, 0.4, 4), rng.uniform(0.5, 0.6, 4)

    def scored(moved: str | None) -> tuple[float, float]:
        own, others = np.array([1.0, 0, 0, 0]), np.array([0, 1.0, 0, 0])
        shift = {name: 0.01 if name == moved else 0.0 for name in BLOCKS}
        made = function(
            Reports(
                empty=0.1 + shift["M0"],
                grand=0.7 + shift["M"],
                alone=alone + shift["+Ui"] * own + shift["+Uj"] * others,
                without=without + shift["-Ui"] * own + shift["-Uj"] * others,
            )
        )
        return float(made.raw[0]), float(made.values[0])

    raw, published = scored(None)
    found = {}
    for name in BLOCKS:
        now = scored(name)
        found[name] = "●" if abs(now[0] - raw) > 1e-12 else "○" if abs(now[1] - published) > 1e-12 else ""
    return found


def axioms_section() -> Iterator[str]:
    """The table, and the tests behind it."""
    yield "# tab:coalitions: building blocks of the scores, and the axioms they satisfy"
    yield ""
    yield "Building blocks are found by moving one utility at a time: ● moves the member's raw score, ○"
    yield "only the published one, through the rescaling. ✓ is the paper's claim and holds; + holds and"
    yield "is not in the paper's table. EE's incentive is that of its raw score: share and rank do move with"
    yield "one's own report."
    yield ""
    yield "| score | " + " | ".join((*BLOCKS, *AXIOMS)) + " |"
    yield "|" + "---|" * (1 + len(BLOCKS) + len(AXIOMS))
    for name, (function, theirs, ours) in LISTED.items():
        assert set(theirs) <= set(ours)
        marks = ["✓" if axiom in theirs else "+" if axiom in ours else "" for axiom in AXIOMS]
        yield "| " + " | ".join([name, *blocks(function).values(), *marks]) + " |"
    yield ""
    yield "| axiom | checked by |"
    yield "|---|---|"
    for axiom, tests in TESTS.items():
        yield f"| {axiom} | {', '.join(f'`{test}`' for test in tests)} |"
    yield ""
    yield "    pytest " + " ".join(
        dict.fromkeys(test.partition("::")[0] for each in TESTS.values() for test in each)
    )
