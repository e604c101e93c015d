"""MTAD: a beam search drafts, and prefixes are accepted by their joint likelihood; and the exact decoding that it approximates.

`mtad` is sections 2.1 and 3.2, `joint` is Definition 3.1; both searches are in `mtad_search`. Neither is lossless: the output is
likelier under the target than samples of the target. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.settings import Setting, Settings
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup
    from specgen.decoding.run import Schedule
    from specgen.decoding.verification import Verifier


def _beams(setup: Setup, settings: Settings) -> Drafter:
    from specgen.methods.mtad_search import BeamSearchDrafter

    width, beam = int(settings.values["beams"]), settings.values["beam"]
    return BeamSearchDrafter(setup, width=width, stochastic=beam == "sample")


def _joint_likelihood(setup: Setup, settings: Settings) -> Verifier:
    from specgen.methods.mtad_search import JointLikelihoodVerifier

    return JointLikelihoodVerifier(*setup.for_verifier, tau=float(settings.values["tau"]))


def _joint_search(setup: Setup, settings: Settings) -> Schedule:
    from specgen.methods.mtad_search import JointGreedy

    return JointGreedy(*(int(settings.values[name]) for name in ("k", "beams", "nodes")))


MTAD = Method(
    "mtad",
    "MTAD, section 3.2",
    DRAFT_MODEL,
    _beams,
    _joint_likelihood,
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "beams": Setting(8, "width of the beam search", 1, 256),
        "tau": Setting(0.1, "accept the longest prefix whose joint likelihood ratio is above this", 0, 1),
        "beam": Setting("greedy", "keep the likeliest beams, or sample them", choices=("greedy", "sample")),
    },
    defaults={"fixed": {"k": 4}},
    lossless=False,
    drafts="beams",
    grids=({"beams": (2, 4, 8, 16), "k": (2, 3, 4, 6, 8), "tau": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)},),
)
JOINT = Method(
    "joint",
    "MTAD, Definition 3.1: what mtad approximates",
    schedule=_joint_search,
    settings={
        "k": Setting(4, "tokens in a block", 1, 64),
        "beams": Setting(0, "width of an approximate beam search; 0: the exact search", 0, 256),
        "nodes": Setting(4096, "most prefixes that the exact search for one block may extend", 16, 1 << 20),
    },
    lossless=False,
    is_yardstick=True,
    grows_trees=True,
    decodes_greedily=True,
    drafts="search",
)
