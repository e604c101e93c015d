"""Finds a model's files, chooses the backend that runs it, and loads it: `prepare`, then
`LoadedModel`.

Two records describe a model: `PreparedModel`, what its files say, and `LoadedModel`, the model on
its device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import Any

import torch

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.files import files_in
from specgen.base.types import Context
from specgen.engine.block_runner import PardRunner
from specgen.engine.devices import device_name, inference
from specgen.engine.gguf.file import is_gguf
from specgen.engine.hub import GGUF_HINT, model_path
from specgen.engine.model import Model, ModelShape
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.config_reading import read_architecture, read_config, text_config
from specgen.engine.native.graphs import Captures, CudaGraphs
from specgen.engine.native.native_model import load_native
from specgen.engine.penalties import (
    GenerationConfig,
    PenaltyProcessor,
    eos_ids,
    has_penalties,
    read_generation_config,
)
from specgen.engine.text.token_bytes import NoTokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation, same_tokens
from specgen.engine.weights import HARMLESS, stored_tensors

_EXPERT_FIELDS = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "top_k_experts"),
)
_EXPERT = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `location` is a Hugging Face id or a folder; `label` replaces it in
    messages unless it is None.

    `revision` is a branch, tag or commit on the hub; None means the main branch. `offline` forbids
    downloads. `backend` says whose forward pass runs: `native`, `transformers`, or `auto` for
    whichever supports the model. `exact`: a token's logits are computed in the same order of
    operations in every pass, however many tokens it covers, so that equal contexts give equal bits.
    `on_mps`: the model is to run on an Apple GPU, where `auto` takes transformers, as the native
    decoder was never run there. `context` is the most tokens of prompt and output together, at
    least 2; None: as many as the model was made for. `repetition_penalty` replaces the generation
    config's. `quantise` (`int8`, `int4`): the native decoder rounds the weights to that.
    `wide_attention`: see `native.layer.NativeLayer`.
    """

    location: str
    label: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    backend: str = "auto"
    exact: bool = False
    on_mps: bool = False
    context: int | None = None
    quantise: str | None = None
    repetition_penalty: float | None = None
    wide_attention: bool = False

    @property
    def name(self) -> str:
        return self.label or self.location


