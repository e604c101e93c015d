"""Makes the profile of a tuning from its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from specgen.pair.profile import Choice, Measured, Profile, Tuned
from specgen.pair.profile_place import Conditions, with_rounded_draft

if TYPE_CHECKING:
    from specgen.compare.prompts import ListedPrompt
    from specgen.tune.outcome import TuningOutcome
    from specgen.tune.rounding_cost import RoundingCost


def from_outcome(
    outcome: TuningOutcome,
    key: Conditions,
    prompts: Sequence[ListedPrompt] | None = None,
    rounding: RoundingCost | None = None,
) -> Profile:
    """Returns the profile of a tuning that was done under the conditions `key` and on `prompts`
    (None: unknown). `rounding` is what rounding the target's weights costs, None if not known."""
    fingerprints = None
    if prompts is not None:
        fingerprints = [prompt.fingerprint for prompt in prompts]
    sampling = outcome.sampling
    chosen = outcome.chosen
    return Profile(
        version=1,
        written=datetime.now(UTC).replace(microsecond=0),
        verdict=outcome.verdict,
        chosen=Choice(method=chosen.name, settings=dict(chosen.settings)),
        speedup=outcome.speedup_of(chosen),
        sampling={"temperature": sampling.temperature, **sampling.filters},
        fits=with_rounded_draft(key, outcome.draft_dtype),
        methods={method.name: Tuned.model_validate(method) for method in outcome.methods},
        measured=Measured(
            prompts=outcome.prompts,
            new_tokens=sampling.max_new_tokens,
            acceptance=outcome.acceptance_probability,
            costs=dict(outcome.costs),
            prompt_fingerprints=fingerprints,
            rounding=None if rounding is None else rounding._asdict(),
        ),
    )
