"""Rehearsals that end within this process as a kill would end them."""

from unittest.mock import patch

import pytest

from fedmerit.simulation.run import Rehearsal, run


class Crash(BaseException):
    """Ends a run as a kill would."""


def crash(config, folder, where, name, call=1, when=lambda *given: True, **options):
    """Run until the so manyth call of a method that ``when`` counts, which does not happen any more."""
    real, calls = getattr(where, name), []

    def wrapped(*args, **kwargs):
        if when(*args):
            calls.append(1)
            if len(calls) == call:
                raise Crash
        return real(*args, **kwargs)

    with patch.object(where, name, wrapped), pytest.raises(Crash):
        run(config, folder, **options)


def half_run(config, folder, **options):
    """Run until the second round would begin; return the folder."""
    crash(config, folder, Rehearsal, "round", 2, **options)
    return folder
