"""Loads a causal language model from a folder or the Hugging Face hub, and checks that `ModelRunner` works with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specgen.engine.cached_prefix import context_limits
from specgen.engine.hub import model_folder
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor, has_penalties
from specgen.engine.model_runner import ModelRunner
from specgen.engine.tokenizer import Tokenizer
from specgen.engine.tolerances import logits_error
from specgen.errors import RunError, SpecgenError
from specgen.types import Context

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})  # layers that need no state but a KV cache


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `location` is a Hugging Face id or a folder; `label` replaces it in messages unless it is None.

    `revision` is a branch, tag or commit on the hub; None means the main branch. `offline` forbids downloads. `backend` says
    whose forward pass runs: `native`, `transformers`, or `auto` for whichever supports the model. `exact`: a token's logits are
    computed in the same order of operations in every pass, however many tokens it covers, so that equal contexts give equal bits.
    """

    location: str
    label: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    backend: str = "auto"
    exact: bool = False

    @property
    def name(self) -> str:
        return self.label or self.location


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose folder, config and tokenizer have been read and checked, but not its weights."""

    source: ModelSource
    folder: Path
    config: Any
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, ready to decode with.

    `eos_ids` are the token ids that end an output. `context_limit` is the longest context in tokens. `has_penalties`: the model's
    generation config changes logits depending on earlier tokens (repetition penalty, suppressed tokens). `folder` has its files.
    """

    name: str
    model: Any
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    context_limit: int
    has_penalties: bool
    folder: Path

    def runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner:
        return ModelRunner(self.model, penalties)

    def penalties(self, device: torch.device, vocab_size: int) -> PenaltyProcessor | None:
        """Returns a processor that applies this model's penalties to logits [n, `vocab_size`]; None if it has no penalties."""
        if not self.has_penalties:
            return None
        return PenaltyProcessor(self.model.generation_config, sorted(self.eos_ids), vocab_size, device)

    @inference
    def reference_logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the float32 logits [vocabulary] after the prompt and `token_ids`, with the model's penalties applied.

        Computed by one forward pass without a KV cache, as a reference for the logits of cached passes.
        """
        context = Context(prompt_ids)
        context.extend(token_ids)
        options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        output = self.model(input_ids=torch.tensor([context.ids], device=self.device), use_cache=False, **options)
        logits: torch.Tensor = output.logits[0, -1:]
        penalties = self.penalties(self.device, logits.shape[-1])
        return (logits if penalties is None else penalties(logits, context, [], [], 0))[0].float()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype_name(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def max_tokens(self, prompt_length: int) -> int:
        """Returns the maximum of tokens in prompt and output together, for a prompt of `prompt_length` tokens.

        A LongRoPE model uses other rotary frequencies for contexts longer than a boundary. Keys cached with both frequencies
        would give wrong logits. So a prompt within the boundary gets output only up to the boundary, plus one token: the last
        token of an output is never run through the model.
        """
        limit, rope_boundary = context_limits(self.model.config)
        return min(rope_boundary + 1, limit) if rope_boundary is not None and prompt_length <= rope_boundary else limit


def prepare(source: ModelSource, announce: Callable[[str], None]) -> PreparedModel:
    """Finds or downloads a model's files, and reads its config and tokenizer. `announce` is called with one line per step.

    Raises SpecgenError if the model does not exist, is no decoder-only model, or keeps a recurrent state that cannot be rolled
    back after a rejected draft.
    """
    announce(f"looking for {source.name}")
    folder = model_folder(source.location, source.revision, source.offline, source.trust_remote_code, announce)
    if not (folder / "config.json").is_file():
        raise SpecgenError(
            f"{source.name} is no Hugging Face model: it has no config.json",
            "Name a model id or a folder made by save_pretrained",
        )
    with _reading("configuration", source):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise SpecgenError(f"{source.name} ({config.model_type}) is an encoder-decoder", "Take a decoder-only language model")
    others = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_TYPES
    if others:
        raise _recurrent(source.name, ", ".join(sorted(others)))
    with _reading("tokenizer", source):
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code))
    return PreparedModel(source, folder, config, tokenizer)


def load_model(prepared: PreparedModel, device: torch.device, dtype: torch.dtype, announce: Callable[[str], None]) -> LoadedModel:
    """Loads a prepared model's weights onto `device`, and checks that cached passes with a rollback give the right logits.

    Raises SpecgenError if the check fails or the weights are damaged or no safetensors, RunError if memory is short.
    """
    name, config = prepared.name, prepared.config
    announce(f"loading {name}")
    model = load_weights(prepared.folder, prepared.source, dtype, device)
    configured = [model.generation_config.eos_token_id, model.config.eos_token_id, prepared.tokenizer.eos_id]
    eos: Any = next((found for found in configured if found is not None), [])
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos)
    penalties = has_penalties(model.generation_config, sorted(eos_ids), name)
    loaded = LoadedModel(name, model, prepared.tokenizer, eos_ids, context_limits(config)[0], penalties, prepared.folder)
    check_rollback(loaded.runner(), model, name)
    return loaded


def model_without_weights(prepared: PreparedModel) -> Any | None:
    """Returns the model on torch's meta device, so that its structure can be inspected before the weights are loaded.

    Returns None if building the model fails.
    """
    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(prepared.config, trust_remote_code=prepared.source.trust_remote_code)
    except Exception:  # noqa: BLE001  loading the model reports the error
        return None


def check_tokenizers_match(target: PreparedModel | LoadedModel, draft: PreparedModel | LoadedModel) -> None:
    """Raises SpecgenError unless the two tokenizers have the same tokens with the same ids.

    One of them may have more tokens, at most 1 %. The sizes of the models' embeddings are not compared, because models of one
    family pad them differently.
    """
    of_target, of_draft = target.tokenizer.vocabulary(), draft.tokenizer.vocabulary()
    smaller, larger = sorted((of_target, of_draft), key=len)
    if len(smaller) >= 0.99 * len(larger) and smaller.items() <= larger.items():
        return
    raise SpecgenError(
        f"the tokenizers differ: {target.name} has {len(of_target):,} tokens, {draft.name} has {len(of_draft):,}"
        + (", some of them with other ids" if len(of_target) == len(of_draft) else ""),
        "Take a draft of the target's family, or a method without one: -m lookup",
    )


def _recurrent(name: str, what: str) -> SpecgenError:
    return SpecgenError(
        f"{name} keeps a state ({what}) that cannot be rolled back after a rejected draft",
        "Take a model with attention in every layer",
    )


def load_weights(folder: Path, source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the transformers model in `folder`, on `device` in evaluation mode. Checks only that no tensor is missing.

    Raises SpecgenError for damaged or missing weights and for other formats than safetensors, RunError if memory is short.
    """
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
        found = f" (only {others[0]})" if others else ""
        raise SpecgenError(
            f"{source.name} has no safetensors weights{found}",
            "Other formats can run code when read: convert it to safetensors first",
        )
    with _reading("weights", source):
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
            )
            model = model.to(device).eval()
        except (torch.OutOfMemoryError, MemoryError) as error:
            hint = "Try --dtype bfloat16 or a smaller model"
            raise RunError(f"{source.name} does not fit into the memory of {device}", hint) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise SpecgenError(
            f"{source.name} lacks {len(missing)} of its tensors (the first: {missing[0]})", "Download or save it again"
        )
    return model


