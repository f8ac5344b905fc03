"""What a run writes: its first records, a round's checkpoint and records in one transaction, score files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit import __version__
from fedmerit.config import Config, recorded_hash
from fedmerit.errors import MissingExtra, StoreError
from fedmerit.identity.encoding import SERVER, exact
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.records import (
    EMBEDDED,
    SIMULATED,
    Journal,
    Round,
    closing,
    first_body,
    score_files,
    scores_document,
)
from fedmerit.ledger.visibility import after_round
from fedmerit.protocol.measure import Member, mean
from fedmerit.protocol.messages import Model, Outcome, PerSample, Report, model_hash
from fedmerit.scoring.files import LEDGER
from fedmerit.simulation.setup import Federation
from fedmerit.storage.run_folder import Folder, write

if TYPE_CHECKING:
    from fedmerit.simulation.identities import Identities

Values = tuple[PerSample, PerSample, PerSample | None]
"""Utilities of M0, of M, and of the first model where members train alone too."""


@dataclass(frozen=True, eq=False)
class Books:
    """The ledger, checkpoints and score files of one run."""

    config: Config
    folder: Folder
    federation: Federation
    identities: Identities | None
    run_id: str

    @property
    def journal(self) -> Journal:
        """Where records go, signed by their authors if there are keys."""
        sign = self.identities.sign if self.identities else lambda author, message: b""
        return Journal(self.folder.ledger, sign)

    # ------------------------------------------------------------------------------------ start and resume

    def begin(self) -> None:
        """The first records: config, keys, first model, and the test pool's commitment."""
        config, federation = self.config, self.federation
        with self.folder.ledger.transaction():
            self.journal.write(
                SERVER,
                "run",
                {
                    "run": self.run_id,
                    "version": __version__,
                    "engine": EMBEDDED,
                    "config": config.to_toml(),
                    "config_hash": recorded_hash(config.to_toml()),
                    "members": list(federation.names),
                    "keys": self._keys,
                    "m0": model_hash(federation.first),
                    "data": federation.fingerprint,
                    "analysis": config.analysis,
                },
            )
            self.journal.write(SERVER, "pool", dict(federation.pool.commitment))

    def check_same(self) -> None:
        """A resumed run must have the keys, the test pool, the data and the first model it started with."""
        run, pool = (first_body(self.folder.ledger, kind) for kind in ("run", "pool"))
        same = {
            "keys": run["keys"] == self._keys,
            "test pool or its key": pool == dict(self.federation.pool.commitment),
            "training data": run["data"] == self.federation.fingerprint,
            "first model": run["m0"] == model_hash(self.federation.first),
        }
        for what, is_same in same.items():
            if not is_same:
                dealt = ""
                if what == "training data" and self.config.partition.scheme == "group":
                    dealt = (
                        "; a run that was started by a version that gave partition.names to groups by their "
                        "place, not by name, cannot go on here either: start it anew"
                    )
                raise StoreError(
                    f"{self.folder.path}: cannot be resumed: the {what} changed since it started{dealt}"
                )

    @property
    def _keys(self) -> dict[str, str] | None:
        if self.identities is None:
            return None
        return {name: key.hex() for name, key in self.identities.public.items()}

    def model_after(self, one: Round) -> Model:
        """The global model after a round, from its checkpoint."""
        model: Model = self.folder.load_checkpoint("model", one.number, one.body["checkpoint"])["model"]
        if model_hash(model) != one.body["m"]:
            raise StoreError(f"{self.folder.path}: the checkpoint of round {one.number} is not its model")
        return model

    def restore_members(self, last: Round, members: Mapping[str, Member], solo: dict[str, Model]) -> None:
        """What members kept after a round, given back to them."""
        kept = self.folder.load_checkpoint("members", last.number, last.body["members_checkpoint"])
        for key, values in kept.items():
            kind, name, *rest = key.split("/")
            if kind == "solo":
                solo[name] = values
            else:
                members[name].totals["/".join(rest)] = values
                members[name].totals_on = last.body["totals_on"]

    # ---------------------------------------------------------------------------------------------- a round

    def close(
        self,
        found: Round,
        rounds: Sequence[Round],
        *,
        model: Model,
        members: Mapping[str, Member],
        solo: Mapping[str, Model],
        masked: Mapping[str, str],
        outcome: Outcome | None,
        values: Values | None,
        reports: Sequence[Report],
        weights: Mapping[str, float] | None,
        looked: Mapping[str, Any] | None,
    ) -> None:
        """Checkpoint first, then all records of the round in one transaction."""
        number, folder = found.number, self.folder
        found.reports = {report.client: report for report in reports}
        samples = None
        if self.config.scoring.disclose_samples:
            samples = {client.name: len(client.y) for client in self.federation.clients}
        found.body = {
            **closing(found, model, outcome),
            "utilities": {} if values is None else self._utilities(values),
            "samples": samples,
            "checkpoint": folder.save_checkpoint("model", number, {"model": model}),
            "members_checkpoint": folder.save_checkpoint("members", number, _private(members, solo)),
            "totals_on": next((member.totals_on for member in members.values() if member.totals_on), ""),
        }
        public = None if weights is None else {name: exact(weight) for name, weight in weights.items()}
        add = self.journal.write
        with folder.ledger.transaction():
            add(SERVER, "schedule", {"round": number, "members": list(found.scheduled), "weights": public})
            add(SERVER, "masked", {"round": number, "inputs": dict(masked)})
            if outcome is not None:
                add(SERVER, "outcome", {"round": number, **outcome.bound_to})
            for report in reports:
                add(report.client, "report", report.body(self.run_id))
            if looked is not None:
                add(SERVER, "analysis", {"round": number, **looked})
            add(SERVER, "round", found.body)
            for kind, body in after_round([*rounds, found], self.config.scoring):
                add(SERVER, kind, body)

    def end(self, model: Model, rounds: int) -> None:
        """The last model, and everybody's signature under the head after it; once, also if resumed."""
        ledger = self.folder.ledger
        if any(ledger.records("end")):
            return
        with ledger.transaction():
            self.journal.write(SERVER, "end", {"rounds": rounds, "model": model_hash(model)})
            seen = {"run": self.run_id, "round": rounds, "head": ledger.head}
            for name in self.federation.names if self.identities else ():
                self.journal.write(name, "seen", seen)

    def _utilities(self, values: Values) -> dict[str, dict[str, str]]:
        """v(M0), v(M) and v of the first model, per utility."""
        named = list(zip(("empty", "grand", "first"), values, strict=True))
        return {
            utility.name: {key: exact(mean(one[utility.name])) for key, one in named if one is not None}
            for utility in self.federation.utilities
        }

    def write_scores(self, rounds: Sequence[Round], truth: Mapping[str, Any] | None) -> dict[str, Any]:
        """``scores.json`` and ``scores.csv``, from the rounds so far."""
        scoring = self.config.scoring
        content = scores_document(
            rounds,
            self.federation.names,
            scoring.utilities,
            missing=scoring.missing,
            truth=truth,
            analysis=self.config.analysis,
        )
        for name, data in score_files(content):
            write(self.folder.path / name, data)
        return content


