"""What a decoding method is: a drafter, a length policy, a verifier and a schedule. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings, Value
from specgen.base.types import SamplingParams
from specgen.decoding.adaptive import Adaptive
from specgen.decoding.drafter_kinds import DrafterKind, DraftSource


@dataclass(frozen=True, slots=True)
class Method:
    """A decoding method: a row of the table.

    `policy` names the length policy (the rule that ends drafts); None: no policy ends a draft. `paper` names the method's source.
    `verifier` and `schedule` are names that `factory` translates to classes. If `any_policy`, users may choose another
    policy with `policy=NAME`; see `k_alone`. `settings` are the method's own, besides the policy's. `defaults` replace default
    values, by the length policy that they hold with. `policy_without_predictor` replaces `policy` if the exit layer has no
    acceptance predictor.
    A yardstick (`is_yardstick`) is a reference for other methods' outputs and always slower than plain decoding: `tune` and the
    default `compare` leave it out. The schedule `joint` decodes greedily only.
    If `drafts_without_model`, it drafts by prompt lookup where there is no draft model.
    """

    name: str
    drafter: DrafterKind
    policy: str | None
    paper: str
    lossless: bool = True
    verifier: str = "exact"
    schedule: str = "sequential"
    any_policy: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    policy_without_predictor: str | None = None
    is_yardstick: bool = False
    drafts_without_model: bool = False

    @property
    def uses_draft_model(self) -> bool:
        return self.drafter.source is DraftSource.DRAFT_MODEL

    @property
    def needs_draft_model(self) -> bool:
        return self.uses_draft_model and not self.drafts_without_model

    @property
    def needs_exit_layer(self) -> bool:
        return self.drafter.source is DraftSource.EXIT_LAYER

    @property
    def head(self) -> str:
        """The kind of trained head that the method needs: `medusa`, `eagle` or `glide`; empty if it needs none."""
        return self.drafter.head

    @property
    def skips_layers(self) -> bool:
        return self.drafter.source is DraftSource.SKIPPED_LAYERS

    @property
    def splits_target(self) -> bool:
        """Whether the method runs only some of the target's layers, which requires a model with Llama's structure."""
        return self.needs_exit_layer or self.skips_layers

    @property
    def is_parallel(self) -> bool:
        """Whether the draft model and the target run at the same time."""
        return self.schedule == "parallel"

    def may_measure(self, settings: Settings) -> bool:
        """Whether a measurement may be needed before decoding: of costs, or of which layers to skip."""
        return self.is_parallel or self.skips_layers or settings.policy == Adaptive.name

    @property
    def cost_kind(self) -> str:
        """A name for how long drafting takes. Methods with the same `cost_kind` need equal times for drafts of equal length."""
        return "parallel" if self.is_parallel else self.drafter.cost_kind

    def drafts_trees(self, settings: Settings) -> bool:
        has_nodes = settings.values.get("nodes") != 0  # none: Medusa's heads draft a chain
        return (self.drafter.drafts_trees and has_nodes) or settings.drafts_tree or bool(settings.values.get("cape"))

    @property
    def k_alone(self) -> bool:
        """Whether a given `k` without a `policy` selects the policy `fixed`, because the method's own, `adaptive`, has no `k`."""
        return self.any_policy and self.policy == Adaptive.name

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises SpecgenError if the method cannot decode with these sampling parameters."""
        if self.schedule == "joint" and not sampling.greedy:
            hint = "Take --temperature 0, or -m mtad"
            raise SpecgenError(f"{self.name} decodes greedily only, and temperature is {sampling.temperature:g}", hint)
