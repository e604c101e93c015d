"""Methods with a drafter, a verifier or a schedule of their own, in other files. Imports no torch.

Drafts from n-grams that Jacobi iteration makes: of the target (`lookahead`, Fu et al. 2024), of the draft (`ouroboros`, Zhao et
al. 2024), see `lookahead_drafter`. A beam search whose prefixes are accepted by their joint likelihood (`mtad`, sections 2.1 and
3.2), and the exact decoding that it approximates (`joint`, Definition 3.1), see `mtad_search`: neither is lossless. The draft
model falls back to the target where it is unsure, and the target rolls back bad tokens (`bild`, Kim et al. 2023): not lossless;
the authors use fallback 0.6 and rollback 5, MTAD's paper 0.9 and 2. Several drafts verified as one tree, see `multi_draft_tree`:
k-sequential selection (`spectr`, Sun et al. 2023) and multi-round rejection sampling (`specinfer`, Miao et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace

from specgen.base.settings import Setting
from specgen.decoding.policy import DRAFT_SIGNALS
from specgen.methods.method import DRAFT_MODEL, Method, imported

LOOKAHEAD = Method(
    "lookahead",
    "lookahead decoding, Fu et al. 2024",
    drafter=imported("methods.lookahead_drafter.LookaheadDrafter", "window", "ngram", "guesses"),
    settings={
        "window": Setting(3, "columns of the window, W; the authors: 15, 10, 7 for 7B, 13B, 33B on an A100", 1, 128),
        "ngram": Setting(3, "length of the n-grams, N; the authors: 5", 2, 16),
        "guesses": Setting(3, "most n-grams for a token, G; the authors: as many as the window's columns", 1, 128),
    },
    grows_trees=True,
    drafts="lookahead",
    grids=({"window": (1, 2, 3, 5, 10, 15), "ngram": (2, 3, 4, 5), "guesses": (3, 7, 15)},),
)
OUROBOROS = Method(
    "ouroboros",
    "Ouroboros, Zhao et al. 2024",
    DRAFT_MODEL,
    imported("methods.lookahead_drafter.OuroborosDrafter", "window", "ngram", "branches"),
    policy="fixed",
    settings={
        "ngram": Setting(4, "length of the n-grams, N; the authors: 5 to 7", 2, 16),
        "branches": Setting(3, "phrases tried after the drafted tokens, K; the authors: 3", 0, 64),
        "window": Setting(4, "columns of the draft's window, and n-grams for a token; the authors: 15 to 20", 1, 128),
    },
    defaults={"fixed": {"k": 5}},
    grows_trees=True,
    drafts="ouroboros",
    grids=({"k": (3, 5, 8, 12), "ngram": (3, 4, 5, 7), "branches": (1, 3), "window": (2, 4, 8, 15)},),
)
MTAD = Method(
    "mtad",
    "MTAD, section 3.2",
    DRAFT_MODEL,
    imported("methods.mtad_search.BeamSearchDrafter", "beams", "beam"),
    imported("methods.mtad_search.JointLikelihoodVerifier", "tau"),
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
    schedule=imported("methods.mtad_search.JointGreedy", "k", "beams", "nodes"),
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
    imported("methods.mtad_search.BildVerifier", "rollback"),
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
SPECTR = Method(
    "spectr",
    "SpecTr, Sun et al. 2023",
    DRAFT_MODEL,
    imported("methods.multi_draft_tree.MultiDraftDrafter", "drafts"),
    imported("methods.multi_draft_tree.k_sequential_verifier"),
    policy="fixed",
    any_policy=True,
    signals=DRAFT_SIGNALS,
    settings={"drafts": Setting(4, "number of drafts", 1, 64)},
    defaults={"fixed": {"k": 4}},
    grows_trees=True,
    drafts="chains",
    grids=({"drafts": (2, 4, 8), "k": (1, 2, 3, 4, 6, 8)},),
)
SPECINFER = replace(
    SPECTR,
    name="specinfer",
    paper="SpecInfer, Miao et al. 2023",
    verifier=imported("methods.multi_draft_tree.multi_round_verifier"),
)
