"""Reports to make pages of: small, with known answers, and one run folder with somebody away."""

import json
import re
from html import unescape

from fedmerit.files.documents import as_csv, as_json, document
from fedmerit.scoring.types import Reports

NAMES = ("North", "South", "East", "West")
HOSTILE = (
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 2">',
    "</script><b>bold</b>",
    "{{ 7 * 7 }} & 'quoted' \u2028 ü",
)


def of_alpha(alpha, gain, *, start=0.0, names=None, se=None, **more):
    """One round in which LOO and IOI of each member are this number."""
    return Reports(
        empty=start, grand=start + gain, alone=[start + one for one in alpha],
        without=[start + gain - one for one in alpha], clients=tuple(names or ()),
        se_alpha=None if se is None else [se] * len(alpha), **more,
    )  # fmt: skip


def rounds(names=NAMES, *, utility="expected-accuracy", count=3, se=0.004, turn=False):
    """Contributions 0.08, 0.05, 0.05, -0.02 a round; with ``turn`` the order of the members is reversed."""
    alpha = [0.08, 0.05, 0.05, -0.02]
    more = {"names": names, "utility": utility, "se": se}
    return [
        of_alpha(alpha[::-1] if turn else alpha, 0.16, start=0.1 + 0.16 * k, **more,
                 slice="one" if k % 2 == 0 else "two", round=k + 1)
        for k in range(count)
    ]  # fmt: skip


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


def write_csv(folder, *rounds, name="reports.csv"):
    """A table of reports."""
    path = folder / name
    path.write_text(as_csv(document(rounds)), encoding="utf-8")
    return path


def read_aloud(html):
    """The words of a page: no tags, scripts and styles."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
