"""The list of drafters: the model that each runs, how it is constructed, and what tuning needs to know about it.

To add a drafter, write its class in a file of its own and add a `DrafterKind` here. Imports no torch until one is constructed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specgen.base.settings import Settings
from specgen.decoding.length_policy import MATCH_LENGTH, MODEL_SIGNALS, Signals

if TYPE_CHECKING:
    from specgen.decoding.drafters import Drafter, DraftSetup


class DraftSource(Enum):
    """The model, or part of the target, that a drafter runs to get its logits."""

    NOTHING = "no model"
    DRAFT_MODEL = "a draft model"
    EXIT_LAYER = "the target's first layers and an exit layer"
    SKIPPED_LAYERS = "the target without some layers"
    HEAD = "a head on the target's hidden states"


@dataclass(frozen=True, slots=True, eq=False)
class DrafterKind:
    """One way to draft. `name` identifies it in saved files and reports; `title` is what reports call the model that drafts.

    `make` constructs the drafter. `signals` names the numbers that it computes for a length policy, such as entropy.
    Drafters with the same `cost_kind` (by default `name`) take the same time for a draft of the same number of tokens.
    `head` is the kind of trained head that it runs, as in `engine.heads.weights.KINDS`; empty for other sources.
    If `recorded`, `specgen tune` simulates settings on drafts recorded once; otherwise it runs the drafter for each setting.
    """

    name: str
    source: DraftSource
    make: Callable[[DraftSetup, Settings], Drafter]
    signals: Signals = frozenset()
    drafts_trees: bool = False
    recorded: bool = True
    cost_kind: str = ""
    title: str = "the draft"
    head: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost_kind", self.cost_kind or self.name)


def _module(name: str) -> Any:
    """Imports and returns the module `name` of this package. Called only to construct a drafter, because it imports torch."""
    return import_module(f"{__package__}.{name}")


def _model_drafter(setup: DraftSetup, settings: Settings) -> Any:
    """A drafter that runs a model token by token, or level by level if the settings ask for a tree."""
    if settings.drafts_text:
        return _module("text_drafter").TextDrafter(setup)
    depth, nodes = (None if (value := settings.values.get(name)) == "auto" else value for name in ("depth", "nodes"))
    if settings.drafts_tree:
        return _module("tree_drafter").TopKTreeDrafter(setup, width=settings.values["width"], depth=depth, nodes=nodes)
    if settings.values.get("cape"):
        return _module("cape").CapeDrafter(setup, depth=depth)
    return _module("drafters").ModelDrafter(setup, depth=depth)


def _prompt_lookup(setup: DraftSetup, settings: Settings) -> Any:
    return _module("prompt_lookup").PromptLookupDrafter(settings.values["ngram"], setup.eos_ids)


def _suffix(setup: DraftSetup, settings: Settings) -> Any:
    min_prob, factor = settings.values["min_prob"], settings.values["factor"]
    return _module("suffix_drafter").SuffixDrafter(min_prob, factor, setup.eos_ids, setup.history)


def _lookahead(setup: DraftSetup, settings: Settings) -> Any:
    width, ngram, guesses = (settings.values[name] for name in ("window", "ngram", "guesses"))
    return _module("lookahead").LookaheadDrafter(setup, width=width, ngram=ngram, guesses=guesses)


def _ouroboros(setup: DraftSetup, settings: Settings) -> Any:
    width, ngram, branches = (settings.values[name] for name in ("window", "ngram", "branches"))
    return _module("ouroboros").OuroborosDrafter(setup, width=width, ngram=ngram, branches=branches)


def _hybrid(setup: DraftSetup, settings: Settings) -> Any:
    """Prompt lookup or the draft model, whichever is expected to gain more; only one of them without a draft model or lookup."""
    model = None if setup.runner is None else _model_drafter(setup, settings)
    lookup = _prompt_lookup(setup, settings) if settings.values["lookup"] else None
    return _module("hybrid_drafter").HybridDrafter(lookup, model) if lookup is not None else model


def _medusa(setup: DraftSetup, settings: Settings) -> Any:
    """A fixed tree of the heads' likeliest tokens, or a chain with `nodes` 0."""
    if settings.values["nodes"] == 0:
        return _module("drafters").ModelDrafter(setup)
    return _module("medusa_tree").MedusaTreeDrafter(setup, nodes=settings.values["nodes"])


