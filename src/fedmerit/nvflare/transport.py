"""Carries a coordinator's exchanges over calls of NVFlare's Collab API, one per distinct message."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted as JobAborted

from fedmerit.carriers.attendance import LONG, Attendance
from fedmerit.config import VERSION
from fedmerit.nvflare.site import digest
from fedmerit.protocol.messages import PROTOCOL, Exchange, Parcel
from fedmerit.protocol.outcome import Model

GRACE = 1.0
"""Seconds for sites to answer an invitation at once; who is slower joins the next round."""


@dataclass(eq=False, repr=False, kw_only=True)
class CollabTransport(Attendance):
    """The sites of a job, reached through the function that each of them publishes (`Site.answer`)."""

    total: int  # rounds of the run
    _train: dict[str, Any] = field(default_factory=dict)  # what goes with the request to train
    _invited: dict[str, Any] = field(default_factory=dict)  # site -> its call
    go_on = "a new job with the same recipe goes on from the last model"

    @property
    def sites(self) -> list[str]:
        """The sites of the job."""
        return [client.name for client in collab.clients]

    def next_round(self, model: Model) -> Model | None:
        """Run the next round with everybody who is present; return M, or None if it was aborted."""
        self._noted = len(self.coordinator.refused)
        members, number = tuple(self.nodes), self.rounds + 1
        arrays = self.shape.named(model)
        self._train = {"model": arrays, "number": number, "rounds": self.total}
        job = self.coordinator.run_config(members) if members else b""
        return self.take(model, members, digest(arrays, number, self.total, job))

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Send, and yield answers that come in time; a member who gives none is away until it rejoins."""
        began = time.monotonic()
        limit = (self.timeout or 3600.0) if kind in LONG else self.patience
        parcels = {id(parcel): parcel for parcel in asks.values()}  # mostly one for all members
        names = {self.nodes[name]: name for name in asks if name in self.nodes}
        calls = []
        for key, parcel in parcels.items():
            if sites := [site for site, name in names.items() if id(asks[name]) == key]:
                calls.append(self._call(sites, parcel, limit, self._train if kind == "train" else {}))
        for results in calls:
            for site, answer in results:
                if isinstance(answer, bytes):
                    self._refused.pop(site, None)
                    yield names[site], answer
                else:
                    self._refuses(names[site], kind, f"{kind} failed: {answer!s:.400}")
            for site, error in results.failures.items():
                self._check_job()
                self._gone(names[site], f"{kind}: {error.cause!s:.200}")
        self.seconds.setdefault(kind, []).append(time.monotonic() - began)

    def _call(self, sites: Sequence[str], parcel: Parcel, limit: float, more: Mapping[str, Any]) -> Any:
        """Return the answers to a call as they come, and its failures."""
        self._check_job()
        group = collab.get_clients([*sites])(blocking=False, timeout=limit)
        return group.answer(head=parcel.head, arrays=dict(parcel.arrays), **more)

    def _check_job(self) -> None:
        """Raise if NVFlare has ended the job: nobody is blamed for it, and a new job goes on with the run."""
        if collab.is_aborted:
            raise JobAborted("NVFlare has ended the job; a new job with the same recipe goes on with the run")

    def _welcome(self) -> None:
        """Invite sites that are not present, once in a while, and admit those that have answered."""
        self._check_job()
        sites, now = self.sites, time.monotonic()
        later = {site for site, (not_before, _) in self._refused.items() if now < not_before}
        if new := [site for site in sites if site not in {*later, *self.nodes.values(), *self._invited}]:
            parcel = self.coordinator.invitation()
            self._invited |= {site: self._call([site], parcel, self.patience, {}) for site in new}
            until = time.monotonic() + GRACE
            while not all(map(_is_over, self._invited.values())) and time.monotonic() < until:
                time.sleep(GRACE / 50)
        for site, results in list(self._invited.items()):
            if len(results):
                _, answer = next(results)
                if isinstance(answer, bytes):
                    self._admit(site, answer, sites)
                else:
                    by = f"invited by fedmerit {VERSION}, which speaks protocol {PROTOCOL}"
                    self._stranger(site, f"{answer!s:.400} ({by})")
            elif site in results.failures:
                self._stranger(site, f"{results.failures[site].cause!s:.200}")
            else:
                continue
            del self._invited[site]


def _is_over(results: Any) -> bool:
    """Return whether a call to one site has its answer, or has failed."""
    return bool(len(results) or results.failures)
