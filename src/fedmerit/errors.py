"""Every error fedmerit raises on purpose.

::

    FedmeritError
    ├── InputError (also a ValueError)
    │   ├── ReportError > ValueRefused, FileFormatError > NamesAlike
    │   └── ConfigError, DataError, NotComparable, NoGradient
    ├── NeedsTable, UndefinedScore, UndefinedShares > DoubtfulShares, UnsettledShares
    ├── ProtocolError
    │   ├── MessageError > VersionError, SignatureError, BindingError, ShareError, RefusedError, BoundError
    │   └── RoundAborted, SettlementError, RunAborted
    └── KeyFileError, LedgerError > CopyDiffers, StoreError, MissingExtra
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from fedmerit.notes import install


class FedmeritError(Exception):
    """Base of everything fedmerit raises on purpose."""


class InputError(FedmeritError, ValueError):
    """The caller's input cannot be used. ``setting`` is the path of the setting at fault, if any."""

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting

    @classmethod
    def at(cls, setting: str, problem: str, *, entry: str = "") -> Self:
        """Return the error for a setting, or for one of its entries: the path, then the problem."""
        return cls(f"{setting}{'.' if entry else ''}{entry}: {problem}", setting=setting)


class ReportError(InputError):
    """A report, table or score vector is malformed.

    ``round``, ``client`` and ``field`` say where it belongs, if known; ``problem`` is the message without the
    round.
    """

    def __init__(
        self, problem: str, client: str | None = None, field: str = "", *, round: int | None = None
    ) -> None:
        super().__init__(problem if round is None else f"round {round}: {problem}")
        self.problem, self.client, self.field, self.round = problem, client, field, round


class ValueRefused(ReportError):
    """The number in a field cannot be used. ``client`` says whose it is; None: of the whole round."""


class FileFormatError(InputError):
    """A file of reports is malformed; ``cell`` is the cell that is at fault, if known, such as Sheet1!F13."""

    def __init__(self, message: str, *, cell: str = "") -> None:
        super().__init__(message)
        self.cell = cell


class NamesAlike(FileFormatError):
    """Two names in a file look like one; ``names`` are these two."""

    def __init__(self, message: str, names: tuple[str, str]) -> None:
        super().__init__(message)
        self.names = names


class ConfigError(InputError):
    """A setting is unknown or out of range. ``setting`` is its path."""


class DataError(InputError):
    """A dataset, partition or corruption cannot be built."""


class NotComparable(InputError):
    """A run is not a repeat of another, so what differs between them is more than training.

    ``first`` and ``other`` name the runs; ``expected`` and ``got`` are what the one has and the other has
    in its place. ``code`` says what differs: ``few`` (one run alone), ``same`` (one run twice), ``training``
    (one repeat twice), ``panel``, ``unfinished``, ``unsettled``, ``kind`` (a run and a file), ``engine``,
    ``members``, ``keys``, ``settings``, ``scoring``, ``rounds``, ``data``, ``pool``, ``utility``
    or ``score``.
    """

    def __init__(
        self, problem: str, *, code: str, first: str, other: str, expected: object = None, got: object = None
    ) -> None:
        if expected is not None:
            problem = f"{problem}: expected {expected}, as in {first}, got {got}"
        super().__init__(f"{other} cannot be compared: {problem}")
        self.code, self.first, self.other, self.expected, self.got = code, first, other, expected, got


class NoGradient(InputError):
    """PHI needs a gradient that does not exist. ``utility`` or ``coordinate`` names what has none."""

    def __init__(self, message: str, *, utility: str = "", coordinate: str = "") -> None:
        super().__init__(message)
        self.utility, self.coordinate = utility, coordinate


class NeedsTable(FedmeritError, TypeError):
    """A value that needs all 2^N coalitions was asked of reports, which hold only 2N + 2."""


class UndefinedScore(FedmeritError):
    """The score does not exist for these reports."""


class UndefinedShares(FedmeritError):
    """These scores must not be turned into money as they are. ``note`` says why, with a code."""

    @property
    def note(self) -> str:
        """The message; a :class:`~fedmerit.notes.Note` if the library made it."""
        note: str = self.args[0]
        return note


