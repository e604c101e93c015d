"""The parts of a run: drafters, verifiers and schedules. A part is imported when its name is first
read, because it needs torch.

A method's file names parts as `decoding.ModelDrafter`, so that methods can be listed without torch.
Each part is listed twice, as type checkers do not read `_MODULES`: there and in the block above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.decoding.beam_search import BeamSearchDrafter as BeamSearchDrafter
    from specgen.decoding.chain import ModelDrafter as ModelDrafter
    from specgen.decoding.chain import TextDrafter as TextDrafter
    from specgen.decoding.drafting import NoDrafter as NoDrafter
    from specgen.decoding.drafting import Setup as Setup
    from specgen.decoding.forced_tokens import with_forced_tokens as with_forced_tokens
    from specgen.decoding.joint_greedy import JointGreedy as JointGreedy
    from specgen.decoding.lookahead import LookaheadDrafter as LookaheadDrafter
    from specgen.decoding.lookahead import OuroborosDrafter as OuroborosDrafter
    from specgen.decoding.lossy_verification import BildVerifier as BildVerifier
    from specgen.decoding.lossy_verification import FlyVerifier as FlyVerifier
    from specgen.decoding.lossy_verification import (
        JointLikelihoodVerifier as JointLikelihoodVerifier,
    )
    from specgen.decoding.marginal_tree import MarginalTreeDrafter as MarginalTreeDrafter
    from specgen.decoding.multi_draft import MultiDraftDrafter as MultiDraftDrafter
    from specgen.decoding.multi_draft import k_sequential_verifier as k_sequential_verifier
    from specgen.decoding.multi_draft import multi_round_verifier as multi_round_verifier
    from specgen.decoding.parallel import Parallel as Parallel
    from specgen.decoding.parallel import counted_in_turn as counted_in_turn
    from specgen.decoding.predicted_output import PredictedOutput as PredictedOutput
    from specgen.decoding.run import Clock as Clock
    from specgen.decoding.run import Run as Run
    from specgen.decoding.run import StopTexts as StopTexts
    from specgen.decoding.run import sequential as sequential
    from specgen.decoding.tree import TopKTreeDrafter as TopKTreeDrafter
    from specgen.decoding.verification import GreedyVerifier as GreedyVerifier
    from specgen.decoding.verification import RejectionSampling as RejectionSampling

_MODULES = {
    "BeamSearchDrafter": "beam_search",
    "BildVerifier": "lossy_verification",
    "Clock": "run",
    "FlyVerifier": "lossy_verification",
    "GreedyVerifier": "verification",
    "JointGreedy": "joint_greedy",
    "JointLikelihoodVerifier": "lossy_verification",
    "LookaheadDrafter": "lookahead",
    "MarginalTreeDrafter": "marginal_tree",
    "ModelDrafter": "chain",
    "MultiDraftDrafter": "multi_draft",
    "NoDrafter": "drafting",
    "OuroborosDrafter": "lookahead",
    "Parallel": "parallel",
    "PredictedOutput": "predicted_output",
    "RejectionSampling": "verification",
    "Run": "run",
    "Setup": "drafting",
    "StopTexts": "run",
    "TextDrafter": "chain",
    "TopKTreeDrafter": "tree",
    "counted_in_turn": "parallel",
    "k_sequential_verifier": "multi_draft",
    "multi_round_verifier": "multi_draft",
    "sequential": "run",
    "with_forced_tokens": "forced_tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)
