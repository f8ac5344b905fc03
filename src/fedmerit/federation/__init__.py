"""Rounds of a federation: what member and server say to each other, and an engine in one process."""
