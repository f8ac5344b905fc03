"""Rebuilding a member's masked words from its opened secrets and the public transcript, bit for bit.

Words are a function of the update, its weight and rounding seed, the self-mask seed, the mask key, and what
everybody saw. An opening tells the secrets among these; keys and seed are checked against what the member
signed before, and t members must have signed the list of masked inputs that is shown, as they do before they
release a share. So there is exactly one update it can show: the one that is in the sum. What an opening
costs: whoever has it, and the server, see this update; see docs/threats.md for how often it may be asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, ProtocolError, ShareError
from fedmerit.secagg import masks
from fedmerit.secagg.messages import digest_of, open_broadcast, placed
from fedmerit.secagg.quantise import Words
from fedmerit.secagg.setting import Setting, Task

__all__ = ["Opening", "nonce_opens", "replay"]


@dataclass(frozen=True)
class Opening:
    """What a member tells an auditor, together with its update."""

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
) -> Words:
    """The words this member must have sent; an error that names it if they are not what it signed.

    Args:
        setting: the attempt.
        task: model and encoding.
        opening: the member's secrets.
        delta: the update it claims.
        advertised: the list of heads that all members saw after the stage advertise.
        shared: the same after the stage share.
        masked: the same after the stage masked.
        checked: the same after the stage check: the signatures of t members in the sum on the list before;
            not looked at where the attempt had no check.
    """
    name = opening.member
    keys = open_broadcast(advertised, setting, "advertise")
    dealers = open_broadcast(shared, setting, "share")
    inputs = open_broadcast(masked, setting, "masked")
    signed = inputs.get(name)
    chained = (
        signed is not None
        and name in keys
        and signed.seen == digest_of(shared)
        and all(head.seen == digest_of(advertised) for head in dealers.values())
    )
    if signed is None or not chained:
        raise BindingError("no masked input of this member on these shares", stage="audit", member=name)
    checks = open_broadcast(checked, setting, "check") if setting.checked else {}
    for peer, head in checks.items():
        if peer not in inputs or head.seen != digest_of(masked):
            raise BindingError("signed another list of masked inputs", stage="audit", member=peer)
    if setting.checked and len(checks) < setting.t:
        raise BindingError(
            f"{len(checks)} members signed this list of masked inputs, {setting.t} are needed", stage="audit"
        )
    _, public, commitment, _ = keys[name].body
    if masks.public(opening.mask) != public:
        raise ShareError("opened another mask key than it advertised", stage="audit", member=name)
    if masks.commitment("seed", opening.seed, setting.session, name) != commitment:
        raise ShareError("opened another self-mask seed than it committed to", stage="audit", member=name)
    try:
        # a public weight is not the member's to choose
        weight = task.weight_of(setting, name, opening.weight, stage="audit")
        words = task.encoding.encode(delta, weight=weight, seed=opening.rounding).words
    except ProtocolError as error:
        raise placed(error, "audit", name) from None
    peers = {peer: keys[peer].body[1] for peer in dealers}
    masks.add_masks(
        words,
        masks.of_member(setting, name, opening.mask, opening.seed, peers, task.binding(setting)),
    )
    if signed.body != [task.digest, task.m0_hash, digest_of(masks.to_wire(words))]:
        raise BindingError("masked something else than it opened", stage="audit", member=name)
    return words


def nonce_opens(setting: Setting, advertised: bytes, name: str, nonce: bytes) -> bool:
    """Whether a nonce is the one this member committed to when it advertised."""
    head = open_broadcast(advertised, setting, "advertise").get(name)
    return head is not None and head.body[3] == masks.commitment("nonce", nonce, setting.session, name)
