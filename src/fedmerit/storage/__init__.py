"""Files: the folder of a run, and the state that a member keeps next to its key."""
