"""The files of fedmerit: the run folder, and the state that a member keeps next to its key."""
