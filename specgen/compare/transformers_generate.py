"""Runs transformers' own `generate`, plain and assisted (with a draft model), as baselines for
`specgen compare`, on the models that are already loaded.

The baselines get the same prompts, token limits, end-of-sequence ids and sampling parameters as
specgen's methods. `generate` does not report its acceptance, so hooks count the forward passes of
both models. Each draft pass drafts one token. Each target pass yields one token that was not
drafted, so accepted tokens = generated tokens - target passes. Imports transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import logging

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.machine import launch
from specgen.base.settings import Value
from specgen.compare.baselines import BASELINES
from specgen.decoding.run import StopTexts
from specgen.engine.devices import DTYPES
from specgen.engine.text.translation import same_tokens

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.pair.pair import Pair


def run_baseline(
    pair: Pair,
    name: str,
    settings: Mapping[str, Value],
    prompt_ids: list[int],
    limit: int,
    sampling: SamplingParams,
    seed: int,
) -> dict[str, Any]:
    """Generates at most `limit` tokens once with the baseline `name`.

    Returns the keys that `Figures.include` reads: `token_ids`, `seconds` (with the prefill),
    `rounds`, `drafts`, `drafted`, `accepted` and `phase_seconds`, which is None, because `generate`
    does not report how long drafting and verification took; and `finish_reason`.

    Raises SpecgenError if the draft model is missing that the baseline needs, if its vocabulary has
    the target's size but other tokens, or if torchrun has split the target; RunError if
    transformers fails, other than for lack of memory.
    """
    dtype = DTYPES.get(str(settings["dtype"]), pair.target.dtype)
    assistant = _assistant(pair, name, dtype)
    target = pair.target.module_in(dtype)
    for module in filter(None, (target, assistant)):
        # transformers would ask for a tokenizer; the stop strings are in `sampling`
        module.generation_config.stop_strings = None
    end = _StopText(
        lambda: StopTexts.of(sampling.stop, pair.tokenizer, prompt_ids), len(prompt_ids)
    )
    options = _tokenizers(pair, target, assistant)
    options["generation_config"] = _config(pair, limit, sampling)
    options["assistant_model"] = assistant
    if sampling.stop:
        options["stopping_criteria"] = [end]
    prompt = torch.tensor([prompt_ids], device=pair.target.device)
    torch.manual_seed(seed)
    with (
        _errors_of_transformers(),
        _counted(target) as target_passes,
        _configured(assistant, settings),
        _counted(assistant) as draft_passes,
    ):
        start = time.perf_counter()
        output = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        # this copy waits until the device has finished
        token_ids: list[int] = output[0, len(prompt_ids) :].tolist()
        seconds = time.perf_counter() - start

    reason = "length"
    if end.is_reached_by(token_ids):
        token_ids = end.seen
        reason = "stop"
    elif token_ids and token_ids[-1] in pair.target.eos_ids:
        reason = "eos"
    passes = len(target_passes)
    drafted = len(draft_passes)
    return {
        "token_ids": token_ids,
        "finish_reason": reason,
        "seconds": seconds,
        "rounds": passes,
        "drafted": drafted,
        "accepted": max(len(token_ids) - passes, 0) if drafted else 0,
        "drafts": passes if drafted else 0,
        "phase_seconds": None,
    }


def _assistant(pair: Pair, name: str, dtype: torch.dtype) -> Any | None:
    """Returns transformers' own draft model, in `dtype` unless that is the dtype of the target's
    computations: then in the draft's. None if the baseline needs none. Raises as `run_baseline`."""
    launched = launch()
    if launched is not None:
        raise SpecgenError(
            f"{name} has to hold the whole target in one of {launched.ranks} processes",
            "Run without torchrun",
        )
    draft = BASELINES[name].draft_of(pair.models)
    if draft is not None:
        return draft.module_in(draft.dtype if dtype == pair.target.dtype else dtype)
    refusal = BASELINES[name].refusal_without_draft(None)
    if refusal is not None:
        raise refusal
    return None


