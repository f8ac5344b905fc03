"""Five hospitals train a classifier of small images together."""
