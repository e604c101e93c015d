"""Loads what a training run needs: the models, the corpus, the prompts; and sets defaults for options that are not given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specgen.base.errors import SpecgenError
from specgen.cli.model_options import ModelOptions
from specgen.cli.train_request import DEFAULT_MINUTES, DRAFT, PREDICTOR, TrainRequest
from specgen.compare.prompts import Prompt

if TYPE_CHECKING:
    import torch

    from specgen.engine.model_loading import LoadedModel
    from specgen.train.corpus import Corpus
    from specgen.train.training_task import TrainingTask

_DEMO_CORPUS = Path("demo")  # a file of that name has to be given as ./demo or by its absolute path
_DEMO_TOKENS = 600_000


class LoadedModels(NamedTuple):
    """The models of a training run. `draft` is None unless a draft is trained; its weights are to be saved in `draft_dtype`."""

    target: LoadedModel
    draft: LoadedModel | None
    draft_dtype: torch.dtype


def load_models(models: ModelOptions, request: TrainRequest, announce: Callable[[str], None]) -> LoadedModels:
    """Loads the models. A draft is loaded in float32, by transformers, which trains and saves it, whichever backend runs the
    target."""
    import torch

    from specgen.engine.devices import DTYPES, pick_device, pick_draft_device
    from specgen.engine.dtype_choice import choose_dtype
    from specgen.engine.model_loading import load_model, translation_between
    from specgen.engine.spread.placement import place
    from specgen.engine.text.token_bytes import NoTokenBytes
    from specgen.pair.loading import model_sources, prepare_models

    needs_draft = request.part is DRAFT
    if needs_draft and not models.has_draft:
        raise SpecgenError("there is no draft model to train", "Name one: --draft MODEL")
    named = models.target, models.draft, models.revision, models.draft_revision, models.trust_remote_code, models.offline
    target_source, *draft_sources = model_sources(*named, models.backend)
    sources = [target_source, *(replace(source, backend="transformers") for source in draft_sources if needs_draft)]
    device = pick_device(models.device)
    prepared, *drafts = prepare_models(sources, announce)
    if drafts and (quantised := drafts[0].quantisation) is not None:
        raise SpecgenError(
            f"the draft {drafts[0].name} cannot be trained: its weights are quantised with {quantised.get('quant_method')}",
            "Train the checkpoint that it was made from; drafts are quantised after training",
        )
    try:
        translations = [translation_between(prepared, draft) for draft in drafts]
    except NoTokenBytes as error:
        raise SpecgenError(
            error.message, "Take a draft of the target's family, or one whose tokens are pieces of text"
        ) from error
    chosen = choose_dtype(models.dtype, prepared, device)
    dtype, placement = chosen.dtype, place(models.device, [prepared], [chosen], None)
    if placement is None:
        target = load_model(prepared, device, dtype, announce)
    else:
        target = load_model(prepared, placement.device, dtype, announce, layer_devices=placement.layer_devices)
    if not drafts:
        return LoadedModels(target, None, torch.float32)
    draft = load_model(drafts[0], pick_draft_device(models.draft_device, models.device, device), torch.float32, announce)
    stored = drafts[0].shape.dtype
    draft.translation = translations[0]
    return LoadedModels(target, draft, DTYPES.get(str(stored), torch.float32))


def training_task(models: ModelOptions, request: TrainRequest, loaded: LoadedModels, prompts: Sequence[Prompt]) -> TrainingTask:
    """Returns the training task: reads the corpus, and sets defaults for options that are not given.

    `prompts` are those of `--prompts`.
    """
    from specgen.engine.parts.head_files import check_head_folder
    from specgen.train.training_task import Recipe, TrainingTask

    part, (target, draft, _) = request.part, loaded
    share = part.self_text if request.self_text is None else request.self_text
    limit = min(model.context_limit for model in (target, draft or target))
    on_cuda = target.device.type == "cuda"  # elsewhere a step with the paper's batch size would take minutes
    training_length = min(request.training_length or (2048 if on_cuda else 256), limit)
    corpus = _corpus(models, request, target)
    ids = _prompts(request, prompts, target, training_length)
    recipe = Recipe(
        steps=request.steps,
        seconds=_seconds(request),
        learning_rate=request.learning_rate or part.learning_rate,
        batch_size=request.batch or (64 if on_cuda else 16),
        training_length=training_length,
        generated_share=1.0 if corpus is None else share,
        seed=request.seed,
    )
    out = _output_folder(request, target, draft) if request.out is None else request.out
    if part.is_head:
        check_head_folder(out)
    elif draft is not None and out.resolve() in (draft.folder.resolve(), target.folder.resolve()):
        raise SpecgenError(f"--out is {out}, the folder of one of the models", "Name another one: the models are not changed")
    command = "specgen " + " ".join(sys.argv[1:]) if sys.argv[1:2] == ["tune"] else ""
    return TrainingTask(out, recipe, corpus, ids, command)


def _seconds(request: TrainRequest) -> float | None:
    """Returns the budget in seconds; None: it is a number of steps, or a predictor alone is trained, which needs no budget."""
    if request.steps is not None or (request.part is PREDICTOR and request.minutes is None):
        return None
    return 60 * (request.minutes or DEFAULT_MINUTES)


def _output_folder(request: TrainRequest, target: LoadedModel, draft: LoadedModel | None) -> Path:
    """Returns the folder for the result if the user names none."""
    from specgen.base.files import head_folder, pair_folder
    from specgen.engine.fingerprint import weights_fingerprint
    from specgen.engine.parts.exit_files import DESCRIPTION, WEIGHTS

    if request.exit_layer is not None:
        if request.exit_layer.is_dir():
            return request.exit_layer
        if request.exit_layer.name in (WEIGHTS, DESCRIPTION):
            return request.exit_layer.parent
        raise SpecgenError(f"the exit layer is {request.exit_layer}, and --out is not given", "Name a folder: --out DIR")
    fingerprint = weights_fingerprint(target.folder)
    if request.part.is_head:
        return head_folder(request.part.method, target.name, fingerprint)
    folder = pair_folder(target.name, fingerprint, None if draft is None else draft.name)
    return folder if draft is None else folder / "distilled"


def _prompts(request: TrainRequest, given: Sequence[Prompt], target: LoadedModel, training_length: int) -> list[list[int]]:
    """Returns the prompts that the target continues, as token ids: those of `--prompts`, which are `given`; none if it continues
    the corpus.

    With --chat, they are in the model's chat template and may also be in the corpus file. Longer ones than three quarters of a
    training sequence are then left out, because a template cannot be cut.
    """
    from specgen.train.corpus import chat_prompts

    if not request.chat:
        return [target.tokenizer.encode(prompt.text) for prompt in given]
    limit = 3 * training_length // 4
    prompts = [ids for prompt in given if len(ids := target.tokenizer.chat(prompt.text, None)) <= limit]
    if given and not prompts:
        raise SpecgenError(f"{request.prompts} has no prompt of at most {limit} tokens", "Give shorter ones or a larger --window")
    if request.corpus == _DEMO_CORPUS:
        raise SpecgenError("--corpus demo has no conversations for --chat", "Leave --chat out, or name a file of prompts")
    if request.corpus is not None:
        prompts += chat_prompts(request.corpus, target.tokenizer, limit)
    if not prompts:
        raise SpecgenError("there are no prompts for --chat", "Give --corpus FILE (prompts or messages) or --prompts FILE")
    return prompts


def _corpus(models: ModelOptions, request: TrainRequest, target: LoadedModel) -> Corpus | None:
    """Reads the corpus. Returns None if only prompts are given. Raises SpecgenError if there is no text."""
    from specgen.train.corpus import demo_corpus, read_corpus

    encode = target.tokenizer.encode
    if request.chat:
        return None
    if request.corpus == _DEMO_CORPUS or (request.corpus is None and models.target is None):
        return demo_corpus(encode, request.seed, _DEMO_TOKENS)
    if request.corpus is not None:
        return read_corpus(request.corpus, encode)
    if request.prompts is None or request.self_text == 0:
        hint = "Give --corpus FILE (plain text or JSON lines), or --prompts FILE and leave --self-text above 0"
        raise SpecgenError("there is no text to train on", hint)
    return None
