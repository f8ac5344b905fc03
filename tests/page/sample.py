"""Reports to make pages of: small, with known answers, and one run folder with somebody away."""

import json

from fedmerit.scoring.files import as_json, document
from fedmerit.scoring.types import Reports

NAMES = ("North", "South", "East", "West")
HOSTILE = (
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "</script><b>bold</b>",
    "{{ 7 * 7 }} & 'quoted' \u2028 ü",
)


def rounds(names=NAMES, *, utility="expected-accuracy", count=3, se=0.004, turn=False):
    """Contributions 0.08, 0.05, 0.05, -0.02 a round; with ``turn`` the order of the members is reversed."""
    alpha = [0.08, 0.05, 0.05, -0.02]
    if turn:
        alpha = alpha[::-1]
    found = []
    for k in range(count):
        empty = 0.1 + 0.16 * k
        grand = empty + 0.16
        found.append(
            Reports(
                empty=empty,
                grand=grand,
                alone=[empty + a for a in alpha],
                without=[grand - a for a in alpha],
                clients=names,
                se_alpha=None if se is None else [se] * 4,
                slice="one" if k % 2 == 0 else "two",
                utility=utility,
                round=k + 1,
            )
        )
    return found


def write_scores(folder, names=NAMES, *, companion=False, **how):
    """A lone scores.json."""
    content = document(rounds(names, **how))
    if companion:
        content["companions"] = {"accuracy": document(rounds(names, utility="accuracy", turn=True))}
    path = folder / "scores.json"
    path.write_text(as_json(content), encoding="utf-8")
    return path


def changed(path, change):
    """A JSON file with something changed."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
