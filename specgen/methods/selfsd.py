"""Self-speculative decoding: the target drafts for itself with some of its layers left out. Imports
no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from specgen.base.settings import Setting, Settings, Value
from specgen.base.types import SamplingParams
from specgen.decoding.policy_base import DRAFT_SIGNALS
from specgen.methods.base import (
    SKIPPED_LAYERS,
    Method,
    Request,
    Tuning,
    make_run,
    make_setup,
    unlike_llama,
)
from specgen.methods.model_drafts import CAPE, COPY, model_drafter
from specgen.methods.readiness import KnownModels, Readiness
from specgen.methods.skip_search import NEW_TOKENS, find_skips, usual_skips
from specgen.methods.transformers_policies import Confidence

if TYPE_CHECKING:
    from specgen.base.skipped_layers import SkippedLayers
    from specgen.decoding.run import Run
    from specgen.models.models import Models


class SelfSD(Confidence):
    """Ends a draft after a token whose probability is below a threshold that adapts to the
    acceptance rate (Self-SD, section 3.4).

    The threshold rises if the moving average of the acceptance rate is below 0.9, and falls
    otherwise. It does not fall after a draft of the maximal length `k`, because the threshold did
    not end that draft.
    """

    name = "selfsd"
    source = "Self-SD, section 3.4"
    settings: ClassVar = {"k": Setting(12, "longest draft", 1, 1000)}

    TARGET_RATE = 0.9
    STEP = 0.01
    MEMORY = 0.9
    INITIAL = 0.6

    def __init__(self, k: int) -> None:
        super().__init__(self.INITIAL, k)
        self._rate = self.TARGET_RATE

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self._rate = 0.5 * self._rate + 0.5 * accepted / drafted
        wanted = self.threshold
        if self._rate < self.TARGET_RATE:
            wanted += self.STEP
        elif drafted < self.max_draft:
            wanted -= self.STEP
        self.threshold = self.MEMORY * self.threshold + (1 - self.MEMORY) * wanted

    def state(self) -> Mapping[str, float]:
        return {"threshold": self.threshold}


_SKIP = "layers to skip, as 3+5a+7m (a: attention only, m: MLP only); auto: searched for"


class SelfSpeculativeDecoding(Method):
    """The target without the layers in `skip` drafts, and the whole target verifies."""

    name = "selfsd"
    paper = "Self-SD, Zhang et al. 2023"
    needs = SKIPPED_LAYERS
    policy = "selfsd"
    any_policy = True
    signals = DRAFT_SIGNALS
    settings: ClassVar = {"skip": Setting("auto", _SKIP)} | CAPE | COPY
    unmeasured: ClassVar = {"skip": "0"}
    tuning = Tuning("skip", grids=())

    def start(self, models: Models, request: Request) -> Run:
        settings = request.settings
        if settings.values["skip"] == "auto":
            if request.is_repeatable:
                skip = usual_skips(models.target)
            else:
                skip = find_skips(models, partial(self.speed, models))
            settings = settings.with_value("skip", skip)

        setup = make_setup(models, request, models.without_layers(str(settings.values["skip"])))
        return make_run(models, request, setup, model_drafter(setup, settings), settings=settings)

    def check(self, models: KnownModels) -> Readiness:
        if models.unlike_llama is not None:
            return unlike_llama(models.unlike_llama)
        return super().check(models)

    def speed(
        self, models: Models, skips: SkippedLayers, prompts: Sequence[Sequence[int]]
    ) -> float:
        """Returns the tokens per second of greedy decoding whose drafts are made without the layers
        `skips`.

        The speed is measured on all `prompts` (token ids) together, without the prefill.
        """
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        values: dict[str, Value] = {
            "skip": str(skips),
            "cape": False,
            "k": SelfSD.settings["k"].default,
        }
        tokens = 0
        seconds = 0.0
        for prompt in prompts:
            limit = min(NEW_TOKENS, models.target.max_tokens(len(prompt)) - len(prompt))
            request = Request(
                self, Settings("selfsd", values), SelfSD, sampling, list(prompt), limit
            )
            rounds = list(self.start(models, request).rounds())
            tokens += sum(len(round_.token_ids) for round_ in rounds[1:])
            seconds += sum(sum(round_.seconds.values()) for round_ in rounds[1:])
        return tokens / seconds if seconds else 0.0
