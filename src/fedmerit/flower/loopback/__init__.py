"""Real Flower on this machine alone, for demonstrations and tests: SuperLink, SuperNodes, TLS, simulation.

Every party is a process with a home, a log and keys of its own, as on a machine of its own. Nothing but
127.0.0.1 is contacted: telemetry, update checks and installation of dependencies are off.
"""

from fedmerit.flower.loopback.federation import Loopback
from fedmerit.flower.loopback.superlink import Run, Simulation

__all__ = ["Loopback", "Run", "Simulation"]
