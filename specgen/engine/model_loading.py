"""Loads a causal language model from a folder or the Hugging Face hub. Every error is one clear line."""

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

from specgen.engine.hub import model_folder
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor, has_penalties
from specgen.engine.model_runner import ModelRunner
from specgen.engine.selfcheck import check_rollback
from specgen.engine.tokenizer import Tokenizer
from specgen.errors import RunError, SpecgenError
from specgen.types import Context

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})  # layers whose state is a KV cache
NO_LIMIT = 1 << 30  # tokens


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a hub id or a folder. `label` replaces it as the model's name in messages."""

    location: str
    label: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False

    @property
    def name(self) -> str:
        return self.label or self.location


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model's folder, config and tokenizer, read and checked before its weights are loaded."""

    source: ModelSource
    folder: Path
    config: Any
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to decode with. `context_limit` and `rope_boundary` are in tokens, as `ModelRunner` takes them."""

    name: str
    model: Any
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    context_limit: int
    rope_boundary: int | None
    has_penalties: bool
    folder: Path

    def runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner:
        return new_runner(self.model, penalties)

    def penalties_on(self, device: torch.device, width: int) -> PenaltyProcessor | None:
        """The processor for this model's penalties, for a runner on `device` and a vocabulary of `width`; None if it has none."""
        return PenaltyProcessor(self.model.generation_config, sorted(self.eos_ids), width, device) if self.has_penalties else None

    @inference
    def reference_logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """The float32 logits [vocabulary] after the prompt and `token_ids`, with the model's penalties; uses no cache."""
        context = Context(prompt_ids)
        context.extend(token_ids)
        options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        output = self.model(input_ids=torch.tensor([context.ids], device=self.device), use_cache=False, **options)
        logits: torch.Tensor = output.logits[0, -1:]
        penalties = self.penalties_on(self.device, logits.shape[-1])
        return (logits if penalties is None else penalties(logits, context, [], [], 0))[0].float()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype_name(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def limit_for(self, prompt_length: int) -> int:
        """The most tokens of prompt and answer together.

        A run whose prompt is below the rope boundary ends there: a KV cache of both rotary frequencies would give wrong logits.
        The last token is never run, so it may be beyond the boundary.
        """
        if self.rope_boundary is not None and prompt_length <= self.rope_boundary:
            return min(self.rope_boundary + 1, self.context_limit)
        return self.context_limit


def prepare(source: ModelSource, announce: Callable[[str], None]) -> PreparedModel:
    """Find or download a model's files, read its config and tokenizer. `announce` gets one line per step.

    Raises SpecgenError for a model that does not exist, is no decoder or has a state that cannot be rolled back.
    """
    announce(f"looking for {source.name}")
    folder = model_folder(source.location, source.revision, source.offline, source.trust_remote_code, announce)
    with quiet_transformers():
        config = _load_config(folder, source)
        _check_decoder(config, source.name)
        return PreparedModel(source, folder, config, _load_tokenizer(folder, source))


def load_model(prepared: PreparedModel, device: torch.device, dtype: torch.dtype, announce: Callable[[str], None]) -> LoadedModel:
    """Load the weights onto `device`. Raises SpecgenError for damaged weights or other formats, RunError if memory is short."""
    name, config = prepared.name, prepared.config
    announce(f"loading {name}")
    model = load_weights(prepared.folder, prepared.source, dtype, device)
    if getattr(type(model), "_is_stateful", False):
        raise _recurrent(name, config.model_type)
    eos_ids = _eos_ids(model, prepared.tokenizer)
    limit, boundary = context_limits(config)
    penalties = has_penalties(model.generation_config, sorted(eos_ids), name)
    loaded = LoadedModel(name, model, prepared.tokenizer, eos_ids, limit, boundary, penalties, prepared.folder)
    check_rollback(loaded.runner(), model, name)
    return loaded


def skeleton(prepared: PreparedModel) -> Any | None:
    """The model on the meta device, to inspect its structure without its weights; None if its code cannot build one."""
    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(prepared.config, trust_remote_code=prepared.source.trust_remote_code)
    except Exception:  # noqa: BLE001  loading the model reports the error
        return None


def new_runner(model: Any, penalties: PenaltyProcessor | None = None) -> ModelRunner:
    """A runner of a loaded model."""
    return ModelRunner(model, *context_limits(model.config), penalties)


def _load_config(folder: Path, source: ModelSource) -> Any:
    if not (folder / "config.json").is_file():
        raise SpecgenError(
            f"{source.name} is no Hugging Face model: it has no config.json",
            "Name a model id or a folder made by save_pretrained",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        raise _refusal(error, source.name, "configuration") from error


def _check_decoder(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise SpecgenError(f"{name} ({config.model_type}) is an encoder-decoder", "Take a decoder-only language model")
    others = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_TYPES
    if others:
        raise _recurrent(name, ", ".join(sorted(others)))


def _recurrent(name: str, what: str) -> SpecgenError:
    return SpecgenError(
        f"{name} keeps a state ({what}) that cannot be rolled back after a rejected draft",
        "Take a model with attention in every layer",
    )


def load_weights(folder: Path, source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """A model from its folder. Checks only that no tensor is missing; raises as `load_model`."""
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
        found = f" (only {others[0]})" if others else ""
        raise SpecgenError(
            f"{source.name} has no safetensors weights{found}",
            "Other formats can run code when read: convert it to safetensors first",
        )
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
            )
        model = model.to(device).eval()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(
            f"{source.name} does not fit into the memory of {device}", "Try --dtype bfloat16 or a smaller model"
        ) from error
    except Exception as error:
        raise _refusal(error, source.name, "weights") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise SpecgenError(
            f"{source.name} lacks {len(missing)} of its tensors (the first: {missing[0]})", "Download or save it again"
        )
    return model


def _load_tokenizer(folder: Path, source: ModelSource) -> Tokenizer:
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code))
    except Exception as error:
        raise _refusal(error, source.name, "tokenizer") from error


def _refusal(error: Exception, name: str, part: str) -> SpecgenError:
    """One line for whatever transformers raises while it reads a `part` of a model."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return SpecgenError(
            f"{name} contains Python code",
            "If you trust its authors with your machine, add --trust-remote-code",
        )
    if "Unrecognized configuration class" in text:
        return SpecgenError(f"{name} is no causal language model", "Take a decoder-only language model")
    reason = shorten(text, 160, placeholder=" …") or type(error).__name__
    return SpecgenError(f"cannot read the {part} of {name}: {reason.rstrip('.')}", "Download or save it again")


def _eos_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    for found in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_id):
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def context_limits(config: Any) -> tuple[int, int | None]:
    """A model's longest context (`NO_LIMIT` if its config does not say) and its rope boundary (None: none), in tokens."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    rope_types = {entry.get("rope_type") for entry in parameters}
    originals = [entry["original_max_position_embeddings"] for entry in parameters if "original_max_position_embeddings" in entry]
    original = originals[0] if originals else getattr(config, "original_max_position_embeddings", None)
    if "dynamic" in rope_types:  # beyond it the frequencies change with every token
        return original or limit, None
    return limit, original if "longrope" in rope_types else None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' warnings and progress bars while it loads or saves a model."""
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