def _private(members: Mapping[str, Member], solo: Mapping[str, Model]) -> dict[str, npt.NDArray[Any]]:
    """What members keep between rounds."""
    kept: dict[str, np.ndarray[Any, Any]] = {f"solo/{name}": model for name, model in solo.items()}
    for member in members.values():
        kept |= {f"totals/{member.name}/{name}": values for name, values in member.totals.items()}
    return kept


def check_engine(path: Path) -> None:
    """Refuse to go on with a run between machines: nobody here holds its members' keys."""
    file = path / LEDGER
    if not file.is_file():
        return
    with Ledger(file, read_only=True) as ledger:
        engines = [record.body.get("engine") for record in ledger.records("run")]
    if engines and engines[0] != EMBEDDED:
        what = "a Flower simulation" if engines[0] == SIMULATED else "a run between machines"
        raise StoreError(
            f"{path}: cannot be resumed here: it holds {what} (engine {engines[0]!r}), which "
            "ends with its server. The rounds that were closed stay good (fedmerit verify, score, page, "
            "rewards); to train on, start a new run in a new folder from its last model "
            "(fedmerit.flower.last_model)"
        )


def identities_in(folder: Folder, config: Config, *, make: bool) -> Identities:
    """Everybody's keys in the run folder."""
    try:
        from fedmerit.simulation.identities import Identities
    except ImportError as error:
        raise MissingExtra(
            "secure aggregation needs the packages cryptography and pycryptodome; "
            "or set secure_aggregation.enabled = false"
        ) from error
    return Identities.in_folder(folder.path / "keys", config.clients, make=make)


def keep_pool_key(folder: Folder, key: bytes) -> None:
    """Keep the secret behind the pool's salts, with mode 600."""
    path = folder.path / "keys" / "pool.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write(path, key, mode=0o600)


def pool_key_in(folder: Folder) -> bytes:
    """The secret behind the pool's salts, as the run started with it."""
    path = folder.path / "keys" / "pool.key"
    try:
        key = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the key of the test pool is gone: {error}") from error
    if len(key) != 32:
        raise StoreError(f"{path}: damaged: expected 32 bytes, got {len(key)}")
    return key
