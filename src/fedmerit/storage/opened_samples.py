"""Which test samples a server has opened at settlements: members settle on none of them a second time.

``KEY.opened`` beside the server's key (mode 600) has one line of JSON per settlement: the federation, the run
folder, and eight bytes of a hash for every sample. Members keep the same in their own state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedmerit.errors import DataError, StoreError
from fedmerit.identity import Roster
from fedmerit.protocol.pool import Slice, samples_in
from fedmerit.protocol.terms import lineage_of
from fedmerit.storage.run_folder import write


class OpenedSamples:
    """What the owner of a key has opened to a federation.

    Args:
        key: the file of the server's private key.
        roster: of the federation.
    """

    def __init__(self, key: Path, roster: Roster) -> None:
        self.path, self.federation = key.with_name(f"{key.name}.opened"), lineage_of(roster)

    def check(self, shown: Slice) -> None:
        """Raise DataError if one of these samples was opened before, because members would not settle."""
        samples = {sample.hex() for sample in samples_in(shown)}
        for line in self._lines():
            known = samples & {*line["samples"]}
            if known and line["federation"] == self.federation:
                raise DataError(
                    f"test: {len(known)} of {len(shown.y)} samples were opened to these members at the end "
                    f"of {line['run']}, and members settle on no sample twice, because they may have trained "
                    'on it: give samples that nobody has seen, or method="reports"'
                )

    def add(self, run: Path, shown: Slice) -> None:
        """Remember that these samples were opened at the end of a run."""
        samples = sorted(sample.hex() for sample in samples_in(shown))
        line = {"federation": self.federation, "run": str(run.resolve()), "samples": samples}
        text = "".join(json.dumps(one) + "\n" for one in [*self._lines(), line])
        write(self.path, text.encode(), mode=0o600)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self.path}: cannot be read: {error}; it says which test samples were opened before"
            ) from error