@dataclass(frozen=True)
class PreparedModel:
    """What a model's files in `folder` say, without its weights. `raw` is the content of
    config.json, `shape` the model's sizes. `folder` may also be a GGUF file.

    If there is an `architecture`, the native decoder runs the model. If it is None, transformers
    runs the model, with `transformers_config`, and `fallback` says why: a field that the native
    decoder does not know, or the user's choice. `quantisation` has the settings with which the
    checkpoint's weights are quantised, None if they are not. Tokenizer and generation config are
    read when they are first needed.
    """

    source: ModelSource
    folder: Path
    raw: Mapping[str, Any]
    shape: ModelShape
    architecture: Architecture | None = None
    transformers_config: Any = None
    fallback: str | None = None
    quantisation: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def backend(self) -> str:
        return "transformers" if self.architecture is None else "native"

    @property
    def slow_path(self) -> str | None:
        """A line that says why transformers runs the model; None if specgen does, or if the user
        chose transformers."""
        if self.architecture is not None or self.source.backend == "transformers":
            return None
        return f"{self.name} runs on transformers, which is slower: {self.fallback}"

    @property
    def experts(self) -> tuple[int, int] | None:
        """How many experts each mixture of the model has, and how many of them run a token; None
        for a dense model."""
        fields = text_config(self.raw)
        count, chosen = (
            next((fields[name] for name in names if fields.get(name)), None)
            for names in _EXPERT_FIELDS
        )
        return (count, chosen) if isinstance(count, int) and isinstance(chosen, int) else None

    @property
    def active_parameters(self) -> int:
        """How many numbers of the weights a token's pass reads: of experts, those of the chosen
        ones."""
        count, chosen = self.experts or (1, 1)
        each = ((name, size) for name, size in self.parameters.items())
        return sum(size * chosen // count if _EXPERT.search(name) else size for name, size in each)

    @property
    def rounding_refusal(self) -> str | None:
        """Why the weights cannot be rounded to int8 or int4 when they are loaded; None if they
        can."""
        if self.architecture is None:
            return f"{self.name} runs on transformers: {self.fallback}"
        return None if self.architecture.mixture is None else f"{self.name} is a mixture of experts"

    @cached_property
    def generation(self) -> GenerationConfig:
        found = read_generation_config(self.folder, self.raw)
        penalty = self.source.repetition_penalty
        return found if penalty is None else replace(found, repetition_penalty=penalty)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder, self.raw, self.source.trust_remote_code, self.name)

    @property
    def context_limit(self) -> int:
        """The longest context in tokens: the user's limit, or the model's own."""
        return self.source.context or self.shape.context_limit

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an output."""
        return eos_ids(self.raw, self.generation, self.shape.default_eos, self.tokenizer.eos_id)

    @cached_property
    def parameters(self) -> Mapping[str, int]:
        """How many numbers each weight has, by its name, as the headers of the files say. Raises
        SpecgenError for damaged files.

        Quantised weights are packed in the files; their numbers are those of the model that
        transformers would build.
        """
        if self.quantisation is not None:
            from specgen.engine.transformers.transformers_model import model_without_weights

            module = model_without_weights(self.transformers_config, self.source.trust_remote_code)
            if module is not None:
                return {name: weight.numel() for name, weight in module.named_parameters()}
        # of which the native decoder loads only those of the text part
        stored = stored_tensors(self.folder)
        used = [name for name in stored if self.architecture is None or not HARMLESS.search(name)]
        return {name: prod(stored[name][0]) for name in used}

    def dequantises_on(self, device: torch.device) -> bool:
        """Whether quantised weights are converted to ordinary floating-point numbers when they are
        loaded onto `device`.

        False for a model that is not quantised. Raises SpecgenError if transformers cannot load
        weights in this format there.
        """
        if self.quantisation is None:
            return False
        from specgen.engine.transformers.loading import check_quantisation

        return check_quantisation(self.quantisation, device, self.name)


def prepare(source: ModelSource, announce: Callable[[str], None]) -> PreparedModel:
    """Finds or downloads a model's files, and reads its config and tokenizer. `announce` is called
    with one line per step.

    Raises SpecgenError if the model does not exist, is no decoder-only model, or cannot run on the
    backend that the source names.
    """
    announce(f"looking for {source.name}")
    folder = model_path(
        source.location, source.revision, source.offline, source.trust_remote_code, announce
    )
    prepared = describe(folder, source)
    limit = prepared.shape.context_limit
    if source.context is not None and not 2 <= source.context <= limit:
        problem = (
            f"--context is {source.context:,}, and {source.name} was made for {limit:,} tokens"
        )
        raise SpecgenError(
            problem, f"Take 2 (a token of prompt, and a new one) to {limit}, or leave it out"
        )
    _ = prepared.generation, prepared.tokenizer  # mistakes in them are reported now
    return prepared


def describe(folder: Path, source: ModelSource) -> PreparedModel:
    """Reads the config of the model in `folder` and chooses the backend. Raises SpecgenError as
    `prepare` does."""
    raw = read_config(folder, source.name)
    name = source.name
    quantisation = _quantisation(raw, name)
    fallback = "chosen by --backend transformers"
    if quantisation is not None:
        fallback = (
            f"its weights are quantised with {shorten(str(quantisation.get('quant_method')), 40)}"
        )
        if source.backend == "native":
            raise SpecgenError(
                f"the native backend does not run {name}: {fallback}",
                "Take --backend auto or transformers",
            )
    elif source.backend == "auto" and (source.trust_remote_code or source.on_mps):
        fallback = (
            "on Apple GPUs"
            if source.on_mps
            else "--trust-remote-code allows code of the model itself"
        )
    elif source.backend != "transformers":
        try:
            architecture = read_architecture(raw)
            if source.exact and architecture.recurrent is not None:
                raise SpecgenError(
                    f"--exact: the bits of {name}, with recurrent layers, depend on the passes",
                    "Leave it out",
                )
            if source.exact and architecture.mixture is not None:
                problem = (
                    f"--exact: bits of a mixture of experts such as {name} depend "
                    "on the tokens that are run together"
                )
                raise SpecgenError(problem, "Leave it out")
            return PreparedModel(source, folder, raw, architecture, architecture)
        except UnsupportedConfig as error:
            fallback = str(error)
            if source.backend == "native":
                raise SpecgenError(
                    f"{name}: {error}", "Take --backend auto or transformers"
                ) from error
    if source.exact:
        raise SpecgenError(
            f"--exact needs the native backend, and {name} runs on transformers: {fallback}",
            "Leave it out",
        )
    from specgen.engine.transformers.loading import read_shape, read_transformers_config

    config = read_transformers_config(folder, name, source.trust_remote_code)
    return PreparedModel(
        source, folder, raw, read_shape(config, name), None, config, fallback, quantisation
    )


def _quantisation(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns the model's `quantization_config`; a model with vision or audio may have it in its
    text part.

    Raises SpecgenError for GGUF, and for settings that are no JSON object.
    """
    inner = config.get("text_config")
    found = [
        part.get("quantization_config")
        for part in (config, inner if isinstance(inner, dict) else {})
    ]
    settings = next((each for each in found if each is not None), None)
    if settings is not None and not isinstance(settings, dict):
        problem = (
            f"the config.json of {name} has a quantization_config that is no JSON "
            f"object: {shorten(repr(settings), 40)}"
        )
        raise SpecgenError(problem, "Download or save it again")
    if settings is not None and settings.get("quant_method") == "gguf":
        raise SpecgenError(f"{name} has a config.json that was made from a GGUF file", GGUF_HINT)
    return settings


