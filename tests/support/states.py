"""A member's state, opened with its key: what it holds, and what a test takes out of it."""

from fedmerit.identity import load_key
from fedmerit.storage.member_state import StateFile


def opened(key_file):
    """The file `state` of the member with this key."""
    return StateFile(key_file, load_key(key_file))


def names_in(key_file):
    """Run -> names of the values that are kept of it."""
    return {run: kept.names for run, kept in opened(key_file).content.runs.items()}


def without(key_file, run, name):
    """Take a value out, as if it had never been put there."""
    file = opened(key_file)
    with file.held():
        file.content.runs[run].forget(name)
        file.commit()