def _multi_draft(setup: DraftSetup, settings: Settings) -> Any:
    return _module("multi_draft").MultiDraftDrafter(setup, drafts=settings.values["drafts"])


def _beam_search(setup: DraftSetup, settings: Settings) -> Any:
    width, beam = settings.values["beams"], settings.values["beam"]
    return _module("mtad").BeamSearchDrafter(setup, width=width, stochastic=beam == "sample")


def _bild(setup: DraftSetup, settings: Settings) -> Any:
    return _module("bild").BildDrafter(setup, fallback=settings.values["fallback"])


_MODEL_SIGNALS = MODEL_SIGNALS - {"predicted_acceptance"}

NONE = DrafterKind("none", DraftSource.NOTHING, lambda *_: _module("drafters").NoDrafter(), cost_kind="echo")
LOOKUP = DrafterKind("lookup", DraftSource.NOTHING, _prompt_lookup, frozenset({MATCH_LENGTH}), cost_kind="echo")
SUFFIX = DrafterKind("suffix", DraftSource.NOTHING, _suffix, frozenset({MATCH_LENGTH, "prob"}), cost_kind="echo")
LOOKAHEAD = DrafterKind("lookahead", DraftSource.NOTHING, _lookahead, drafts_trees=True, recorded=False)
SEARCH = DrafterKind("search", DraftSource.NOTHING, lambda *_: _module("drafters").NoDrafter(), drafts_trees=True, recorded=False)
MODEL = DrafterKind("model", DraftSource.DRAFT_MODEL, _model_drafter, _MODEL_SIGNALS)
HYBRID = DrafterKind(MODEL.name, DraftSource.DRAFT_MODEL, _hybrid, _MODEL_SIGNALS | {MATCH_LENGTH})  # recorded as MODEL
MULTI_DRAFT = DrafterKind("chains", DraftSource.DRAFT_MODEL, _multi_draft, _MODEL_SIGNALS, drafts_trees=True, recorded=False)
OUROBOROS = DrafterKind("ouroboros", DraftSource.DRAFT_MODEL, _ouroboros, drafts_trees=True, recorded=False)
BEAMS = DrafterKind("beams", DraftSource.DRAFT_MODEL, _beam_search, _MODEL_SIGNALS, recorded=False)
BILD = DrafterKind("fallback", DraftSource.DRAFT_MODEL, _bild, _MODEL_SIGNALS, recorded=False)
EXIT = DrafterKind("exit", DraftSource.EXIT_LAYER, _model_drafter, MODEL_SIGNALS, title="the exit layer")
EXIT_TREE = DrafterKind("exit tree", DraftSource.EXIT_LAYER, _model_drafter, MODEL_SIGNALS, drafts_trees=True, recorded=False)
MEDUSA = DrafterKind(
    "medusa",
    DraftSource.HEAD,
    _medusa,
    _MODEL_SIGNALS,
    drafts_trees=True,
    recorded=False,
    title="the heads",
    head="medusa",
)
EAGLE = DrafterKind("eagle", DraftSource.HEAD, _model_drafter, _MODEL_SIGNALS, recorded=False, title="the head", head="eagle")
GLIDE = DrafterKind("glide", DraftSource.HEAD, _model_drafter, _MODEL_SIGNALS, recorded=False, title="the head", head="glide")
SKIP = DrafterKind("skip", DraftSource.SKIPPED_LAYERS, _model_drafter, _MODEL_SIGNALS, recorded=False)
