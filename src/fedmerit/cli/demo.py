"""The demo's settings, and a config file that explains itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from fedmerit import config
from fedmerit.errors import ConfigError

DEMO: dict[str, Any] = {
    "partition": {
        "scheme": "iid",
        "names": ["Abbey", "Bridge", "Castle", "Dale", "Elm", "Harbour"],
    },
    "corruption": {"label_noise": {"Harbour": 0.8}},
    "model": {"name": "mlp"},
    "training": {"rounds": 6, "local_epochs": 3},
}
"""Six hospitals; the labels of one are mostly noise."""


def is_demo(folder: Path) -> bool:
    """Whether a folder holds a run of the demo's hospitals."""
    try:
        found = config.of_folder(folder)
    except ConfigError:
        return False
    return found.clients == tuple(DEMO["partition"]["names"])


def commented_config() -> str:
    """Every setting with its default, explained by the comment beside it in `fedmerit.config`."""
    default = config.Config()
    lines = [
        "# fedmerit: settings of a run. Every key has this default; delete what you do not change.",
        "# fedmerit run THIS.toml --out runs/first",
        "",
    ]
    toml = iter(default.to_toml().splitlines())
    comments = _comments()
    section = ""
    for line in toml:
        if line.startswith("["):
            section = line.strip("[]")
            kind = type(getattr(default, section))
            lines += [f"# {(kind.__doc__ or '').strip()}", line]
            continue
        key = line.partition(" = ")[0]
        above, beside = comments.get((section, key), ("", ""))
        lines += [above] if above else []
        lines.append(f"{line}  # {beside}" if beside else line)
    return "\n".join(lines) + "\n"


def _comments() -> dict[tuple[str, str], tuple[str, str]]:
    """By section and key, the comments above and beside a setting in the source; choices where there are."""
    found = {}
    for section in vars(config.Config()):
        kind = type(getattr(config.Config(), section))
        above = ""
        for line in inspect.getsource(kind).splitlines():
            if line.strip().startswith("# "):
                above = line.strip()
                continue
            declared, _, comment = line.partition("  # ")
            key, colon, hint = declared.strip().partition(": ")
            if colon and key.isidentifier():
                choices = (
                    hint.partition("]")[0].removeprefix("Literal[") if hint.startswith("Literal[") else ""
                )
                words = [choices.replace('"', "").replace(", ", " | "), comment.strip()]
                found[section, key] = above, "; ".join(word for word in words if word)
            above = ""
    return found
