"""What a coordinator writes: records, a checkpoint per round, score files; later, payout decisions.

Between machines, a round may be cut short. So the schedule is in the ledger before any member is asked for
its update, and the hashes of the masked inputs before any member is asked for a share: a server that is
killed, or tries twice, leaves a trace. A rehearsal can be resumed and repeats a round that was cut short, so
it writes each round in one transaction. Reports carry their authors' signatures. Score files follow from the
ledger alone: a resumed run, a finished run and its verification give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import DecodeError, Struct, json, to_builtins

from fedmerit.config import Config
from fedmerit.errors import FileFormatError, KeyFileError, LedgerError, StoreError, UnsettledShares
from fedmerit.files.documents import (
    RoundEntry,
    as_csv,
    as_json,
    round_object,
    sums_object,
)
from fedmerit.files.sheets import sheet_text
from fedmerit.identity import SERVER, Roster, Signer, content, exact, load_key, public_key
from fedmerit.ledger.account import Account
from fedmerit.ledger.chain import Bytes
from fedmerit.ledger.decisions import Decision, Terms, decide
from fedmerit.ledger.kinds import Approved
from fedmerit.ledger.rounds import after_round, medians
from fedmerit.ledger.run import Run, replay
from fedmerit.notes import Note
from fedmerit.protocol.outcome import Model, Outcome, Round, model_hash, scored
from fedmerit.protocol.settlement import countersignature
from fedmerit.protocol.terms import EMBEDDED, Agreed
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.doubts import check_payable
from fedmerit.scoring.panel import MOST
from fedmerit.secagg.messages import Blame
from fedmerit.settings import Heading
from fedmerit.storage.run_folder import ARCHIVE, Folder, read_checkpoint, write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


Beside = Callable[[Round, Outcome | None], tuple[str, Mapping[str, Any] | None]]
"""What a rehearsal adds to a round: the hash of its members' checkpoint, and an analysis."""


