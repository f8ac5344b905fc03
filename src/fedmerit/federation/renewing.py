"""Score files that are older than the ledger, written anew from it."""

from __future__ import annotations

from pathlib import Path

from fedmerit.config import of_folder
from fedmerit.errors import CopyDiffers, StoreError
from fedmerit.federation.files import check_scores, read_scores, write_scores
from fedmerit.federation.journal import rounds_of
from fedmerit.federation.steady import snapshot
from fedmerit.federation.verify import verify_folder
from fedmerit.layout import LEDGER
from fedmerit.store import Folder


def renew(path: Path) -> str:
    """Write the score files of a run anew where a kill left them older than its ledger.

    The folder is held meanwhile, and must verify.

    Returns:
        What was done, in words; nothing where the files were up to date.

    Raises:
        StoreError: another process holds the folder, or a file says something else than the ledger: it may
            be somebody's work, and is left to whoever changed it.
    """
    try:
        return _renewed(path)
    except CopyDiffers as error:
        raise StoreError(str(error)) from error


def _renewed(path: Path) -> str:
    config = of_folder(path)
    files, ledger = read_scores(path), snapshot(path / LEDGER)
    if not check_scores(path, files, rounds_of(ledger), config):
        return ""
    with Folder(path, config, resume=True) as folder:
        for _ in verify_folder(path):
            pass
        rounds = rounds_of(folder.ledger)
        files = read_scores(path)
        late = check_scores(path, files, rounds, config)
        if not late:
            return ""
        if config.scoring.truth:
            raise StoreError(
                f"{path / 'scores.json'}: older than the ledger, and holds ground truth, which no ledger "
                "does: `fedmerit run --resume` writes it anew"
            )
        write_scores(path, rounds, config)
    names, were = " and ".join(late), "was" if len(late) == 1 else "were"
    older = [count for name, count in late.items() if files[name] is not None]
    if not older:
        return f"wrote {names} anew, which {were} not there"
    behind = f"{max(older)} round{'' if max(older) == 1 else 's'} older than the ledger"
    return f"wrote {names} anew, which {were} {'' if len(older) == len(late) else 'not there or '}{behind}"
