"""A model on its device, ready to decode with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from specgen.base.errors import RunError, is_out_of_memory
from specgen.base.types import Context
from specgen.engine.devices import device_name, inference
from specgen.engine.kernels.operators import kernels_for
from specgen.engine.model import Model, ModelShape
from specgen.engine.model_files import ModelFiles, check_weight_files
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.graphs import Captures, CudaGraphs
from specgen.engine.native.native_model import load_native
from specgen.engine.penalties import GenerationConfig, PenaltyProcessor, has_penalties
from specgen.engine.precision import Precision, stored_16_bit_dtype
from specgen.engine.text.token_bytes import NoTokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer
from specgen.engine.text.translation import Translation, same_tokens


class LoadedModel:
    """A model on its device, ready to decode with. Its weights are loaded at the first use of
    `model`; `load_model` loads them at once.

    Weights may never be needed in this process: plain decoding has no draft model, and PEARL's may
    run in a process of its own. All else is known without weights.

    `devices` has the device of each layer, or the one device of all. `is_sharded`: torchrun's
    processes each hold a part of each layer.
    """

    def __init__(
        self,
        files: ModelFiles,
        precision: Precision,
        devices: Sequence[torch.device],
        *,
        is_sharded: bool = False,
    ) -> None:
        self.files = files
        self.precision = precision
        self._placed = list(devices)
        self._is_sharded = is_sharded
        self._model: Model | None = None
        self._modules: dict[torch.dtype, Any] = {}  # of transformers
        self._lock = Lock()

    @property
    def model(self) -> Model:
        """The model with its weights. Raises SpecgenError or RunError if it cannot be loaded, see
        `load_weights`."""
        with self._lock:
            if self._model is None:
                load = load_distributed if self._is_sharded else load_weights
                self._model = load(self.files, self.precision, self._placed)
            return self._model

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def shape(self) -> ModelShape:
        """The sizes, as the files say them; once the weights are loaded, as the model has them:
        where transformers runs a family that specgen knows, this is an `Architecture`."""
        return self.files.shape if self._model is None else self._model.shape

    @property
    def tokenizer(self) -> Tokenizer:
        return self.files.tokenizer

    @property
    def generation(self) -> GenerationConfig:
        return self.files.generation

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.files.eos_ids

    @property
    def context_limit(self) -> int:
        return self.files.context_limit

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computations."""
        return self.precision.dtype

    @property
    def dtype_name(self) -> str:
        """What the weights are rounded to, or else their dtype."""
        return self.precision.name

    @property
    def warning(self) -> str | None:
        """A text for the user, or None."""
        return self.precision.warning or getattr(self._model, "warning", None)

    def is_exact(self, *, in_trees: bool) -> bool:
        """Whether `--exact` was asked for, and a token's logits have the same bits in all passes;
        with `in_trees`, in those over draft trees too, which our own kernels give."""
        has_kernels = kernels_for(self.device, self.dtype) is not None
        return self.files.source.exact and (has_kernels or not in_trees)

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the generation config changes logits (repetition penalty, suppressed tokens and
        the like).

        Raises SpecgenError if it does so in a way that is not supported.
        """
        return has_penalties(self.generation, self.eos_ids, self.name)

    @property
    def stored_dtype(self) -> str | None:
        """The name of the 16-bit dtype in which the weights are stored, if they are on a CPU and
        computations are in another one; None otherwise."""
        stored = stored_16_bit_dtype(self.files)
        if stored is None or stored == self.dtype or self.device.type != "cpu":
            return None
        return str(stored).removeprefix("torch.")

    @property
    def transformers_module(self) -> Any:
        """This model as transformers' own object, with the same dtype and device. Its weights are
        loaded again if the model is native. Raises SpecgenError as `model` does."""
        return self.module_in(self.model.dtype)

    def module_in(self, dtype: torch.dtype) -> Any:
        """Returns this model as transformers' own object, in `dtype` on the same device. Raises
        SpecgenError as `model` does."""
        from specgen.engine.transformers.loading import load_module
        from specgen.engine.transformers.transformers_model import TransformersModel

        model = self.model
        if isinstance(model, TransformersModel) and dtype == model.dtype:
            return model.module
        if dtype not in self._modules:
            self._modules[dtype] = load_module(self.files, dtype, model.device)
        return self._modules[dtype]

    def runner(self, penalties: PenaltyProcessor | None = None) -> ModelRunner:
        """Returns a runner of the model in its own token ids. Raises SpecgenError as `model` and
        `has_penalties` do."""
        _ = self.has_penalties
        runner = ModelRunner(self.model, penalties)
        runner.context_limit = self.context_limit
        return runner

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
        return self._placed[-1] if self._model is None else self._model.device

    @property
    def layer_devices(self) -> list[torch.device] | None:
        """The device of each layer if they are on several, else None."""
        return self._placed if len(self._placed) > 1 else None

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
        boundary = self.files.shape.rope_boundary
        return (
            min(boundary + 1, limit)
            if boundary is not None and prompt_length <= boundary
            else limit
        )


def load_model(
    files: ModelFiles,
    precision: Precision,
    devices: Sequence[torch.device],
    announce: Callable[[str], None],
    *,
    is_sharded: bool = False,
) -> LoadedModel:
    """Loads a model's weights onto its device, or onto several; see `LoadedModel` for `devices` and
    `is_sharded`.

    Raises SpecgenError for weights that are damaged, or neither safetensors nor GGUF, or if the
    model's KV cache cannot be rolled back; RunError if memory is short.
    """
    count = len(set(devices))
    where = f" on {count} devices, without CUDA graphs" if count > 1 else ""
    announce(f"loading {files.name}{where}")
    loaded = LoadedModel(files, precision, devices, is_sharded=is_sharded)
    _ = loaded.model, loaded.has_penalties
    return loaded


def load_weights(files: ModelFiles, precision: Precision, devices: Sequence[torch.device]) -> Model:
    """Loads a model's weights with the backend that runs it, onto one device, or each layer onto
    its own of `devices`. Raises SpecgenError and RunError as `load_model`."""
    check_weight_files(files.folder, files.name)
    device = devices[-1]
    layer_devices = devices if len(devices) > 1 else None
    try:
        if files.architecture is None:
            from specgen.engine.transformers.loading import load_transformers_model

            return load_transformers_model(files, precision.dtype, device, layer_devices)
        native = load_native(
            files.folder,
            files.name,
            files.architecture,
            precision.dtype,
            device,
            exact=files.source.exact,
            quantise=precision.rounding,
            as_stored=precision.stored_type is not None,
            wide_attention=precision.wide_attention,
            layer_devices=layer_devices,
        )
        # a graph is of one device
        is_static = files.architecture.recurrent is None and layer_devices is None
        if device.type == "cuda" and is_static:
            native.captures = Captures(capture=CudaGraphs(device))
        return native
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = ", ".join(map(str, dict.fromkeys(devices)))
        raise RunError(
            f"{files.name} does not fit into the memory of {where}",
            "Try --dtype bfloat16 or a smaller model",
        ) from error


def load_distributed(
    files: ModelFiles, precision: Precision, devices: Sequence[torch.device]
) -> Model:
    """Loads a model, split over torchrun's processes; called in the first one. Raises SpecgenError
    for a model that cannot be split, and SpecgenError or RunError for one that cannot be loaded."""
    from specgen.engine.spread import shards

    return shards.load_distributed(files, precision.dtype, devices[-1])


def translation_between(target: ModelFiles, draft: ModelFiles) -> Translation | None:
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
    translation = Translation(
        target.tokenizer, draft.tokenizer, target.eos_ids, draft.eos_ids, target.shape.vocab_size
    )
    if not any(piece in translation.draft.ids for piece in translation.target.ids):
        raise _untranslatable(f"{target.name} and {draft.name} have none in common")
    return translation


def _untranslatable(reason: str) -> NoTokenBytes:
    return NoTokenBytes(
        f"the tokenizers differ, and their tokens cannot be translated: {reason}",
        "Only drafts by their text work with such tokenizers (-m sd --set "
        "translation=text; in compare -m sd:translation=text), "
        "and methods without a draft model: -m lookup",
    )