class DoubtfulShares(UndefinedShares):
    """The reports behind these scores contradict themselves. ``codes`` say how; see `doubts`."""

    def __init__(self, message: str, codes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.codes = codes


class UnsettledShares(UndefinedShares):
    """Members are paid by settled scores, and there are none, or they may change; ``code`` says which."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ProtocolError(FedmeritError):
    """Secure aggregation or a round went wrong. ``stage`` and ``member`` say where, if known."""

    def __init__(self, message: str, *, stage: str | None = None, member: str | None = None) -> None:
        super().__init__(message)
        self.stage, self.member = stage, member

    def __str__(self) -> str:
        parts = (self.stage and f"stage {self.stage}", self.member and f"member {self.member}")
        where = ", ".join(part for part in parts if part)
        return f"{where}: {self.args[0]}" if where else str(self.args[0])


@contextmanager
def placing(stage: str, member: str | None = None) -> Iterator[None]:
    """Name this stage in the errors of a protocol that name none, and the member if they name nothing."""
    try:
        yield
    except ProtocolError as error:
        if not (error.stage or error.member):
            error.member = member
        error.stage = error.stage or stage
        raise


class MessageError(ProtocolError):
    """Bytes that are not a message of this protocol."""


class VersionError(MessageError):
    """A message, or a run, of a protocol or with features that this version of fedmerit does not know."""


class SignatureError(ProtocolError):
    """A message was not signed by the member it names."""


class BindingError(ProtocolError):
    """A message or model belongs to another run, round, attempt, stage, roster, config or M0."""


class ShareError(ProtocolError):
    """A secret share is missing, unreadable or false."""


class RefusedError(ProtocolError):
    """A request that would reveal an update was refused.

    ``logged``: the member's own log says why. ``code``: "stale-state" if the member's state is an older copy,
    "arrays" if training returned others than it was given.
    """

    def __init__(
        self, message: str, *,
        stage: str | None = None, member: str | None = None, logged: bool = False, code: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message, stage=stage, member=member)
        self.logged, self.code = logged, code


class BoundError(ProtocolError):
    """An update lies beyond the public bound or is not finite."""


class RoundAborted(ProtocolError):
    """Too few members are left; nothing was revealed and the model is unchanged."""


class SettlementError(ProtocolError):
    """A run, or one of its rounds, cannot be settled; ``code`` says why."""

    def __init__(
        self, message: str, *, code: str, stage: str | None = "settlement", member: str | None = None
    ) -> None:
        super().__init__(message, stage=stage, member=member)
        self.code = code


class RunAborted(ProtocolError):
    """A run was given up because none of its rounds closed or too many in a row were aborted.

    ``closed`` and ``aborted`` are the numbers of the rounds that closed and of those that were aborted.
    """

    def __init__(self, message: str, *, closed: tuple[int, ...] = (), aborted: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.closed, self.aborted = closed, aborted


class KeyFileError(FedmeritError):
    """A private key or roster file is missing, malformed or readable by others."""


class LedgerError(FedmeritError):
    """A ledger record is missing, altered, reordered or not signed by its author.

    ``record`` is its number; None if no record can be named. ``code`` says what is wrong with the chain:
    ``missing``, ``altered``, ``unsigned``, ``unsealed``, ``stranger`` (its author has no key), ``unreadable``
    or ``damaged``; and of a settlement: ``uncountersigned`` (closed without t members), ``left-out`` (a
    member's statement is not in it) or ``other-manifest`` (a member was shown another one). It is empty if
    something else is wrong.
    """

    def __init__(self, message: str, *, record: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.record, self.code = record, code


class CopyDiffers(LedgerError):
    """The ledger is sound, but a score file beside it differs. ``file`` is the name of that file."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


class StoreError(FedmeritError):
    """A run folder is locked, damaged or belongs to another config."""


class MissingExtra(FedmeritError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, what: str, extra: str, instead: str = "") -> Self:
        """Return the error for what needs an extra: how to install it, and what works without."""
        return cls(f"{what}: {install(extra)}" + (f"; {instead}" if instead else ""))
