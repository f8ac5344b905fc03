"""Secure aggregation: the server learns the sum of the members' updates and nothing else about them.

This is the protocol of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (2017), with its additions against active servers, as two state machines without I/O. Read the
modules in this order: `messages` (the stages), `setting`, `quantise`, `plain` (both machines, without masks),
`masks`, `client`, `server`, `naming` (who misstated what it put into the sum).
docs/threats.md says what is promised against whom.

`quantise` needs nothing but numpy: machines without the cryptographic packages sum the same integers without
masks.
"""
