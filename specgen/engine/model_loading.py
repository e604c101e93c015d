"""Finds a model's files, chooses the backend that runs it, and loads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.types import Context
from specgen.engine.devices import DTYPES, device_name
from specgen.engine.dtype_choice import DtypeChoice, choose_dtype
from specgen.engine.generation_config import GenerationConfig, eos_ids, read_generation_config
from specgen.engine.hub import model_folder
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor, has_penalties
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.model_shape import ModelShape, of_transformers
from specgen.engine.native.architecture import Architecture, UnsupportedConfig, of_architecture
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.graphs import use_cuda_graphs
from specgen.engine.native.loading import load_native
from specgen.engine.quantisation import GGUF_HINT, Quantisation, read_quantisation
from specgen.engine.text.token_bytes import NoTokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.engine.text.translation import Translation, same_tokens


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `location` is a Hugging Face id or a folder; `label` replaces it in messages unless it is None.

    `revision` is a branch, tag or commit on the hub; None means the main branch. `offline` forbids downloads. `backend` says
    whose forward pass runs: `native`, `transformers`, or `auto` for whichever supports the model. `exact`: a token's logits are
    computed in the same order of operations in every pass, however many tokens it covers, so that equal contexts give equal bits.
    `on_mps`: the model is to run on an Apple GPU, where `auto` takes transformers, as the native decoder was never run there.
    `context` is the most tokens of prompt and output together, at least 2; None: as many as the model was made for.
    `quantise` (`int8`, `int4`): the weights are rounded to that when they are loaded, which only the native decoder does.
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

    @property
    def name(self) -> str:
        return self.label or self.location


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model's config.json says. `raw` is its content, `shape` the model's sizes.

    The native decoder runs the model if there is an `architecture`. If it is None, transformers does, with `transformers_config`,
    and `fallback` says why: the field that the native decoder does not know, or the user's choice. `quantisation` says how the
    checkpoint's weights are quantised, None if they are not.
    """

    raw: Mapping[str, Any]
    shape: ModelShape
    architecture: Architecture | None = None
    transformers_config: Any = None
    fallback: str | None = None
    quantisation: Quantisation | None = None

    @property
    def backend(self) -> str:
        return "transformers" if self.architecture is None else "native"

    @property
    def default_eos(self) -> int | list[int] | None:
        """The end-of-sequence ids of a model whose files name none: its family's."""
        if self.architecture is not None:
            return self.architecture.default_eos
        found: int | list[int] | None = self.transformers_config.eos_token_id
        return found


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model whose folder, config and tokenizer have been read and checked, but not its weights."""

    source: ModelSource
    folder: Path
    config: ModelConfig
    generation: GenerationConfig
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> ModelShape:
        return self.config.shape

    @property
    def context_limit(self) -> int:
        """The longest context in tokens: the user's limit, or the model's own."""
        return self.source.context or self.shape.context_limit

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an output."""
        return eos_ids(self.config.raw, self.generation, self.config.default_eos, self.tokenizer.eos_id)

    def quantisation_on(self, device: torch.device) -> Quantisation | None:
        """Returns how the weights are kept on a device; see `quantisers.quantisation_on`. None: as ordinary numbers."""
        return _quantisation_on(device, self.config, self.source)

    def choose_dtype(self, name: str, device: torch.device) -> DtypeChoice:
        """Returns the dtype named `name` to run the model in; see `dtype_choice.choose_dtype`.

        Quantised weights stay as they are stored: the dtype is that of the other weights and of the computation. Raises
        SpecgenError for an unknown name, and if the weights are quantised in a format that cannot be run on the device.
        """
        config, quantisation = self.config, self.quantisation_on(device)
        if quantisation is None:
            return choose_dtype(name, self.shape, self.folder, device, config.architecture)
        if quantisation.dequantises:
            from specgen.engine.transformers.structure import count_parameters

            parameters = count_parameters(config.transformers_config, self.source.trust_remote_code)
            return choose_dtype(name, self.shape, self.folder, device, narrow_bytes=parameters and 2 * parameters)
        if name == "auto":
            return DtypeChoice(
                DTYPES.get(str(self.shape.dtype), torch.float32), "the dtype of its weights that are not quantised"
            )
        return choose_dtype(name, self.shape, self.folder, device)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, ready to decode with.

    `eos_ids` are the token ids that end an output. `context_limit` is the longest context in tokens: the user's limit, or the
    model's own. `has_penalties`: the model's generation config changes logits depending on earlier tokens (repetition penalty,
    suppressed tokens). `folder` has its files.
    `exact` and `quantise`: see `ModelSource`. `backend` runs the forward pass: `native` or `transformers`. `translation` is
    between the tokens of the target and of this draft model; None if they are the same. `refusal` says why there is none where
    one is needed. `layer_devices` has the device of each layer if they are on several; None: all are on `device`.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    context_limit: int
    generation: GenerationConfig
    has_penalties: bool
    folder: Path
    exact: bool = False
    backend: str = "native"
    quantise: str | None = None
    translation: Translation | None = None
    refusal: SpecgenError | None = None
    layer_devices: Sequence[torch.device] | None = None

    def runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner:
        runner = ModelRunner(self.model, penalties)
        runner.context_limit = self.context_limit
        return runner

    def draft_runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner | TranslatedRunner:
        """Returns a runner that answers in the target's token ids. `penalties` are the target's."""
        if self.translation is None:
            return self.runner(penalties)
        return TranslatedRunner(self.runner(), self.translation, penalties)

    def penalties(self, device: torch.device, vocab_size: int) -> PenaltyProcessor | None:
        """Returns a processor that applies this model's penalties to logits [n, `vocab_size`]; None if it has no penalties."""
        if not self.has_penalties:
            return None
        return PenaltyProcessor(self.generation, self.eos_ids, vocab_size, device)

    @inference
    def reference_logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the float32 logits [vocabulary] after the prompt and `token_ids`, with the model's penalties applied.

        Computed by one forward pass without a KV cache, as a reference for the logits of cached passes.
        """
        context = Context(prompt_ids)
        context.extend(token_ids)
        logits = self.model.reference_logits(context.ids)[-1:]
        penalties = self.penalties(self.device, logits.shape[-1])
        return (logits if penalties is None else penalties(logits, context, [], [], 0))[0].float()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def devices(self) -> list[torch.device]:
        return list(dict.fromkeys(self.layer_devices or [self.device]))

    @property
    def device_label(self) -> str:
        """The device as text, for keys of measurements; with several devices, how many layers each has."""
        counts = Counter(map(device_name, self.layer_devices or ()))
        return ", ".join(f"{count} layers on {name}" for name, count in counts.items()) or device_name(self.device)

    @property
    def dtype_name(self) -> str:
        return self.quantise or str(self.model.dtype).removeprefix("torch.")

    def max_tokens(self, prompt_length: int) -> int:
        """Returns the maximum of tokens in prompt and output together, for a prompt of `prompt_length` tokens.

        A LongRoPE model uses other rotary frequencies for contexts longer than a boundary. Keys cached with both frequencies
        would give wrong logits. So a prompt within the boundary gets output only up to the boundary, plus one token: the last
        token of an output is never run through the model.
        """
        limit, rope_boundary = self.context_limit, self.model.shape.rope_boundary
        return min(rope_boundary + 1, limit) if rope_boundary is not None and prompt_length <= rope_boundary else limit


def prepare(source: ModelSource, announce: Callable[[str], None]) -> PreparedModel:
    """Finds or downloads a model's files, and reads its config and tokenizer. `announce` is called with one line per step.

    Raises SpecgenError if the model does not exist, is no decoder-only model, keeps a recurrent state that cannot be rolled back
    after a rejected draft, or cannot run on the backend that the source names.
    """
    announce(f"looking for {source.name}")
    folder = model_folder(source.location, source.revision, source.offline, source.trust_remote_code, announce)
    config = describe(folder, source)
    _check_context(source, config.shape.context_limit)
    generation = read_generation_config(folder, config.raw)
    tokenizer = load_tokenizer(folder, config.raw, source.trust_remote_code, source.name)
    return PreparedModel(source, folder, config, generation, tokenizer)


def _check_context(source: ModelSource, own_limit: int) -> None:
    """Raises SpecgenError if the user's context limit leaves no room for a prompt and a new token, or exceeds the model's own."""
    if source.context is None:
        return
    if source.context < 2:
        raise SpecgenError(f"--context is {source.context}", "It has to be at least 2: a token of prompt, and a new one")
    if source.context > own_limit:
        raise SpecgenError(
            f"--context is {source.context:,}, and {source.name} was made for {own_limit:,} tokens",
            f"Take at most {own_limit}, or leave it out",
        )


def describe(folder: Path, source: ModelSource) -> ModelConfig:
    """Reads the config of the model in `folder` and chooses the backend. Raises SpecgenError as `prepare` does."""
    raw = read_config(folder, source.name)
    quantisation = read_quantisation(raw, source.name)
    fallback = "chosen by --backend transformers"
    if source.backend != "transformers":
        try:
            if quantisation is not None:
                fallback = f"its weights are quantised with {quantisation.format.title}"
                if source.backend == "native":
                    raise SpecgenError(
                        f"the native backend does not run {source.name}: {fallback}", "Take --backend auto or transformers"
                    )
            elif source.backend == "auto" and (source.trust_remote_code or source.on_mps):
                fallback = "on Apple GPUs" if source.on_mps else "--trust-remote-code allows code of the model itself"
            else:
                architecture = read_architecture(raw)
                return ModelConfig(raw, of_architecture(architecture), architecture)
        except UnsupportedConfig as error:
            fallback = str(error)
            if source.backend == "native":
                raise SpecgenError(f"{source.name}: {error}", "Take --backend auto or transformers") from error
    if source.exact:
        raise SpecgenError(
            f"--exact needs the native backend, and {source.name} runs on transformers: {fallback}", "Leave it out"
        )
    from specgen.engine.transformers.loading import read_transformers_config

    config = read_transformers_config(folder, source.name, source.trust_remote_code)
    return ModelConfig(raw, of_transformers(config), None, config, fallback, quantisation)


def _quantisation_on(device: torch.device, config: ModelConfig, source: ModelSource) -> Quantisation | None:
    if config.quantisation is None:
        return None
    from specgen.engine.transformers.quantisers import quantisation_on

    return quantisation_on(device, config.quantisation, source.name, trust_remote_code=source.trust_remote_code)


WeightLoader = Callable[[Path, ModelSource, ModelConfig, torch.dtype, torch.device], Model]
"""Loads the weights in a folder; `load_weights` is one."""


def load_model(
    prepared: PreparedModel,
    device: torch.device,
    dtype: torch.dtype,
    announce: Callable[[str], None],
    load: WeightLoader | None = None,
    layer_devices: Sequence[torch.device] | None = None,
) -> LoadedModel:
    """Loads a prepared model's weights onto `device`, by `load`, or on several; see `LoadedModel` for `layer_devices`.

    Raises SpecgenError for weights that are damaged, no safetensors or unfit for rollbacks, and RunError if memory is short.
    """
    name = prepared.name
    announce(f"loading {name}" + (f" on {len(set(layer_devices))} devices, without CUDA graphs" if layer_devices else ""))
    load = load or partial(load_weights, layer_devices=layer_devices)
    model = load(prepared.folder, prepared.source, prepared.config, dtype, device)
    ends, generation, source = prepared.eos_ids, prepared.generation, prepared.source
    given = prepared.context_limit, generation, has_penalties(generation, ends, name), prepared.folder
    own = prepared.tokenizer, ends, *given, source.exact, prepared.config.backend, source.quantise
    return LoadedModel(name, model, *own, layer_devices=layer_devices)


def load_weights(
    folder: Path,
    source: ModelSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    layer_devices: Sequence[torch.device] | None = None,
) -> Model:
    """Loads the weights in `folder` with the backend that `config` names. Raises SpecgenError and RunError as `load_model`."""
    check_weight_files(folder, source.name)
    try:
        if config.architecture is not None:
            options: dict[str, Any] = {"exact": source.exact, "quantise": source.quantise, "layer_devices": layer_devices}
            native = load_native(folder, source.name, config.architecture, dtype, device, **options)
            if device.type == "cuda" and layer_devices is None:  # a graph is of one device
                use_cuda_graphs(native)
            return native
        from specgen.engine.transformers.loading import load_transformers_model

        kept = _quantisation_on(device, config, source)
        return load_transformers_model(folder, source.name, source.trust_remote_code, dtype, device, kept, layer_devices)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = ", ".join(map(str, dict.fromkeys(layer_devices or [device])))
        raise RunError(
            f"{source.name} does not fit into the memory of {where}", "Try --dtype bfloat16 or a smaller model"
        ) from error


def check_weight_files(folder: Path, name: str) -> None:
    """Raises SpecgenError if there are no safetensors weights in `folder`, or some that are no files, such as a FIFO without an
    end; `name` is the model's, for the message."""
    found = sorted(folder.glob("*.safetensors"))
    for path in found:
        if not path.is_file():
            raise SpecgenError(f"cannot read the weights of {name}: {path.name} is not a file", "Download or save it again")
    if found:
        return
    if any(folder.glob("*.safetensors.index.json")):
        raise SpecgenError(f"{name} has an index of weight files, but none of the files", "Download or save it again")
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    hint = "Other formats can run code when read: convert it to safetensors first" if others else "Download or save it again"
    if others and others[0].endswith(".gguf"):
        hint = GGUF_HINT
    raise SpecgenError(f"{name} has no safetensors weights" + (f" (only {others[0]})" if others else ""), hint)


def translation_between(target: PreparedModel, draft: PreparedModel) -> Translation | None:
    """Returns the translation between the two models' tokens; None if they have the same tokenizer.

    Raises NoTokenBytes if a tokenizer's tokens do not stand for bytes, or if the two have no token in common.
    """
    if same_tokens(target.tokenizer, draft.tokenizer):
        return None
    for model in (target, draft):
        try:
            token_bytes(model.tokenizer)
        except NoTokenBytes as error:
            raise _untranslatable(f"{model.name}: {error.message}") from error
    found = Translation(target.tokenizer, draft.tokenizer, target.eos_ids, draft.eos_ids, target.shape.vocab_size)
    if not any(piece in found.draft.ids for piece in found.target.ids):
        raise _untranslatable(f"{target.name} and {draft.name} have none in common")
    return found


_INSTEAD = (
    "Only drafts by their text work with such tokenizers (-m sd --set translation=text; in compare -m sd:translation=text), "
    "and methods without a draft model: -m lookup"
)


def _untranslatable(reason: str) -> NoTokenBytes:
    message = f"the tokenizers differ, and their tokens cannot be translated: {reason}"
    return NoTokenBytes(message, _INSTEAD)
