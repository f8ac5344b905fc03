"""Real Flower on this machine alone, for demonstrations and tests: SuperLink, SuperNodes, TLS, simulation.

Every party is a process with a home, a log and keys of its own, as on a machine of its own. Nothing but
127.0.0.1 is contacted: telemetry, update checks and installation of dependencies are off.
"""

from loopback.federation import Loopback
from loopback.superlink import Simulation, Submission

__all__ = ["Loopback", "Simulation", "Submission"]