@contextmanager
def _errors_of_transformers() -> Iterator[None]:
    """Raises RunError for any error of transformers inside the block, but for lack of memory. Shows
    no warnings, such as those about the generation config."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise RunError(
            f"transformers refuses: {' '.join(str(error).split())[:160]}",
            "Leave this method out",
        ) from error
    finally:
        logging.set_verbosity(verbosity)


class _StopText:
    """Ends transformers' generation after a stop text. `seen` has the new tokens up to the one that
    completes it.

    `make` makes what finds the stop texts: again after each draft that was rejected, about which
    some versions of transformers ask, too.
    """

    def __init__(self, make: Callable[[], StopTexts | None], prompt_length: int) -> None:
        self._make = make
        self._texts = make()
        self._begin = prompt_length
        self.seen: list[int] = []
        self.is_reached = False

    def __call__(self, ids: torch.Tensor, _scores: object) -> torch.Tensor:
        return ids.new_full((1,), self.is_reached_by(ids[0, self._begin :].tolist())).bool()

    def is_reached_by(self, tokens: list[int]) -> bool:
        """Whether these new tokens complete a stop text."""
        if tokens[: len(self.seen)] != self.seen:
            self._texts = self._make()
            self.seen = []
            self.is_reached = False
        for token in tokens[len(self.seen) :]:
            if self._texts is None or self.is_reached:
                break
            self.seen.append(token)
            self.is_reached = self._texts.completed_by(token)
        return self.is_reached


def _tokenizers(pair: Pair, target: Any, assistant: Any | None) -> dict[str, Any]:
    """Returns the options of `generate` for a draft model whose tokenizer differs from the
    target's; empty if it does not.

    Raises SpecgenError if they differ but the vocabularies have the same size: transformers then
    takes them for the same one without looking, and refuses a second one.
    """
    if pair.draft is None or assistant is None or same_tokens(pair.tokenizer, pair.draft.tokenizer):
        return {}
    size = target.config.get_text_config().vocab_size
    if assistant.config.get_text_config().vocab_size == size:
        raise SpecgenError(
            f"transformers takes two vocabularies of the same size ({size:,}) for "
            "one, and these differ",
            "Leave transformers-assisted out",
        )
    folders = {"tokenizer": pair.target.folder, "assistant_tokenizer": pair.draft.folder}
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


def _config(pair: Pair, limit: int, sampling: SamplingParams) -> Any:
    """Returns the GenerationConfig for at most `limit` new tokens. It sets every field that
    transformers would otherwise take from the model's own generation config."""
    eos_ids = [] if sampling.ignore_eos else sorted(pair.target.eos_ids)
    eos_ids = eos_ids or [-1]
    # transformers warns about sampling fields in greedy decoding
    fields: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        fields = {
            "do_sample": True,
            "temperature": float(sampling.temperature),
            **sampling.filters,  # transformers has them under the same names
            "typical_p": 1.0,
            "epsilon_cutoff": 0.0,
            "eta_cutoff": 0.0,
        }
    penalty = pair.target.generation.repetition_penalty
    if penalty is not None:
        fields["repetition_penalty"] = penalty
    return GenerationConfig(
        max_new_tokens=limit,
        eos_token_id=eos_ids,
        pad_token_id=max(eos_ids[0], 0),
        use_cache=True,
        **fields,
    )


@contextmanager
def _configured(draft: Any | None, settings: Mapping[str, Value]) -> Iterator[None]:
    """Applies the baseline's settings to the draft model inside the block, in its generation
    config: transformers reads them only there."""
    if draft is None:
        yield
        return
    before = draft.generation_config
    changes = {}
    if settings["k"]:
        changes["num_assistant_tokens"] = settings["k"]
    if settings["schedule"]:
        changes["num_assistant_tokens_schedule"] = settings["schedule"]
    if float(settings["threshold"]) >= 0:
        changes["assistant_confidence_threshold"] = settings["threshold"]
    draft.generation_config = GenerationConfig(**{**before.to_diff_dict(), **changes})
    try:
        yield
    finally:
        draft.generation_config = before


@contextmanager
def _counted(model: Any | None) -> Iterator[list[int]]:
    """Yields a list to which a hook appends a 1 at each forward pass of `model` inside the block;
    it stays empty for None."""
    passes: list[int] = []
    hook = None if model is None else model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        yield passes
    finally:
        if hook is not None:
            hook.remove()
