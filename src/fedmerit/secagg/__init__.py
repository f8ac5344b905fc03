"""Secure aggregation: the server learns the sum of the members' updates and nothing else about them."""

from __future__ import annotations

from fedmerit.secagg.quantise import Decoded, Encoded, Encoding

__all__ = ["Decoded", "Encoded", "Encoding"]
