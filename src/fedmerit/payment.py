"""Record a payout decision in a run's ledger, signed by the server's key in the run folder."""

from __future__ import annotations

from pathlib import Path

from fedmerit.config import of_folder
from fedmerit.errors import LedgerError, StoreError
from fedmerit.identity.encoding import SERVER
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Decision, Terms, decide, decisions_of
from fedmerit.ledger.records import Journal, Sign, first_body, rounds_of
from fedmerit.protocol.messages import Round
from fedmerit.scoring.doubts import check_payable, doubts
from fedmerit.scoring.files import LEDGER
from fedmerit.storage.run_folder import Folder, scored_in
from fedmerit.verify import verify_folder


def record_decision(path: Path, terms: Terms) -> tuple[Decision, bool]:
    """Verify a run, decide, and write it down.

    Args:
        path: the run folder.
        terms: what is to be paid, and how.

    Returns:
        The decision, and whether it is new: the same terms over the same rounds as the last decision are
        that decision, and nothing is written.

    Raises:
        DoubtfulShares: the reports contradict themselves, and the terms do not say to pay despite that.
    """
    for _ in verify_folder(path):  # money is paid from what verifies, or not at all
        pass
    config = of_folder(path)
    with Folder(path, config, resume=True) as folder:
        rounds = rounds_of(folder.ledger)
        before = decisions_of(folder.ledger, rounds, config.scoring)
        found = doubts(scored_in(rounds, terms.utility), game=config.scoring.game)
        check_payable(found, terms.rule, despite=terms.despite_doubts)
        made = decide(rounds, terms, before, game=config.scoring.game)
        if before and before[-1].terms == terms and before[-1].rounds == made.rounds:
            return before[-1], False
        journal = Journal(folder.ledger, _signer(path, folder.ledger))
        place = 0
        with folder.ledger.transaction():
            for kind, body in made.records(config.scoring):
                written = journal.write(SERVER, kind, body)
                place = place or written.seq
        return Decision(**{**vars(made), "record": place}), True


def read_run(path: Path) -> tuple[list[Round], list[Decision], str]:
    """Rounds, decisions and head of a run that has been verified."""
    config = of_folder(path)
    with Ledger(path / LEDGER, read_only=True) as ledger:
        rounds = rounds_of(ledger)
        return rounds, decisions_of(ledger, rounds, config.scoring), ledger.head


def _signer(path: Path, ledger: Ledger) -> Sign:
    from fedmerit.identity.keys import load_key, public_key

    keys = first_body(ledger, "run")["keys"]
    if keys is None:
        return lambda author, message: b""
    file = path / "keys" / f"{SERVER}.pem"
    if not file.exists():
        raise StoreError(
            f"{file}: only who holds the server's key can record a decision; --dry-run prints it"
        )
    key = load_key(file)
    if public_key(key).hex() != keys[SERVER]:
        raise LedgerError(f"{file}: not the key that the ledger names as the server's")
    return lambda author, message: key.sign(message)
