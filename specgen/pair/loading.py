"""Loads a target and, if there is one, its draft model, for `specgen.load`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import torch

from specgen import demo
from specgen.base import machine
from specgen.base.errors import RunError, SpecgenError
from specgen.base.files import EXIT_WEIGHTS
from specgen.base.model_options import Finding, ModelOptions
from specgen.base.part_kinds import HEADS
from specgen.base.text import one_line
from specgen.engine.devices import pick_device, pick_draft_device
from specgen.engine.draft_model import DraftModel
from specgen.engine.hub import head_folder
from specgen.engine.kernels import library
from specgen.engine.kernels.operators import kernels_for
from specgen.engine.loaded_model import load_model, translation_between
from specgen.engine.model_files import (
    ModelSource,
    check_exact_passes,
    describe,
    find_model,
    folder_of,
)
from specgen.engine.native.config_reading import read_config
from specgen.engine.precision import check_room, choose_draft_precision, choose_precisions
from specgen.engine.spread.placement import place
from specgen.engine.text.token_bytes import NoTokenBytes
from specgen.methods.base import DRAFT_MODEL
from specgen.models.loaded_models import LoadedModels, worker_of
from specgen.pair import trial
from specgen.pair.finding import LEAST_GAIN, Found, search
from specgen.pair.pair import Pair
from specgen.pair.profile_place import FILE, ProfileSource, profile_key_of, with_rounded_draft
from specgen.workers.process import DraftProcess, is_possible
from specgen.workers.worker import DraftWorker

if TYPE_CHECKING:
    from specgen.pair.profile import Profile

MOST_TRIED = 3  # models, of those that were found


def load(
    target: str | None = None,
    draft: str | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    draft_device: str | None = None,
    draft_dtype: str | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool = False,
    backend: str = "auto",
    exact: bool = False,
    context: int | None = None,
    repetition_penalty: float | None = None,
    announce: Callable[[str], None] = lambda _: None,
    process: DraftProcess | None = None,
    exit_layer: str | Path | None = None,
    head: str | Path | None = None,
    find: bool | Finding = False,
    profile: str | Path | None = None,
) -> Pair:
    """Loads a target and an optional draft model. Each is named by its Hugging Face id or its
    folder.

    If `target` is None, the small models that come with specgen are loaded. `device` `auto-map`
    spreads a target over all GPUs and the CPU, as far as needed. `draft_device` None means the
    target's device, or a second GPU if `device` is `auto` and there is one, or what fits best with
    `auto-map`. `announce` is called with a short description of each step. `process` is a process
    started earlier to run the draft model during the target's passes; None starts one when a method
    first needs it. `exit_layer` is the file or folder of an exit layer; None takes the one trained
    for this target on this machine, or the bundled target's. `head` is the folder or Hugging Face
    id of a trained head of any kind (for the method `medusa`, `eagle`, `mtp`, `glide` or `block`);
    methods that need another kind of head take the one trained for this target on this machine.
    `backend` says whose forward pass runs: `native`, `transformers`, or `auto` for the first of the
    two that supports the model. With `exact`, a token's logits have the same bits in all passes of
    the target, on a CPU or one CUDA device; without our own kernels, trees of drafts do not have
    this promise. `context` is the most tokens of prompt and output together, at most the target's
    own limit; None: that limit. `repetition_penalty` divides the positive logits of tokens that are
    in the context, and multiplies the negative ones; None: the generation config's. `dtype` is for
    both models, unless `draft_dtype` names the draft model's; `int8` and `int4` for the draft model
    round its weights, which changes what it drafts, but not the output's distribution. The draft
    model's weights are loaded when first needed.

    With `find`, heads and a smaller model on this machine are looked for that can draft for the
    target; they are used where none is named. Such a model's weights are loaded at once: one that
    cannot be loaded is left out, and so is one of which the target accepts too little in a short
    trial, which is made once. `find` can also be `untried` (no trial is made), `unloaded` (nor are
    the weights loaded: another process may load them) or `heads` (no model is looked for).

    Calls of `generate` and `rounds` without a method take the tuned profile in the folder
    `profile`; None: the one that `specgen tune` saved for this pair, if it fits; `none`: no
    profile. A named one's draft dtype and exit layer are taken too.

    Under torchrun, the target is split over the processes. This function returns only in the first
    one; in the others it computes their share of each pass, and ends the process when the first one
    ends. Raises SpecgenError for options that do not fit together and for a model that is not
    found, is damaged or cannot be run as asked, and RunError if memory is short.
    """
    options = ModelOptions(
        None if target is None else str(target),
        None if draft is None else str(draft),
        device,
        draft_device,
        dtype,
        draft_dtype,
        None if revision is None else str(revision),
        None if draft_revision is None else str(draft_revision),
        trust_remote_code,
        offline,
        None if exit_layer is None else Path(exit_layer),
        None if head is None else Path(head),
        backend,
        context,
        exact=exact,
        repetition_penalty=repetition_penalty,
        profile=None if profile is None else Path(profile),
        find=find,
    )
    return load_pair(options, announce, process)


def load_pair(
    options: ModelOptions, announce: Callable[[str], None], process: DraftProcess | None = None
) -> Pair:
    """Loads what `options` name. Returns and raises as `load`; where it raises, it ends the
    `process`."""
    try:
        head = assistant_folder(options, announce)
        sources = model_sources(options)
        if head is not None:
            sources = sources[:1]
        pair = _load(options, sources, announce, process)
        pair.parts.is_bundled = options.target is None
        if options.exit_layer is not None:
            pair.parts.name(options.exit_layer, is_exit=True)
        if head is None and options.head is not None:
            head = head_folder(options.head, options.offline, announce)
        if head is not None:
            pair.parts.name(head, is_exit=(head / EXIT_WEIGHTS).is_file())
        if options.uses_profile:
            pair = _with_profile(pair, options, process)
    except BaseException:
        if process is not None:
            process.close()
        raise
    return pair


def _with_profile(pair: Pair, options: ModelOptions, process: DraftProcess | None) -> Pair:
    """Returns the pair with the place of its tuned profile: the folder that the user named, or the
    one where `specgen tune` saves it.

    The draft's weights are rounded as in the tuning of a named profile, unless the user named their
    dtype. Raises SpecgenError if a named profile cannot be read, or was made for other models or
    another machine.
    """
    folder = options.profile
    if folder is not None:
        from specgen.pair import profile as profiles  # imports pydantic

        profile = profiles.load(folder)
        key = profile_key_of(pair)
        if options.draft_dtype is None:
            key = with_rounded_draft(key, profile.draft_dtype)
        why = profile.mismatch(key)
        if why is not None:
            raise SpecgenError(f"the profile {folder / FILE} is stale: {why}", profiles.TUNE_AGAIN)
        pair = as_tuned(pair, profile, process)
    pair.profile_from = ProfileSource(folder)
    return pair


def assistant_folder(options: ModelOptions, announce: Callable[[str], None]) -> Path | None:
    """Returns the folder of a draft model that is an assistant of Gemma 4, and so a head for its
    target; None: it is none, or none is named. Raises SpecgenError if the draft model is not found
    or its config cannot be read."""
    if options.draft is None:
        return None
    _, draft = model_sources(options)
    folder = folder_of(draft, announce)
    is_assistant = read_config(folder, draft.name).get("model_type") == "gemma4_assistant"
    return folder if is_assistant else None


def model_sources(options: ModelOptions) -> list[ModelSource]:
    """Returns what describes where to load the target from, then the same for the draft model if
    there is one. Nothing is looked up yet, and nothing raised."""
    backend = options.backend
    if options.target is None:
        target, draft = (
            ModelSource(f"demo/{role}", backend=backend, is_bundled=True) for role in demo.ROLES
        )
    else:
        common = options.trust_remote_code, options.offline, backend
        target = ModelSource(options.target, options.revision, *common)
        draft = None
        if options.draft is not None:
            draft = ModelSource(options.draft, options.draft_revision, *common)
    target = replace(
        target,
        exact=options.exact,
        context=options.context,
        repetition_penalty=options.repetition_penalty,
    )
    return [target] if draft is None else [target, draft]


def _load(
    options: ModelOptions,
    sources: Sequence[ModelSource],
    announce: Callable[[str], None],
    process: DraftProcess | None,
) -> Pair:
    """Loads the models, with a search also a draft model that is found on this machine."""
    devices = _devices(options)
    on_device = zip(sources, devices, strict=False)
    models = [
        find_model(source, announce, on_mps=device.type == "mps") for source, device in on_device
    ]
    target, *drafts = models
    library.prepare(announce)
    precisions = choose_precisions(models, devices, options)
    placement = place(models, precisions, options)
    layer_devices = None
    if placement is None:
        for model, device, precision in zip(models, devices, precisions, strict=False):
            check_room(model, device, precision)
    else:
        layer_devices = placement.layer_devices
        if options.exact and layer_devices is not None:
            raise _not_exact(f"{target.name} needs several devices")
        if precisions[0].rounding is not None and layer_devices is not None:
            raise SpecgenError(
                "--dtype int8 is for targets on the CPU alone", "Take --device cpu, or leave it out"
            )
        devices = placement.device, placement.draft_device or devices[1]
        precisions = choose_precisions(models, devices, options)

    is_alone = machine.launch() is None
    has_kernels = is_alone and kernels_for(devices[0], precisions[0].dtype) is not None
    check_exact_passes(target, has_kernels=has_kernels)

    draft = None
    if drafts:
        translation = None
        refusal = None
        try:
            translation = translation_between(target, drafts[0])
        except NoTokenBytes as error:
            refusal = error
        draft = DraftModel(drafts[0], precisions[1], devices[1], translation, refusal)
    drafts_apart = False
    worker = None
    if not options.find:
        drafts_apart = runs_apart(draft, devices[0])
        worker = _early_worker(process, draft, drafts_apart=drafts_apart)

    is_sharded = machine.launch() is not None
    if is_sharded and placement is not None:
        raise SpecgenError(
            "--device auto-map is for one process, and torchrun started several",
            "Leave one of the two out",
        )
    loaded = load_model(
        target, precisions[0], layer_devices or [devices[0]], announce, is_sharded=is_sharded
    )
    pair = Pair(LoadedModels(loaded, draft, worker, drafts_apart=drafts_apart))
    if not options.find:
        return pair
    announce(f"looking for what can draft for {target.name}")
    pair.searched = search(target, devices, options)
    heads = [head for head in pair.found if head.kind in HEADS]
    pair.parts.beside = {head.kind: head.folder for head in reversed(heads)}
    return _with_model(pair, options, devices[1], process, announce)


def _with_model(
    pair: Pair,
    options: ModelOptions,
    device: torch.device,
    process: DraftProcess | None,
    announce: Callable[[str], None],
) -> Pair:
    """Returns the pair with the first model that was found for the target, is expected to gain, and
    can be used.

    Without a draft model where there is none. `device` and `process` are as in `with_found`. What
    is learned about the models is remembered.
    """
    find = options.find
    models = [
        model for model in pair.found if model.kind == DRAFT_MODEL and model.speedup >= LEAST_GAIN
    ]
    for found in [] if find == "heads" else models[:MOST_TRIED]:
        learned = found
        try:
            other = with_found(pair, found, options, device, process)
            if find != "unloaded":
                announce(f"loading {found.name}")
                other.models.with_draft_model()
            if find is True and found.is_assumed:
                announce(f"trying {found.name}")
                learned = trial.tried(other, found)
        except Exception as error:  # noqa: BLE001  the files are a stranger's, and libraries raise anything for them
            may_pass = isinstance(error, RunError) or not isinstance(error, SpecgenError)
            learned = replace(found, refusal=_reason(error), may_pass=may_pass)

        if learned != found:
            pair.learn(learned)
        if learned.refusal is None and not (find is True and learned.speedup < LEAST_GAIN):
            other.searched = pair.searched
            return other
        if process is not None:  # it may be loading this model
            process.close()
            process = None
    if process is not None:
        process.close()
    return pair


def _reason(error: Exception) -> str:
    """Returns why a model that was found does not work, in one line."""
    if isinstance(error, SpecgenError):
        return error.message
    return (
        shorten(one_line(" ".join(str(error).split())), 160, placeholder=" …")
        or type(error).__name__
    )


def _devices(options: ModelOptions) -> tuple[torch.device, torch.device]:
    """Returns the devices of the target and of the draft model. Raises SpecgenError if `exact`
    cannot be kept on the target's.

    Under torchrun, it returns only in the first process; see `load`.
    """
    launched = machine.launch()
    device = options.device
    if launched is not None:
        from specgen.engine.spread import ranks

        ranks.follow_unless_first()
        device = ranks.device_of_rank(launched, device)
    target_device = pick_device(device)
    if options.exact and target_device.type not in ("cpu", "cuda"):
        raise _not_exact(f"the target would run on {target_device}")
    if options.exact and target_device.type == "cuda" and launched is not None:
        raise _not_exact("torchrun splits the target over several")
    return target_device, pick_draft_device(options.draft_device, device, target_device)


def _not_exact(why: str) -> SpecgenError:
    return SpecgenError(
        f"--exact is for the CPU and for one CUDA device, and {why}",
        "Add --device cpu, or leave it out",
    )


def with_draft_dtype(pair: Pair, name: str, process: DraftProcess | None = None) -> Pair:
    """Returns another pair of the same target and trained parts. The draft model's weights are
    rounded to `name`, such as `int8`.

    `process` is a process started earlier to run this draft model during the target's passes; None
    starts one when a method first needs it. The two pairs can be used in turn. Raises SpecgenError
    if the draft model cannot be rounded so.
    """
    draft = pair.draft
    assert draft is not None
    precision = choose_draft_precision(name, "auto", draft.files, draft.device)
    if precision.warning is not None:
        raise SpecgenError(precision.warning, "Leave out --draft-dtype")
    rounded = DraftModel(draft.files, precision, draft.device, draft.translation, draft.refusal)
    return _with_draft(pair, rounded, process)


def as_tuned(pair: Pair, profile: Profile, process: DraftProcess | None = None) -> Pair:
    """Returns the pair as the profile was made with it: its draft's weights are rounded so, and the
    costs of its rounds known.

    Texts with a seed depend on these costs, so this is to be done before the first one. `process`
    and errors as for `with_draft_dtype`.
    """
    dtype = profile.draft_dtype
    if dtype is not None and pair.draft is not None and pair.draft.dtype_name != dtype:
        pair = with_draft_dtype(pair, dtype, process)
    pair.measurements.tuned_costs = profile.measured.costs
    return pair


def with_found(
    pair: Pair,
    found: Found,
    options: ModelOptions,
    device: torch.device | None = None,
    process: DraftProcess | None = None,
) -> Pair:
    """Returns another pair of the same target and trained parts, with a draft model that was found
    for the target.

    `options` name the dtypes. `device` None: that of the pair's draft model, else the target's.
    `process` is as for `with_draft_dtype`. Raises SpecgenError if the model cannot be run so,
    RunError if memory is short.
    """
    files = describe(
        found.folder, ModelSource(found.name, backend=pair.target.files.source.backend)
    )
    if device is None:
        device = pair.target.device if pair.draft is None else pair.draft.device
    _ = files.eos_ids  # mistakes in the tokenizer and the generation config are reported now
    precision = choose_draft_precision(options.draft_dtype, options.dtype, files, device)
    check_room(files, device, precision)
    return _with_draft(pair, DraftModel(files, precision, device), process)


def _with_draft(pair: Pair, draft: DraftModel, process: DraftProcess | None) -> Pair:
    drafts_apart = runs_apart(draft, pair.target.device)
    models = LoadedModels(
        pair.target,
        draft,
        _early_worker(process, draft, drafts_apart=drafts_apart),
        drafts_apart=drafts_apart,
        parts=pair.parts,
        lock=pair.lock,
    )
    other = Pair(models)
    other.searched = pair.searched
    other.profile_from = pair.profile_from
    other.measurements.threads = pair.measurements.threads
    return other


def runs_apart(draft: DraftModel | None, target: torch.device) -> bool:
    """Whether a process of its own can run the draft model during the target's passes.

    False if there is no draft model for it, if processes cannot be started, and if both models are
    on the same accelerator: there, kernels of two processes take turns, while kernels of two CUDA
    streams of one process run concurrently.
    """
    if draft is None or draft.refusal is not None or not is_possible():
        return False
    return target.type == "cpu" or target != draft.device


def _early_worker(
    process: DraftProcess | None, draft: DraftModel | None, *, drafts_apart: bool
) -> DraftWorker | None:
    """Has a process that was started early load the draft model, or ends it if none is to run it.
    None: there is no such process."""
    if process is None:
        return None
    if draft is None or not drafts_apart:
        process.close()
        return None
    return worker_of(draft, process)
