"""Transformers' own `generate`, plain and assisted, as baselines for `compare`, on the same loaded models.

Both get the same prompts, limits, end-of-sequence ids, sampling and penalties as our runs, and report no rounds. A hook counts
forward passes: a draft pass drafts one token, and a target pass gives one token of its own, so the other tokens were accepted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.settings import Setting, Value

if TYPE_CHECKING:
    from specgen.pair import Pair
    from specgen.types import SamplingParams

_SCHEDULES = ("constant", "heuristic", "heuristic_transient")

BASELINES: Mapping[str, Mapping[str, Setting]] = {
    "transformers": {},
    "transformers-assisted": {
        "k": Setting(0, "tokens in a draft (with a heuristic schedule, in the first one); 0: transformers' own choice", 0, 1000),
        "schedule": Setting("", "constant, heuristic or heuristic_transient; transformers' own choice where empty"),
        "threshold": Setting(-1.0, "a draft ends at a probability below it; -1: transformers' own choice, 0: off", -1, 1),
    },
}


def baseline_settings(name: str, given: Mapping[str, object]) -> dict[str, Value]:
    """The settings given, checked, and defaults for the others. Raises SpecgenError naming the setting and its value."""
    known = BASELINES[name]
    for setting in given:
        if setting not in known:
            raise SpecgenError(f"{name} has no setting {setting!r}", f"It has {', '.join(known) or 'none'}")
    values = {name: setting.parse(name, given.get(name, setting.default)) for name, setting in known.items()}
    if values.get("schedule", "") not in ("", *_SCHEDULES):
        raise SpecgenError(f"schedule is {values['schedule']!r}", f"Take one of {', '.join(_SCHEDULES)}")
    return values


class Baseline:
    """One of `BASELINES` on a pair's models."""

    def __init__(self, pair: Pair, name: str, settings: Mapping[str, Value]) -> None:
        self._pair, self._settings = pair, settings
        self._assisted = name == "transformers-assisted"
        if self._assisted and pair.draft is None:
            raise SpecgenError(f"{name} needs a draft model, and there is none", "Name one with --draft")

    def run(self, prompt_ids: list[int], limit: int, sampling: SamplingParams, seed: int) -> dict[str, Any]:
        """Generate once. Returns a summary line without its text; `seconds` are wall-clock seconds, prefill included."""
        import torch

        target = self._pair.target.model
        prompt = torch.tensor([prompt_ids], device=self._pair.target.device)
        options: dict[str, Any] = {"generation_config": self._config(limit, sampling)}
        if self._assisted and self._pair.draft is not None:
            options["assistant_model"] = self._pair.draft.model
        torch.manual_seed(seed)
        with _quiet(), _counted(target) as target_passes, self._assistant() as draft_passes:
            start = time.perf_counter()
            try:
                output = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
                token_ids: list[int] = output[0, len(prompt_ids) :].tolist()  # the transfer waits for the device
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise RunError(f"transformers refuses: {' '.join(str(error).split())[:160]}", "Leave this method out") from error
            seconds = time.perf_counter() - start
        return self._summary(token_ids, seconds, sum(target_passes), sum(draft_passes))

    def _summary(self, token_ids: list[int], seconds: float, target_passes: int, drafted: int) -> dict[str, Any]:
        ends = self._pair.target.eos_ids
        return {
            "token_ids": token_ids,
            "finish_reason": "eos" if token_ids and token_ids[-1] in ends else "length",
            "seconds": seconds,
            "rounds": target_passes,
            "target_passes": target_passes,
            "drafted": drafted,
            "accepted": max(len(token_ids) - target_passes, 0) if drafted else 0,
            "drafts": target_passes if drafted else 0,
            "phase_seconds": None,
        }

    def _config(self, limit: int, sampling: SamplingParams) -> Any:
        """Our sampling and limits, with every field set that transformers would otherwise take from the model's own config."""
        from transformers import GenerationConfig

        ends = [-1] if sampling.ignore_eos else sorted(self._pair.target.eos_ids) or [-1]
        # with do_sample=False transformers ignores sampling fields and warns of them
        drawn: dict[str, Any] = {"do_sample": False}
        if not sampling.greedy:
            drawn = {
                "do_sample": True,
                "temperature": float(sampling.temperature),
                "top_p": float(sampling.top_p),
                "top_k": int(sampling.top_k),
                "min_p": 0.0,
                "typical_p": 1.0,
                "epsilon_cutoff": 0.0,
                "eta_cutoff": 0.0,
            }
        return GenerationConfig(max_new_tokens=limit, eos_token_id=ends, pad_token_id=max(ends[0], 0), use_cache=True, **drawn)

    @contextmanager
    def _assistant(self) -> Iterator[list[int]]:
        """Yields the draft model's counted passes, with our settings in its generation config, the only place where transformers
        reads them; the config is restored afterwards."""
        if not self._assisted or self._pair.draft is None:
            yield []
            return
        from transformers import GenerationConfig

        model = self._pair.draft.model
        before = model.generation_config
        own = {
            "num_assistant_tokens": self._settings["k"] or None,
            "num_assistant_tokens_schedule": self._settings["schedule"] or None,
            "assistant_confidence_threshold": self._settings["threshold"] if float(self._settings["threshold"]) >= 0 else None,
        }
        changes = {name: value for name, value in own.items() if value is not None}
        model.generation_config = GenerationConfig(**{**before.to_diff_dict(), **changes})
        try:
            with _counted(model) as passes:
                yield passes
        finally:
            model.generation_config = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about the generation config."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Yields a list to which each forward pass of the model appends a 1."""
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        hook.remove()
