"""The ledger: a chain of signed records, from which a run is read back in one pass."""
