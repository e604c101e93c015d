"""MTAD's joint decoding, and BiLD beside it: none is lossless. Drafters and verifiers are in `decoding`. Imports no torch.

`mtad`: a beam search whose prefixes are accepted by their joint likelihood (sections 2.1 and 3.2). `joint`: the exact decoding
that it approximates (Definition 3.1). `bild` (Kim et al. 2023): the draft model falls back to the target where it is unsure, and
the target rolls back bad tokens; its authors use fallback 0.6 and rollback 5, MTAD's paper 0.9 and 2. `fly`: tokens that differ
from the target's are accepted where it was unsure and the draft then agrees with it again.
"""

from __future__ import annotations

from specgen.base.settings import Setting
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method, imported
from specgen.methods.sd import model_drafter

MTAD = Method(
    "mtad",
    "MTAD, section 3.2",
    DRAFT_MODEL,
    imported("decoding.beam_search.BeamSearchDrafter", "beams", "beam"),
    imported("decoding.lossy_verification.JointLikelihoodVerifier", "tau"),
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
    schedule=imported("decoding.joint_greedy.JointGreedy", "k", "beams", "nodes"),
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
BILD = Method(
    "bild",
    "BiLD, Kim et al. 2023",
    DRAFT_MODEL,
    imported("decoding.chain.ModelDrafter", "fallback"),
    imported("decoding.lossy_verification.BildVerifier", "rollback"),
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "fallback": Setting(0.9, "end the draft where its top probability is below this", 0, 1),
        "rollback": Setting(2.0, "reject tokens whose -log probability under the target is above this", 0, 1000),
    },
    defaults={"fixed": {"k": 10}},
    lossless=False,
    drafts="fallback",
    grids=({"k": (3, 5, 10), "fallback": (0.3, 0.5, 0.7, 0.9), "rollback": (0.5, 1.0, 2.0, 4.0)},),
)
FLY = Method(
    "fly",
    "FLy, arXiv 2511.22972",
    DRAFT_MODEL,
    model_drafter,
    imported("decoding.lossy_verification.FlyVerifier", "window", "entropy"),
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={
        "window": Setting(6, "a differing token is kept if the rest of a window of this many tokens agrees", 2, 64),
        "entropy": Setting(0.3, "and the target's entropy over its three likeliest tokens is at least this (nats)", 0, 1.1),
    },
    defaults={"fixed": {"k": 15}},
    lossless=False,
    decodes_greedily=True,
    drafts="loose",
    grids=({"k": (8, 15), "window": (4, 6), "entropy": (0.0, 0.3)},),
)
