"""Coalition models and their utilities, many at once: the ground truth that secure aggregation hides.

::

    updates U_i -> game.py        which model belongs to which coalition
                -> strategies.py  ways to evaluate many models of one architecture
                -> choosing.py    the fastest way on this device that agrees with float32
                -> evaluator.py   all coalitions of a round            -> Table per utility
    data        -> retrain.py     every coalition trained from scratch -> Table per utility
"""

from fedmerit.simulation.coalitions.evaluator import Evaluator, Game, coalition_tables
from fedmerit.simulation.coalitions.game import coefficients
from fedmerit.simulation.coalitions.retrain import Retraining, retrain_tables
from fedmerit.simulation.coalitions.strategies import Record

__all__ = ["Evaluator", "Game", "Record", "Retraining", "coalition_tables", "coefficients", "retrain_tables"]
