"""Checks for decoding methods: those that our own pass, for a method of yours.

    from mymodule import MyMethod
    from specgen import testing

    def test_greedy():
        testing.check_greedy(MyMethod)

    def test_distribution():
        testing.check_distribution(MyMethod, k=2)

    def test_rounds():
        testing.check_rounds(MyMethod, "rounds.json")  # made by testing.record_rounds

A method is named by its class, or as `-m` has it (`package.module:Class`, with or without
settings); further arguments are its settings. A check that fails raises AssertionError, which says
where. The checks need no pytest.

`scripted_models` and `enumeration` have what the checks are made from: models of a few tokens whose
logits are a table, runs of a method with them, and the enumeration of all their random paths.
"""

from __future__ import annotations

from specgen.testing.enumeration import check_distribution
from specgen.testing.greedy import check_greedy
from specgen.testing.recorded_rounds import check_rounds, record_rounds

__all__ = ["check_distribution", "check_greedy", "check_rounds", "record_rounds"]
