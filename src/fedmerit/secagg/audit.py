"""The audit: rebuild a member's masked words, bit for bit, from its opened secrets and the public transcript.

The words are a function of the update, its weight and rounding seed, the self-mask seed, the mask key, and
what everybody saw. An opening reveals the secrets among these. The auditor checks keys and seed against
what the member signed before, and t members must have signed the list of masked inputs that the auditor is
shown, as they do before they release a share. So a member can show exactly one update: the one that is in
the sum. The price is that whoever has the opening sees this update, and so does the server. docs/threats.md
says how often an auditor may ask for an opening.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, ProtocolError, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.messages import digest_of, open_broadcast, placed, seen_of
from fedmerit.secagg.setting import Setting, Task

__all__ = ["Opening", "nonce_opens", "replay"]


@dataclass(frozen=True)
class Opening:
    """The secrets that a member reveals to an auditor, together with its update."""

    member: str
    mask: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    rounding: bytes = field(repr=False)
    weight: float | None = field(repr=False)


def replay(
    setting: Setting,
    task: Task,
    opening: Opening,
    delta: npt.NDArray[np.floating[Any]],
    *,
    advertised: bytes,
    shared: bytes,
    masked: bytes,
    checked: bytes,
) -> npt.NDArray[Any]:
    """Return the words that this member must have sent; raise an error that names it if it signed others.

    Args:
        setting: the attempt.
        task: model and encoding.
        opening: the member's secrets.
        delta: the update that the member claims.
        advertised: the list of heads that all members saw after the stage advertise.
        shared: the same after the stage share.
        masked: the same after the stage masked.
        checked: the same after the stage check: the signatures of t members in the sum on the list before.
            It is ignored if the attempt had no check.
    """
    name = opening.member
    keys = open_broadcast(advertised, setting, "advertise")
    dealers = open_broadcast(shared, setting, "share")
    inputs = open_broadcast(masked, setting, "masked")
    signed = inputs.get(name)
    chained = (
        signed is not None
        and name in keys
        and name in dealers
        and dealers.keys() <= keys.keys()
        and signed.seen == seen_of("share", dealers.values())
        and all(head.seen == seen_of("advertise", keys.values()) for head in dealers.values())
    )
    if signed is None or not chained:
        raise BindingError(
            "the lists hold no masked input of this member for these shares", stage="audit", member=name
        )
    checks = open_broadcast(checked, setting, "check") if setting.checked else {}
    for peer, head in checks.items():
        if peer not in inputs or head.seen != seen_of("masked", inputs.values()):
            raise BindingError("signed a different list of masked inputs", stage="audit", member=peer)
    if setting.checked and len(checks) < setting.t:
        raise BindingError(
            f"{len(checks)} members signed this list of masked inputs, {setting.t} are needed", stage="audit"
        )
    if not masks.is_secret_of(keys[name], "key", opening.mask, setting.session):
        raise ShareError("opened a mask key that it did not advertise", stage="audit", member=name)
    if not masks.is_secret_of(keys[name], "seed", opening.seed, setting.session):
        raise ShareError("opened a self-mask seed that it did not commit to", stage="audit", member=name)
    try:
        # a member cannot choose a public weight
        weight = task.weight_of(setting, name, opening.weight, stage="audit")
        words = task.encoding.encode(delta, weight=weight, seed=opening.rounding).words
    except ProtocolError as error:
        raise placed(error, "audit", name) from None
    peers = {peer: keys[peer].body[0] for peer in masks.masked_with(setting, name, dealers)}
    own = masks.of_member(setting, name, opening.mask, opening.seed, peers, task.binding(setting))
    payload = masks.payload_of(words, task.encoding, own)
    if signed.body[:3] != [task.digest, task.m0_hash, digest_of(payload)]:
        raise BindingError("did not mask what it opened", stage="audit", member=name)
    return masks.from_wire(payload, task.encoding.word_bytes)


def nonce_opens(setting: Setting, advertised: bytes, name: str, nonce: bytes) -> bool:
    """Return whether a nonce is the one this member committed to when it advertised."""
    head = open_broadcast(advertised, setting, "advertise").get(name)
    return head is not None and head.body[2] == masks.commitment("nonce", nonce, setting.session, name)
