"""What a decoding method is (a row of the table of methods), and a method with settings. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specgen.base.errors import SpecgenError
from specgen.base.settings import Setting, Settings, Value, written
from specgen.base.types import SamplingParams
from specgen.decoding.policy_base import Signals

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup
    from specgen.decoding.run import Schedule
    from specgen.decoding.verification import Verifier

NOTHING, DRAFT_MODEL, EXIT, SKIPPED_LAYERS = "nothing", "draft model", "exit", "skipped layers"
MTP = "mtp"  # the kind of a target's own drafting layers
HEADS = ("medusa", "eagle", "glide", "block", MTP)
ONE_PASS = ("medusa", "block")  # the heads that draft all tokens in one pass
DEFAULT_EXIT = DEFAULT_HEAD = "auto"  # the trained part that the user named, or the one found for the target
WITHOUT_A_DRAFT = ", or use a method that needs none: -m lookup"
COPYING = "echo"  # the `cost_kind` of drafts that take almost no time, and of methods without drafts
ADAPTIVE = "adaptive"  # the length policy that needs to know what drafting costs

Grid = Mapping[str, Sequence[Value]]  # values of settings, which are tried in all combinations


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A decoding method: a drafter, a length policy (the rule that ends drafts), a verifier and a schedule.

    `needs` is what the method drafts with: `NOTHING`, `DRAFT_MODEL`, `SKIPPED_LAYERS`, or the kind of a trained part: `EXIT` or
    one of `HEADS`. `drafter`, `verifier` and `schedule` are functions that make these three. A `drafter` of None stands for no
    drafts (or for a schedule with drafts of its own), a `verifier` of None for the lossless verifiers that most methods share,
    and a `schedule` of None for `sequential`. `policy` names the length policy; None: no policy ends a draft. If `any_policy`,
    users may choose another one with `policy=NAME`; `signals` are the numbers about a drafted token that the drafter computes for
    policies. `policy_without_predictor` replaces `policy` if the exit layer has no acceptance predictor. `settings` are the
    method's own, besides the policy's. `defaults` maps the name of a length policy to the default values of settings that differ
    with this policy. `paper` names the method's source.

    If `drafts_without_model`, the method drafts by prompt lookup where there is no draft model, and by the trained part of the
    method that `stand_in` names, where the target has one. `is_parallel`: drafts are made
    during the target's passes. `grows_trees`: all drafts may be trees. `drafts_blocks`: all tokens of a draft are computed in one
    pass. `decodes_greedily`: the method cannot sample. `is_yardstick`: the method is a reference for other methods' outputs and
    always slower than plain decoding, so that `tune` and the default `compare` leave it out.

    For `tune`: if `recorded`, drafts are chains, and drafts of the same length take the same time for all methods of the same
    `cost_kind` (`own_cost_kind`, or if this is empty `drafts`); otherwise rounds are timed for each shape of draft. `grids` are
    the values that are tried; None: those that the policy's settings list (`Setting.tuned`). `searched_grids` are values that are
    tried too, for drafts that are no chains. `alias_of` is the name of the method that this
    row, with other defaults, is an older name of.
    `engines` are the inference engines that `tune --export` knows for this method.
    """

    name: str
    paper: str
    needs: str = NOTHING
    drafter: Callable[[Setup, Settings], Drafter] | None = None
    verifier: Callable[[Setup, Settings], Verifier] | None = None
    schedule: Callable[[Setup, Settings], Schedule] | None = None
    policy: str | None = None
    any_policy: bool = False
    signals: Signals = frozenset()
    policy_without_predictor: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    lossless: bool = True
    is_parallel: bool = False
    is_yardstick: bool = False
    drafts_without_model: bool = False
    stand_in: str = ""
    grows_trees: bool = False
    drafts_blocks: bool = False
    decodes_greedily: bool = False
    drafts: str = "none"
    recorded: bool = False
    own_cost_kind: str = ""
    grids: Sequence[Grid] | None = None
    searched_grids: Sequence[Grid] = ()
    alias_of: str = ""
    engines: Sequence[str] = ()

    @property
    def uses_draft_model(self) -> bool:
        return self.needs == DRAFT_MODEL

    @property
    def needs_draft_model(self) -> bool:
        return self.uses_draft_model and not self.drafts_without_model

    @property
    def needs_exit_layer(self) -> bool:
        return self.needs == EXIT

    @property
    def head(self) -> str:
        """The kind of trained head that the method needs, one of `HEADS`; empty if it needs none."""
        return self.needs if self.needs in HEADS else ""

    @property
    def skips_layers(self) -> bool:
        return self.needs == SKIPPED_LAYERS

    @property
    def runs_model(self) -> bool:
        """Whether a model, or a part of the target, drafts."""
        return self.needs != NOTHING

    def may_measure(self, settings: Settings) -> bool:
        """Whether something may have to be measured before decoding with these settings: pass times, or which layers to skip."""
        return self.is_parallel or self.skips_layers or settings.policy == ADAPTIVE

    @property
    def cost_kind(self) -> str:
        return self.own_cost_kind or self.drafts

    def drafts_trees(self, settings: Settings) -> bool:
        """Whether drafts with these settings may be trees. With `nodes` 0, a method that usually drafts trees drafts a chain
        (Medusa)."""
        has_nodes = settings.values.get("nodes") != 0
        return (self.grows_trees and has_nodes) or settings.drafts_tree or bool(settings.values.get("cape"))

    @property
    def k_alone(self) -> bool:
        """Whether the setting `k`, if given without `policy`, selects the policy `fixed`: the method's own, `adaptive`, has no
        `k`."""
        return self.any_policy and self.policy == ADAPTIVE

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises SpecgenError if the method cannot decode with these sampling parameters."""
        if self.decodes_greedily and not sampling.greedy:
            hint = "Take --temperature 0, or -m mtad"
            raise SpecgenError(f"{self.name} decodes greedily only, and temperature is {sampling.temperature:g}", hint)

    def without_part(self, target: str | None) -> SpecgenError:
        """Returns the error to raise if there is no draft model, or no trained part for the model `target`, and the method needs
        it.

        The hint names the command that trains the part. `target` None is the bundled target, whose training text is included.
        """
        if self.drafts_without_model:
            message = f"{self.name} with lookup=false needs a draft model, and there is none"
            return SpecgenError(message, "Name one with --draft, or take lookup=true")
        if self.uses_draft_model:
            return SpecgenError(f"{self.name} needs a draft model, and there is none", f"Name one with --draft{WITHOUT_A_DRAFT}")
        if self.needs == MTP:
            message = f"{self.name} needs drafting layers in the target's own files, and there are none"
            return SpecgenError(message, f"Take another target{WITHOUT_A_DRAFT}")
        part, option = ("n exit layer", "--exit-layer FILE") if self.needs_exit_layer else (" head", "--head FOLDER")
        return SpecgenError(
            f"{self.name} needs a{part} trained for the target, and there is none",
            f"Train one with {training_command(self.needs, target)}, or name one with {option}",
        )

    def without_predictor(self) -> SpecgenError:
        """Returns the error to raise if the length policy needs a predictor of acceptance, and the drafter has none."""
        if not self.needs_exit_layer:
            problem = f"{self.name} with policy=cali-ts needs a head with a predictor of acceptance, and this head has none"
            return SpecgenError(problem, "Use policy=beta-ts, set model_prediction=false, or take a head such as DSpark's")
        hint = "Train another with specgen tune --train, set model_prediction=false, or use policy=beta-ts"
        return SpecgenError(f"{self.name} needs a predictor, and the exit layer has none", hint)


def imported(path: str, *names: str) -> Callable[[Setup, Settings], Any]:
    """Returns a function that makes an object of a class whose module is imported only then, because it imports torch.

    `path` is the class's module and name below `specgen`. The class is called with the setup, and with the settings in `names` as
    keyword arguments.
    """
    module, _, name = path.rpartition(".")

    def make(setup: Setup, settings: Settings) -> Any:
        made = getattr(import_module(f"specgen.{module}"), name)
        return made(setup, **{name: settings.values[name] for name in names})

    return make


def training_command(part: str, target: str | None) -> str:
    """Returns the command that trains a part of the kind `part` (`EXIT` or one of `HEADS`) for `target`; None: the bundled
    target."""
    of = "" if target is None else f" -t {shlex.quote(target)} --corpus FILE"
    return f"specgen tune --train --methods {'eesd' if part == EXIT else part}{of}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A method with settings. `given` are those that the user wrote, `settings` are all, with defaults and the length policy.

    As text it is written as users write it: `svip:threshold=0.4:max_draft=12`.
    """

    method: Method
    given: Mapping[str, Value]
    settings: Settings

    def __str__(self) -> str:
        return written(self.method.name, self.given)