@contextmanager
def _reading(part: str, source: ModelSource) -> Iterator[None]:
    """Turns any exception that transformers raises in the `with` block into a SpecgenError with a message of one line.

    `part` says what of the model is read there, for the message.
    """
    try:
        with quiet_transformers():
            yield
    except SpecgenError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise SpecgenError(
                f"{source.name} contains Python code", "If you trust its authors with your machine, add --trust-remote-code"
            ) from error
        if "Unrecognized configuration class" in text:
            raise SpecgenError(f"{source.name} is no causal language model", "Take a decoder-only language model") from error
        reason = shorten(text, 160, placeholder=" …") or type(error).__name__
        raise SpecgenError(
            f"cannot read the {part} of {source.name}: {reason.rstrip('.')}", "Download or save it again"
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switches off transformers' warnings and progress bars in the `with` block."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@inference
def check_rollback(runner: ModelRunner, model: Any, name: str) -> None:
    """Checks that the model gives the same logits with a KV cache after a rolled-back draft as without a cache.

    Raises SpecgenError if the logits differ: then the attention is not causal, or the model ignores the cache or the mask. Raises
    it too for a model that keeps a recurrent state.
    """
    if getattr(type(model), "_is_stateful", False):
        raise _recurrent(name, model.config.model_type)
    ids = [token % runner.num_embeddings for token in (5, 9, 7, 6, 11, 4)]

    def logits_after_rollback() -> torch.Tensor:
        context = Context(ids[:3])
        runner.logits(context, [ids[3], ids[0]])
        context.extend(ids[3:])
        return runner.logits(context).logits

    if why := logits_error(logits_after_rollback, model, ids):
        raise SpecgenError(
            f"{name} does not work with a cache that is rolled back: forward passes after a rollback {why}",
            "Take a causal language model with attention in every layer",
        )
