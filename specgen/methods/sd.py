"""Speculative decoding with a draft model (Leviathan et al. 2023, Chen et al. 2023), and transformers' length policies.

Also what other methods use: the drafter that runs a model, for chains and trees, and its settings. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from specgen.base.settings import Setting, Settings
from specgen.decoding.policy_base import DRAFT_SIGNALS, DraftedToken, LengthPolicy, comparison, longest_draft_setting
from specgen.methods.method import DRAFT_MODEL, Grid, Method

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup

CAPE = {"cape": Setting(False, "add likely candidates at each position of the chain, more where the draft is unsure (CaPE)")}
CAPE_GRID: Grid = {"cape": (True,), "k": (2, 3, 5, 8)}
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_TRANSLATION = {
    "translation": Setting(
        "tokens",
        "for a draft model with another tokenizer: by the tokens that both have (TLI), or by text, encoded again (SLEM)",
        choices=("tokens", "text"),
    )
}


def tree_settings(width: int, depth: int | str, nodes: int | str = "auto") -> dict[str, Setting]:
    """The settings of draft trees, with these default values. A `depth` of `auto` leaves the number of levels to the length
    policy."""
    levels = "most levels of the tree" if isinstance(depth, int) else "levels of the tree; auto: the policy decides"
    return {
        "width": Setting(width, "candidates at each position; above 1, drafts are trees", 1, 64),
        "depth": Setting(depth, levels, 1, 64, None if isinstance(depth, int) else "auto"),
        "nodes": Setting(nodes, "keep this many of all candidates, as EAGLE-2; auto: the width at each level", 1, 1024, "auto"),
    }


def model_drafter(setup: Setup, settings: Settings) -> Drafter:
    """Makes a drafter that runs a model: token by token, level by level if the settings ask for a tree, or by text (SLEM)."""
    if settings.drafts_text:
        from specgen.decoding.chain import TextDrafter

        return TextDrafter(setup)
    depth, nodes = (None if (value := settings.values.get(name, "auto")) == "auto" else int(value) for name in ("depth", "nodes"))
    if settings.drafts_tree and nodes is not None and getattr(setup.draft, "independent", False):  # PARD
        from specgen.decoding.marginal_tree import MarginalTreeDrafter

        return MarginalTreeDrafter(setup, nodes=nodes, depth=depth)
    if settings.drafts_tree:
        from specgen.decoding.tree import TopKTreeDrafter

        return TopKTreeDrafter(setup, width=int(settings.values["width"]), depth=depth, nodes=nodes)
    from specgen.decoding.chain import ModelDrafter

    return ModelDrafter(setup, depth=depth, cape=bool(settings.values.get("cape")))


class Heuristic(LengthPolicy):
    """The rule of transformers: after a fully accepted draft the next one is two tokens longer, otherwise one token shorter.

    The length stays between 1 and `max_draft`. The first draft has `k` tokens.
    """

    name = "heuristic"
    source = "transformers' schedule"
    settings: ClassVar = {
        "k": Setting(5, "tokens in the first draft", 1, 1000, tuned=(2, 3, 5, 8)),
        "max_draft": longest_draft_setting(40, 4, 6, 8, 12, 20, 40),
    }

    def __init__(self, k: int, max_draft: int) -> None:
        self.k, self.max_draft = min(k, max_draft), max_draft

    def keep_drafting(self, token: DraftedToken) -> bool:
        return self._below(self.k, token)

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.k = min(self.k + 2, self.max_draft) if accepted == drafted else max(self.k - 1, 1)

    def state(self) -> Mapping[str, float]:
        return {"k": self.k}


class Confidence(LengthPolicy):
    """Ends a draft after a token whose probability is below the threshold (transformers' dynamic length), or after `max_draft`
    tokens.

    The probability is the one in the distribution that the token was chosen from (the signal `prob`).
    """

    name = "confidence"
    source = "transformers' dynamic length"
    signals = frozenset({"prob"})
    settings: ClassVar = {
        "threshold": Setting(0.4, "stop after a token with a lower probability than this", 0, 1, tuned=_THRESHOLDS),
        "max_draft": longest_draft_setting(20, 4, 6, 8, 12, 20),
    }

    def __init__(self, threshold: float, max_draft: int) -> None:
        self.threshold, self.max_draft = threshold, max_draft

    def keep_drafting(self, token: DraftedToken) -> bool:
        if (prob := token["prob"]) < self.threshold:
            self.reason = f"prob {comparison(prob, '<', self.threshold)}"
            return False
        return self._below(self.max_draft, token)


def chain_method(policy: str, paper: str, engines: Sequence[str] = ()) -> Method:
    """Makes the method that drafts chains with a draft model and ends them by the length policy `policy`. Both have the same
    name.

    `engines` are the inference engines that `tune --export` knows for it.
    """
    return Method(
        policy,
        paper,
        DRAFT_MODEL,
        model_drafter,
        policy=policy,
        signals=DRAFT_SIGNALS,
        drafts="model",
        recorded=True,
        engines=engines,
    )


# The largest tree first: its outputs are kept, and used again for the smaller ones in it.
_TREES: list[Grid] = [{"width": (width,), "depth": (depth,), "k": (depth,)} for width in (4, 3, 2) for depth in (5, 4, 3, 2)]
SD = replace(
    chain_method("fixed", "Leviathan et al. 2023"),
    name="sd",
    any_policy=True,
    settings=tree_settings(1, "auto") | CAPE | _TRANSLATION,
    searched_grids=(*_TREES, CAPE_GRID),
    engines=("transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx", "lmstudio"),
)
HEURISTIC = chain_method("heuristic", "transformers' assisted generation", ("transformers",))
CONFIDENCE = chain_method("confidence", "transformers' assisted generation", ("transformers", "llama.cpp"))