DraftModelRunner = ModelRunner | PardRunner | TranslatedRunner
# Loads a model's weights; `load_weights` is one. The last argument has the device of each layer if
# they are on several.
Loader = Callable[[PreparedModel, torch.dtype, torch.device, Sequence[torch.device] | None], Model]


class LoadedModel:
    """A model on its device, ready to decode with. Its weights are loaded at the first use of
    `model`, which `load_model` makes.

    Weights may never be needed in this process: plain decoding has no draft model, and PEARL's may
    run in a process of its own. All else is known without weights.

    `prepared` is what the model's files say, `dtype` that of its computations. For a draft model
    with another tokenizer than the target's, `translation` translates between their tokens; if that
    is not possible, `refusal` says why, and only drafts by way of their text work. Both are None if
    the tokens are the same. `warning` is a text for the user, or None. `layer_devices` has the
    device of each layer if they are on several; None: all are on one. `load` loads the weights.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        device: torch.device,
        dtype: torch.dtype,
        translation: Translation | None = None,
        refusal: SpecgenError | None = None,
        warning: str | None = None,
        layer_devices: Sequence[torch.device] | None = None,
        load: Loader | None = None,
    ) -> None:
        self.prepared = prepared
        self.dtype = dtype
        self.layer_devices = layer_devices
        self._device = device
        self.translation = translation
        self.refusal = refusal
        self.warning = warning
        source = prepared.source
        self.name = prepared.name
        self.folder = prepared.folder
        self.backend = prepared.backend
        self.exact = source.exact
        self.quantise = source.quantise
        self.context_limit = prepared.context_limit
        self.tokenizer = prepared.tokenizer
        self.generation = prepared.generation
        self.eos_ids = prepared.eos_ids
        self.dtype_name = source.quantise or str(dtype).removeprefix("torch.")
        self._model: Model | None = None
        self._load = load or load_weights
        self._lock = Lock()

    @property
    def model(self) -> Model:
        """The model with its weights. Raises SpecgenError or RunError if it cannot be loaded, see
        `load_weights`."""
        with self._lock:
            if self._model is None:
                self._model = self._load(
                    self.prepared, self.dtype, self._device, self.layer_devices
                )
                self.warning = self.warning or getattr(self._model, "warning", None)
            return self._model

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the generation config changes logits (repetition penalty, suppressed tokens and
        the like).

        Raises SpecgenError if it does so in a way that is not supported.
        """
        return has_penalties(self.generation, self.eos_ids, self.name)

    @cached_property
    def transformers_module(self) -> Any:
        """This model as transformers' own object, with the same dtype and device. Its weights are
        loaded again if the model is native."""
        from specgen.engine.transformers.loading import load_module
        from specgen.engine.transformers.transformers_model import TransformersModel

        model = self.model
        if isinstance(model, TransformersModel):
            return model.module
        return load_module(self.prepared, model.dtype, model.device)

    def runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner:
        """Returns a runner of the model in its own token ids. Raises SpecgenError as `model` and
        `has_penalties` do."""
        _ = self.has_penalties
        runner = ModelRunner(self.model, penalties)
        runner.context_limit = self.context_limit
        return runner

    @property
    def drafts_blocks(self) -> bool:
        """Whether this is a PARD draft model (`block_runner.PardRunner`) that can be used as one:
        its tokens are the target's."""
        return (
            isinstance(self.prepared.raw.get("pard_token"), int)
            and self.translation is None
            and self.refusal is None
        )

    def draft_runner(self, penalties: PenaltyProcessor | None = None) -> DraftModelRunner:
        """Returns a runner of this draft model that takes and answers in the target's token ids; if
        there is a `refusal`, in its own ids.

        `penalties` are the target's.
        """
        if self.drafts_blocks:
            return PardRunner(self.runner(), self.prepared.raw["pard_token"], penalties)
        if self.translation is None:
            return self.runner(penalties)
        return TranslatedRunner(self.runner(), self.translation, penalties)

    def penalties(self, device: torch.device, vocab_size: int) -> PenaltyProcessor | None:
        """Returns a processor that applies this model's penalties to logits [n, `vocab_size`]; None
        if it has no penalties."""
        return (
            PenaltyProcessor(self.generation, self.eos_ids, vocab_size, device)
            if self.has_penalties
            else None
        )

    @inference
    def reference_logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the float32 logits [vocabulary] after the prompt and `token_ids`, with the
        model's penalties applied.

        Computed by one forward pass without a KV cache, as a reference for the logits of cached
        passes.
        """
        context = Context(prompt_ids)
        context.extend(token_ids)
        logits = self.model.reference_logits(context.ids)[-1:]
        penalties = self.penalties(self.device, logits.shape[-1])
        return (logits if penalties is None else penalties(logits, context, [], [], 0))[0].float()

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self._device if self._model is None else self._model.device

    @property
    def devices(self) -> list[torch.device]:
        return list(dict.fromkeys(self.layer_devices or [self.device]))

    @property
    def device_label(self) -> str:
        """The device as text, for keys of measurements; with several devices, how many layers each
        has."""
        counts = Counter(map(device_name, self.layer_devices or ()))
        return ", ".join(
            f"{count} layers on {name}" for name, count in counts.items()
        ) or device_name(self.device)

    def max_tokens(self, prompt_length: int) -> int:
        """Returns the maximum of tokens in prompt and output together, for a prompt of
        `prompt_length` tokens.

        A LongRoPE model uses other rotary frequencies for contexts longer than a boundary. Keys
        cached with both frequencies would give wrong logits. So a prompt within the boundary gets
        output only up to the boundary, plus one token: the last token of an output is never run
        through the model.
        """
        limit = self.context_limit
        boundary = self.prepared.shape.rope_boundary
        return (
            min(boundary + 1, limit)
            if boundary is not None and prompt_length <= boundary
            else limit
        )


def load_model(
    prepared: PreparedModel,
    device: torch.device,
    dtype: torch.dtype,
    announce: Callable[[str], None],
    load: Loader | None = None,
    layer_devices: Sequence[torch.device] | None = None,
) -> LoadedModel:
    """Loads a prepared model's weights onto `device`, or onto several; see `LoadedModel` for
    `layer_devices` and `load`.

    Raises SpecgenError for weights that are damaged or no safetensors, or if the model's KV cache
    cannot be rolled back; RunError if memory is short.
    """
    where = f" on {len(set(layer_devices))} devices, without CUDA graphs" if layer_devices else ""
    announce(f"loading {prepared.name}{where}")
    loaded = LoadedModel(prepared, device, dtype, layer_devices=layer_devices, load=load)
    _ = loaded.model, loaded.has_penalties
    return loaded


def load_weights(
    prepared: PreparedModel,
    dtype: torch.dtype,
    device: torch.device,
    layer_devices: Sequence[torch.device] | None = None,
) -> Model:
    """Loads a model's weights with the backend that runs it. Raises SpecgenError and RunError as
    `load_model`."""
    source = prepared.source
    folder = prepared.folder
    check_weight_files(folder, source.name)
    try:
        if prepared.architecture is None:
            from specgen.engine.transformers.loading import load_transformers_model

            return load_transformers_model(prepared, dtype, device, layer_devices)
        own: dict[str, Any] = {
            name: getattr(source, name) for name in ("exact", "quantise", "wide_attention")
        }
        native = load_native(
            folder,
            source.name,
            prepared.architecture,
            dtype,
            device,
            layer_devices=layer_devices,
            **own,
        )
        # a graph is of one device
        is_static = prepared.architecture.recurrent is None and layer_devices is None
        if device.type == "cuda" and is_static:
            native.captures = Captures(capture=CudaGraphs(device))
        return native
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = ", ".join(map(str, dict.fromkeys(layer_devices or [device])))
        raise RunError(
            f"{source.name} does not fit into the memory of {where}",
            "Try --dtype bfloat16 or a smaller model",
        ) from error


def check_weight_files(folder: Path, name: str) -> None:
    """Raises SpecgenError if there are no safetensors weights in `folder`; `name` is the model's,
    for the message."""
    if is_gguf(folder) or files_in(folder, "*.safetensors"):
        return
    if files_in(folder, "*.safetensors.index.json"):
        raise SpecgenError(
            f"{name} has an index of weight files, but none of the files",
            "Download or save it again",
        )
    other = next((path.name for path in files_in(folder, "*.bin", "*.pt", "*.pth", "*.gguf")), None)
    hint = (
        "Other formats can run code when read: convert it to safetensors first"
        if other
        else "Download or save it again"
    )
    if other is not None and other.endswith(".gguf"):
        hint = GGUF_HINT
    raise SpecgenError(
        f"{name} has no safetensors weights" + (f" (only {other})" if other else ""), hint
    )


def translation_between(target: PreparedModel, draft: PreparedModel) -> Translation | None:
    """Returns the translation between the two models' tokens; None if they have the same tokenizer.

    Raises NoTokenBytes if a tokenizer's tokens do not stand for bytes, or if the two have no token
    in common.
    """
    if same_tokens(target.tokenizer, draft.tokenizer):
        return None
    for model in (target, draft):
        try:
            token_bytes(model.tokenizer)
        except NoTokenBytes as error:
            raise _untranslatable(f"{model.name}: {error.message}") from error
    found = Translation(
        target.tokenizer, draft.tokenizer, target.eos_ids, draft.eos_ids, target.shape.vocab_size
    )
    if not any(piece in found.draft.ids for piece in found.target.ids):
        raise _untranslatable(f"{target.name} and {draft.name} have none in common")
    return found


def _untranslatable(reason: str) -> NoTokenBytes:
    return NoTokenBytes(
        f"the tokenizers differ, and their tokens cannot be translated: {reason}",
        "Only drafts by their text work with such tokenizers (-m sd --set "
        "translation=text; in compare -m sd:translation=text), "
        "and methods without a draft model: -m lookup",
    )