@dataclass(eq=False)
class LedgerRecorder:
    """The ledger, the model's checkpoints and the score files of one run: a `coordinator.Recorder`."""

    folder: Folder
    config: Config
    roster: Roster
    key: Ed25519PrivateKey | None  # the server's; None in a rehearsal without masks, whose ledger is unsigned
    run: str  # its identifier
    engine: str
    terms: Mapping[str, Any]  # what members agree to
    commitment: Mapping[str, Any]  # of the test pool
    data: str | None = None  # fingerprint of a rehearsal's training data
    constant: float | None = None  # of a rehearsal: the utility of always answering the mean of y
    rounds: list[Round] = field(default_factory=list)  # closed so far
    beside: Beside | None = None  # of a rehearsal
    truth: Callable[[Sequence[int]], Mapping[str, Any]] | None = None  # by rounds with a sum
    resumed: Run | None = None  # the run that is being continued
    _masked: int = 0  # the last round with a record of its masked inputs
    _pending: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)  # of a rehearsal's round

    @cached_property
    def agreed(self) -> Agreed:
        """What members sign when they join."""
        return Agreed(self.terms, self.commitment, self.server)

    @cached_property
    def server(self) -> bytes:
        """The server's public key; empty if nothing is signed."""
        return b"" if self.key is None else public_key(self.key)

    @property
    def head(self) -> str:
        return self.folder.ledger.head

    def sign(self, message: bytes) -> bytes:
        """Sign a message with the server's key; return empty bytes if there is none."""
        return b"" if self.key is None else self.key.sign(message)

    # ----------------------------------------------------------------------------------------- start and end

    def begin(self, first: Model) -> None:
        """Write the first records: settings, keys, first model, and the test pool's commitment."""
        body: dict[str, Any] = {
            "run": self.run,
            "terms": dict(self.terms),
            "keys": self._keys,
            "m0": model_hash(first),
            "data": self.data,
        }
        if self.constant is not None:
            body["constant"] = exact(self.constant)
        with self.folder.ledger.transaction():
            self._write(SERVER, "run", body)
            self._write(SERVER, "pool", self.commitment)

    def check_same(self, first: Model) -> None:
        """Raise StoreError if keys, test pool, data or first model have changed since the run started."""
        assert self.resumed is not None
        begun = self.resumed.first
        pairs = {
            "keys": (begun.keys, self._keys),
            "test pool or its key": (self.resumed.pool, dict(self.commitment)),
            "training data": (begun.data, self.data),
            "first model": (begun.m0, model_hash(first)),
        }
        if changed := [name for name, (before, now) in pairs.items() if before != now]:
            raise StoreError(
                f"{self.folder.path}: cannot be resumed: the {changed[0]} changed since it started"
            )

    @property
    def _keys(self) -> dict[str, str] | None:
        if self.key is None:
            return None
        return {SERVER: self.server.hex()} | {member.name: member.key.hex() for member in self.roster.members}

    def verifies(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Return whether a member signed this; nothing is recorded."""
        return self.key is None or self.roster.verifies(name, signature, content(name, kind, body))

    def said(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Record what a member signed, once; return whether it did sign it."""
        if not self.verifies(name, kind, body, signature):
            return False
        if (name, dict(body)) not in [(author, recorded) for author, recorded, _ in self.signed(kind)]:
            with self.folder.ledger.transaction():
                self._write(name, kind, body, signature)
        return True

    def state(
        self, kind: str, body: Mapping[str, Any], countersigned: Mapping[str, bytes] | None = None
    ) -> None:
        """Record what the server states about the settlement, unless it is its last word of this kind.

        With ``countersigned``, members' signatures under it are recorded in the same step.
        """
        if [*self.recorded(kind)][-1:] != [dict(body)]:
            with self.folder.ledger.transaction():
                self._write(SERVER, kind, body)
                for name, signature in (countersigned or {}).items():
                    self._write(name, "countersigned", countersignature(self.run, body), signature)
            if kind == "settled":
                self.write_scores()

    def recorded(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Return the bodies of all records of a kind, in order."""
        return [record.body for record in self.folder.ledger.records(kind)]

    def signed(self, kind: str) -> Sequence[tuple[str, Mapping[str, Any], bytes]]:
        """Return author, body and signature of all records of a kind, in order."""
        records = self.folder.ledger.records(kind)
        return [(record.author, dict(record.body), record.signature) for record in records]

    def end(self, model: Model) -> None:
        """Record the end of the run, and the model it ended with."""
        with self.folder.ledger.transaction():
            self._write(SERVER, "end", {"rounds": len(self.rounds), "model": model_hash(model)})

    def cut_off(self) -> Round | None:
        """Return a round that was begun and never closed, as `Run.open`."""
        round_ = None if self.resumed is None else self.resumed.open
        if round_ is not None and round_.inputs is not None:
            self._masked = round_.number
        return round_

    # ----------------------------------------------------------------------------------------------- a round

    def schedule(self, number: int, members: Sequence[str], weights: Mapping[str, float] | None) -> None:
        """Record who takes part, and their weights if they are public; the first step of a round."""
        public = None if weights is None else {name: exact(weights[name]) for name in members}
        self._pending.clear()
        self._soon("schedule", {"round": number, "members": list(members), "weights": public})

    def masked(self, number: int, inputs: Mapping[str, str]) -> None:
        """Record the hashes of the masked inputs, before any member is asked for a share."""
        self._soon("masked", {"round": number, "inputs": dict(inputs)})
        self._masked = number

    def blame(self, number: int, blame: Blame) -> None:
        """Record that a member broke the protocol, with the evidence; after the masked inputs."""
        about = {"member": blame.member, "by": blame.by, "why": blame.why}
        self._soon("blame", {"round": number, **about, "evidence": dict(blame.evidence)})

    def close(
        self,
        closed: Round,
        model: Model,
        outcome: Outcome | None,
        utilities: Mapping[str, Mapping[str, float]] | None,
    ) -> None:
        """Record the end of a round: outcome, reports and the scores they give, in one transaction.

        An aborted round has no outcome, and the model is the unchanged M0. Without ``utilities`` as the
        server measured them, the members' medians count.
        """
        number = closed.number
        measured, evaluated = {}, "server"
        if outcome is not None and (closed.reports or self.beside is not None):
            if utilities is None:
                evaluated, measured = "members", medians(closed.reports.values())
            for name, values in (utilities or {}).items():
                measured[name] = {key: exact(value) for key, value in values.items()}
        kept, analysis = ("", None) if self.beside is None else self.beside(closed, outcome)
        closed.body = {
            **closing(closed, model, outcome),
            "utilities": measured,
            "evaluated": evaluated,
            "checkpoint": self.folder.save_checkpoint("model", number, {"model": model}),
            **({"members_checkpoint": kept} if kept else {}),
        }
        if self._masked != number:  # it was aborted before the masked inputs were recorded
            self._pending.append(("masked", {"round": number, "inputs": {}}))
        with self.folder.ledger.transaction():
            for kind, body in self._pending:
                self._write(SERVER, kind, body)
            if outcome is not None:
                self._write(SERVER, "outcome", {"round": number, **outcome.bound_to})
            for report in closed.reports.values():
                self._write(report.client, "report", report.body(self.run), report.signature)
            if analysis is not None:
                self._write(SERVER, "analysis", {"round": number, **analysis})
            self._write(SERVER, "round", closed.body)
            for kind, body in after_round([*self.rounds, closed], self.config):
                self._write(SERVER, kind, body)
        self.rounds.append(closed)
        self._pending.clear()
        self.folder.drop_checkpoints(keep=number - 1)
        self.write_scores()

    def write_scores(self) -> dict[str, Any]:
        """Write ``scores.json`` and ``scores.csv`` from the rounds so far; return what they hold."""
        account = replay(self.folder.ledger).account if self.recorded("settled") else None
        summed = [closed.number for closed in self.rounds if closed.included]
        truth = self.truth(summed) if self.truth else None
        content = scores_document(self.rounds, self.config, account, truth=truth)
        write_scores(self.folder, content)
        return content

    def model_after(self, closed: Round) -> Model:
        """Return the global model after a round, from its checkpoint."""
        number, path = closed.number, self.folder.path
        model: Model = read_checkpoint(path, "model", number, closed.body["checkpoint"])["model"]
        if model_hash(model) != closed.body["m"]:
            raise StoreError(f"{path}: the checkpoint of round {number} is not its model")
        return model

    # --------------------------------------------------------------------------------------------- internals

    def _soon(self, kind: str, body: Mapping[str, Any]) -> None:
        """Write a record of the server now or, in a rehearsal, with the rest of its round."""
        self._pending.append((kind, body))
        if self.engine != EMBEDDED:
            with self.folder.ledger.transaction():
                while self._pending:
                    self._write(SERVER, *self._pending.pop(0))

    def _write(self, author: str, kind: str, body: Mapping[str, Any], signature: bytes = b"") -> None:
        if self.key is None:
            self.folder.ledger.append(author, kind, body)
        else:
            self.folder.ledger.append(author, kind, body, signature=signature, seal=self.key.sign)


# ------------------------------------------------------------------------------------ payment after the run


def resumed(run: Run, folder: Folder, config: Config, roster: Roster, key: Path | None) -> LedgerRecorder:
    """Return the recorder that continues a run, with the server's key: by default the one in the folder."""
    identity = server_key(run, key or _key_file(folder.path))
    return LedgerRecorder(
        *(folder, config, roster, identity, run.id, run.first.engine, run.first.terms, run.pool),
        rounds=list(run.rounds),
        resumed=run,
    )


def _key_file(folder: Path) -> Path:
    return folder / "keys" / f"{SERVER}.pem"


def server_key(run: Run, file: Path) -> Ed25519PrivateKey | None:
    """Return the private key of the server of a run; None if nothing is signed.

    Raise KeyFileError if the file is gone, or holds another key.
    """
    if run.first.keys is None:
        return None
    if not file.exists():
        raise KeyFileError(f"{file}: no such file; expected the private key of the server of this run")
    key = load_key(file)
    if public_key(key).hex() != run.first.keys[SERVER]:
        raise KeyFileError(f"{file}: not the server's key according to the ledger of {run.name}")
    return key


def record_decision(run: Run, terms: Terms, heading: Heading | None = None) -> tuple[Run, bool]:
    """Decide who is paid what, and record it in the ledger of a run folder, unless the last decision says it.

    What ``heading`` leaves empty is as in the settings; a date that neither names is today's.

    Returns:
        The run with the decision as its last one, and whether it is new.

    Raises:
        DoubtfulShares: the reports contradict themselves, and the terms do not say to pay despite that.
        StoreError: the ledger has grown since it was verified, or the server's key is not in the folder.
        UnsettledShares: the settlement is not final, or a verdict was not judged anew because there is no
            archive; its code says which.
    """
    config, judged = run.config, (run.path.parent / ARCHIVE).is_dir()
    if (
        terms.score in ("PHI", "PANEL")
        and run.settlement is not None
        and run.settlement.verdicts
        and not judged
    ):
        raise UnsettledShares(Note("settlement-unjudged", path=run.name), code="unjudged")
    named = (heading or Heading()).over(config.heading)
    terms = replace(terms, currency=terms.currency or named.currency)
    made = decide(run.rounds, terms, config, run.decisions, run.account)
    check_payable(made.doubts, terms.rule, despite=terms.despite_doubts)
    made = replace(made, heading=named.over(Heading(date=datetime.now(UTC).date().isoformat())))
    with _unchanged(run) as folder:
        seal = signer(run, "record a decision; --dry-run prints it")
        if run.decisions and _repeats(run.decisions[-1], made, dated=bool(named.date)):
            return run, False
        with folder.ledger.transaction():
            bodies = made.records(config.scoring.visibility)
            written = [folder.ledger.append(SERVER, kind, body, seal=seal) for kind, body in bodies]
    return run.extended(made, written), True


class SignedApproval(Struct, frozen=True, forbid_unknown_fields=True):
    """A member's signature under a decision; also as a file, for whoever has the server's key."""

    format: Literal["fedmerit approval 1"]
    member: str
    approval: Approved
    signature: Bytes


def sign(run: Run, key: Path) -> SignedApproval:
    """Sign the latest decision of a verified run, from its folder or a member's copy.

    Raises:
        KeyFileError: the key is that of no member of the run.
        StoreError: nothing was decided, or nobody signs in this run.
    """
    identity = load_key(key)
    keys = run.first.public or {}
    member = next((name for name, own in keys.items() if own == public_key(identity)), SERVER)
    if not keys:
        raise StoreError(f"{run.name}: nobody signs in a run with secure aggregation off")
    if member == SERVER:
        raise KeyFileError(f"{key}: not the key of a member of the run in {run.name}")
    if not (made := run.of("decision")):
        raise StoreError(f"{run.name}: holds no decision to approve; fedmerit rewards makes one")
    body = Approved(run=run.id, decision=made[-1].digest.hex(), record=made[-1].seq)
    signature = identity.sign(content(member, "approval", to_builtins(body)))
    return SignedApproval("fedmerit approval 1", member, body, signature.hex())


def read_approval(path: Path) -> SignedApproval:
    """Read an approval from a file; its signature is checked where it is recorded."""
    try:
        return json.decode(path.read_bytes(), type=SignedApproval)
    except (DecodeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: expected an approval from `fedmerit approve --out`: {error}"
        ) from error


def record_approval(run: Run, signed: SignedApproval) -> Run:
    """Record an approval in the ledger of a run that was verified; return the run with it.

    Raises:
        LedgerError: the member did not sign it, it is of no decision of this ledger, or of one that this
            member has approved before.
        StoreError: the ledger has grown since it was verified, or the server's key is not in the folder.
    """
    seal = signer(run, "record an approval; fedmerit approve --out writes a file for them")
    with _unchanged(run) as folder, folder.ledger.transaction():  # an approval that is wrong leaves nothing
        body, signature = to_builtins(signed.approval), bytes.fromhex(signed.signature)
        folder.ledger.append(signed.member, "approval", body, signature=signature, seal=seal)
        try:
            return replay(folder.ledger)
        except LedgerError as error:
            problem = f"the approval of {signed.member!r:.60} is not recorded: {error}"
            raise LedgerError(problem, record=error.record, code=error.code) from error


@contextmanager
def _unchanged(run: Run) -> Iterator[Folder]:
    """Hold the folder of a run that was verified; raise StoreError if its ledger has grown since."""
    with Folder(run.path.parent, run.config, resume=True) as folder:
        if folder.ledger.head != run.head:
            raise StoreError(f"{folder.path}: its ledger has grown since it was verified: try again")
        yield folder


def _repeats(last: Decision, made: Decision, *, dated: bool) -> bool:
    heading = last.heading if dated else replace(last.heading, date=made.heading.date)
    return (last.terms, last.rounds, heading) == (made.terms, made.rounds, made.heading)


def closing(round_: Round, model: Model, outcome: Outcome | None) -> dict[str, Any]:
    """Return the fields that every engine records at the end of a round; set who was silent."""
    if outcome is None:
        round_.included = ()
    round_.silent = tuple(name for name in round_.included if name not in round_.reports)
    return {
        "round": round_.number,
        "included": list(round_.included),
        "declined": list(round_.declined),
        "silent": list(round_.silent),
        "aborted": round_.aborted,
        "m": outcome.bound_to["m"] if outcome else model_hash(model),
        "slice": outcome.slice.id if outcome and outcome.slice else None,
    }


def signer(run: Run, what: str) -> Signer | None:
    """Return what signs with the server's key in a run folder, None if nothing is signed.

    Raise StoreError if the key is not there: ``what`` only its holder can do.
    """
    file = _key_file(run.path.parent)
    if run.signed and not file.exists():
        raise StoreError(f"{file}: only the holder of the server's key can {what}")
    key = server_key(run, file)
    return None if key is None else key.sign


# --------------------------------------------------------------------------------------------- score files


def scores_document(
    rounds: Sequence[Round],
    config: Config,
    account: Account | None = None,
    *,
    missing: Missing | None = None,
    truth: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of ``scores.json``: the paid utility, the first, on top; others as companions.

    ``missing`` counts rounds otherwise than the settings say; ``truth`` are values to compare with.
    """
    clients, (paid, *others) = config.clients, config.scoring.utilities
    missing = missing or config.payment.missing
    if config.reports:
        parts = {name: _of_utility(rounds, clients, name, missing) for name in (paid, *others)}
    else:
        entries = [_unscored(closed, closed.included) for closed in rounds]
        bare = {"clients": list(clients), "utility": paid, "method": config.scoring.method, "rounds": entries}
        parts = {paid: {**bare, "cumulative": {}}}
    settled = {} if account is None else put_settled(parts[paid], account, missing, config.panel.most)
    for utility, values in (truth or {}).items():
        parts[utility]["truth"] = values
    return {
        **parts.pop(paid),
        **({"analysis": True} if config.analysis else {}),
        **settled,
        "companions": parts,
    }


def _of_utility(
    rounds: Sequence[Round], clients: Sequence[str], utility: str, missing: Missing
) -> dict[str, Any]:
    reports = scored(rounds, utility)
    entries = [_entry(closed, utility) for closed in rounds]
    sums = sums_object(reports, clients, missing=missing) if reports else {"cumulative": {}}
    return {"clients": list(clients), "utility": utility, "rounds": entries, **sums}


def _entry(closed: Round, utility: str) -> RoundEntry:
    """Return the entry of a round, made once: a run writes all of its rounds after every round."""

    def made(utility: str) -> RoundEntry:
        reports = closed.to_reports(utility)
        return RoundEntry(_unscored(closed) if reports is None else round_object(reports))

    return closed.once("entry", utility, made)


def put_settled(
    content: dict[str, Any], account: Account, missing: Missing, most: float = MOST
) -> dict[str, Any]:
    """Add the paid score, PHI or PANEL, beside the others; return the block ``settlement`` or ``panel``."""
    if account.panel is not None:
        panel = account.panel_block(content["clients"], most)
        content["cumulative"]["PANEL"] = panel["PANEL"]
        own = account.panel.scores
        errors = {} if own.stderr is None else dict(zip(own.clients, own.stderr.tolist(), strict=True))
        content["stderr"] = {"PANEL": [errors.get(name) for name in content["clients"]]}
        return {"panel": panel}
    block = account.block(content["clients"], missing)
    content["cumulative"]["PHI"] = block["cumulative"]
    content["stderr"] = {**content.get("stderr", {}), "PHI": block["stderr"]}
    stated = {
        entry["round"]: dict(zip(entry["participants"], entry["phi"], strict=True))
        for entry in block["rounds"]
    }
    for place, entry in enumerate(content["rounds"]):
        if entry["scores"] is not None and entry["round"] in stated:
            values = [stated[entry["round"]].get(name) for name in entry["participants"]]
            content["rounds"][place] = RoundEntry({**entry, "scores": {**entry["scores"], "PHI": values}})
    return {"settlement": block}


def _unscored(closed: Round, participants: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "round": closed.number,
        "participants": list(participants),
        **({"silent": list(closed.silent)} if closed.silent else {}),
        "reports": None,
        "scores": None,
        "aborted": bool(closed.aborted),
    }


def score_files(content: Mapping[str, Any]) -> dict[str, bytes]:
    if content.get("method") == "panel":
        table = _panel_csv(content)
    elif content.get("method") == "settled":  # there are no reports
        table = _settled_csv(content)
    else:
        entries = [entry for entry in content["rounds"] if entry["reports"] is not None]
        table = as_csv({**content, "rounds": entries})
    return {"scores.json": as_json(content).encode(), "scores.csv": table.encode()}


def write_scores(folder: Folder, content: Mapping[str, Any]) -> None:
    for name, data in score_files(content).items():
        write(folder.path / name, data)


def _panel_csv(content: Mapping[str, Any]) -> str:
    """Return who helped whom as tidy CSV, one line per client and judge; empty until the run is settled."""
    block = content.get("panel", {"judges": [], "matrix": []})
    header = ["client", "judge", "utility", "stated_1", "stated_2", "s"]
    lines = [
        [name, judge, content["utility"], *(said[b] if said else (None, None)), row[b]]
        for name, row, said in zip(content["clients"], block["matrix"], block.get("stated", ()), strict=False)
        if row is not None
        for b, judge in enumerate(block["judges"])
    ]
    return sheet_text([header, *lines])


def _settled_csv(content: Mapping[str, Any]) -> str:
    """Return the settled scores of a run without reports as tidy CSV, one line per round and client.

    ``stated`` is the integer that the client stated, ``PHI`` its score in units of the utility; both empty
    until the run is settled, and where a client has not stated.
    """
    block = content.get("settlement", {"rounds": []})
    settled = {
        (line["round"], name): (stated, phi)
        for line in block["rounds"]
        for name, stated, phi in zip(line["participants"], line["stated"], line["phi"], strict=True)
    }
    rounds = content["rounds"]
    rows = dict.fromkeys((entry["round"], name) for entry in rounds for name in entry["participants"])
    keys = {**rows, **dict.fromkeys(settled)}
    header = ["round", "client", "utility", "stated", "PHI"]
    lines = ([*key, content["utility"], *settled.get(key, (None, None))] for key in keys)
    return sheet_text([header, *lines])
