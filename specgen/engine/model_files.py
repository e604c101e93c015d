"""Finds a model's files, reads what they say, and chooses the backend that runs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.files import files_in
from specgen.engine.gguf.file import is_gguf
from specgen.engine.hub import GGUF_HINT, model_path
from specgen.engine.model import ModelShape
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.config_reading import read_architecture, read_config, text_config
from specgen.engine.penalties import GenerationConfig, eos_ids, read_generation_config
from specgen.engine.text.tokenizer import Tokenizer, load_tokenizer
from specgen.engine.weights import HARMLESS, stored_tensors

_EXPERT_FIELDS = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "top_k_experts"),
)
_EXPERT = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What the user named of a model: its `name`, a Hugging Face id, a folder or a GGUF file, and
    options. `is_bundled`: it comes with specgen, and is called `demo/target` or `demo/draft`.

    `revision` is a branch, tag or commit on the hub; None means the main branch. `offline` forbids
    downloads. `backend` says whose forward pass runs: `native`, `transformers`, or `auto` for
    whichever supports the model. `exact`: a token's logits are computed in the same order of
    operations in every pass, however many tokens it covers, so that equal contexts give equal bits
    (without our own kernels, only in drafts without branches).
    `context` is the most tokens of prompt and output together, at least 2; None: as many as the
    model was made for. `repetition_penalty` replaces the generation config's; None: that one
    applies.
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False
    backend: str = "auto"
    exact: bool = False
    context: int | None = None
    repetition_penalty: float | None = None
    is_bundled: bool = False


@dataclass(frozen=True)
class ModelFiles:
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
        """How many elements of the weights the pass of one token reads: of experts, those of the
        chosen ones."""
        count, chosen = self.experts or (1, 1)
        each = ((name, size) for name, size in self.parameters.items())
        return sum(size * chosen // count if _EXPERT.search(name) else size for name, size in each)

    def rounding_refusal(self, device: torch.device) -> str | None:
        """Returns why the weights cannot be rounded to int8 or int4 when they are loaded onto
        `device`; None if they can."""
        if self.architecture is None:
            return f"{self.name} runs on transformers: {self.fallback}"
        if self.architecture.mixture is not None and device.type != "cpu":
            return f"{self.name} is a mixture of experts, which is rounded on a CPU alone"
        return None

    @cached_property
    def generation(self) -> GenerationConfig:
        generation = read_generation_config(self.folder, self.raw)
        penalty = self.source.repetition_penalty
        return generation if penalty is None else replace(generation, repetition_penalty=penalty)

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
    def stored_tensors(self) -> Mapping[str, tuple[list[int], str]]:
        """The shape and the stored type of each tensor; see `weights.stored_tensors`."""
        return stored_tensors(self.folder)

    @cached_property
    def parameters(self) -> Mapping[str, int]:
        """How many elements each weight has, by its name, as the headers of the files say. Raises
        SpecgenError for damaged files.

        Quantised weights are packed in the files; their elements are those of the model that
        transformers would build.
        """
        if self.quantisation is not None:
            from specgen.engine.transformers.transformers_model import model_without_weights

            module = model_without_weights(self.transformers_config, self.source.trust_remote_code)
            if module is not None:
                return {name: weight.numel() for name, weight in module.named_parameters()}
        # of which the native decoder loads only those of the text part
        stored = self.stored_tensors
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


def find_model(
    source: ModelSource, announce: Callable[[str], None], *, on_mps: bool = False
) -> ModelFiles:
    """Finds or downloads a model's files, and reads its config and tokenizer. `announce` is called
    with one line per step, `on_mps` is as for `describe`.

    Raises SpecgenError if the model does not exist, is no decoder-only model, cannot run on the
    backend that the source names, or was made for fewer tokens than the source's `context`.
    """
    announce(f"looking for {source.name}")
    folder = folder_of(source, announce)
    files = describe(folder, source, on_mps=on_mps)
    limit = files.shape.context_limit
    if source.context is not None and not 2 <= source.context <= limit:
        problem = (
            f"--context is {source.context:,}, and {source.name} was made for {limit:,} tokens"
        )
        raise SpecgenError(
            problem, f"Take 2 (a token of prompt, and a new one) to {limit}, or leave it out"
        )
    _ = files.generation, files.tokenizer  # mistakes in them are reported now
    return files


def folder_of(source: ModelSource, announce: Callable[[str], None]) -> Path:
    """Returns the folder or GGUF file of a model, which is downloaded if need be. `announce` is
    called with one line per step. Raises SpecgenError as `model_path` does."""
    if source.is_bundled:
        return demo.folder(source.name.removeprefix("demo/"))
    return model_path(
        source.name, source.revision, source.offline, source.trust_remote_code, announce
    )


def describe(folder: Path, source: ModelSource, *, on_mps: bool = False) -> ModelFiles:
    """Reads the config of the model in `folder` and chooses the backend.

    `on_mps`: the model is to run on an Apple GPU, where the backend `auto` is transformers, as the
    native decoder was never run there. Raises SpecgenError for a damaged config, and for a model
    that is no decoder-only one or that the backend named by `source` cannot run.
    """
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
    elif source.backend == "auto" and (source.trust_remote_code or on_mps):
        fallback = (
            "on Apple GPUs" if on_mps else "--trust-remote-code allows code of the model itself"
        )
    elif source.backend != "transformers":
        try:
            architecture = read_architecture(raw)
            if source.exact:
                _check_exact(architecture, name)
            return ModelFiles(source, folder, raw, architecture, architecture)
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
    return ModelFiles(
        source, folder, raw, read_shape(config, name), None, config, fallback, quantisation
    )


def _check_exact(architecture: Architecture, name: str) -> None:
    """Raises SpecgenError for an architecture whose bits depend on how tokens are run, with our own
    kernels too: a state is the sum of what the tokens of several passes added to it."""
    if any(layer.mixer == "delta" for layer in architecture.layers):
        raise SpecgenError(
            f"--exact: the bits of {name}, whose layers keep states, depend on the passes",
            "Leave it out",
        )


def check_exact_passes(model: ModelFiles, *, has_kernels: bool) -> None:
    """Raises SpecgenError for a model that `--exact` needs our own kernels for, unless they run
    it: torch's products of experts and its short convolutions depend on the tokens of a pass."""
    architecture = model.architecture
    if not model.source.exact or has_kernels or architecture is None:
        return
    of = None
    if architecture.mixture is not None:
        of = "a mixture of experts"
    elif architecture.recurrent is not None:
        of = "short convolutions"
    if of is not None:
        raise SpecgenError(
            f"--exact: without kernels in C, the bits of {of}, as in {model.name}, depend on the "
            "tokens of a pass",
            "Leave it out, or run it in float32 or int8 on an x86-64 CPU with a C compiler",
        )


def _quantisation(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns the model's `quantization_config`; a model with vision or audio may have it in its
    text part.

    Raises SpecgenError for GGUF, and for settings that are no JSON object.
    """
    settings = config.get("quantization_config")
    inner = config.get("text_config")
    if settings is None and isinstance(inner, dict):
        settings = inner.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        problem = (
            f"the config.json of {name} has a quantization_config that is no JSON "
            f"object: {shorten(repr(settings), 40)}"
        )
        raise SpecgenError(problem, "Download or save it again")
    if settings is not None and settings.get("quant_method") == "gguf":
        raise SpecgenError(f"{name} has a config.json that was made from a GGUF file", GGUF_HINT)
    return settings


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
