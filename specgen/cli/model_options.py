"""The command-line options that name models and devices, and a function that loads the models."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specgen.base.errors import SpecgenError
from specgen.base.interrupts import interrupts
from specgen.base.types import check_backend, check_draft_dtype
from specgen.cli.options import model

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.pair.pair import Pair
    from specgen.workers.process import DraftProcess


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which models to load, and onto which devices.

    If `target` is None, the demo pair that comes with specgen is used. Raises SpecgenError if --draft or --revision is given
    without --target, or --draft-revision or --draft-dtype without a draft model, and for an unknown --backend or --draft-dtype.
    """

    target: Annotated[str | None, model("-t", metavar="MODEL")] = None
    draft: Annotated[str | None, model("-d", metavar="MODEL")] = None
    device: Annotated[str, model(metavar="auto|cpu|cuda|cuda:N|mps|auto-map")] = "auto"
    draft_device: Annotated[str | None, model(metavar="DEVICE")] = None
    dtype: Annotated[str, model(metavar="auto|float32|bfloat16|float16")] = "auto"
    draft_dtype: Annotated[str | None, model(metavar="auto|float32|...|int8|int4")] = None
    revision: Annotated[str | None, model(metavar="REV")] = None
    draft_revision: Annotated[str | None, model(metavar="REV")] = None
    trust_remote_code: Annotated[bool, model()] = False
    offline: Annotated[bool, model()] = False
    exit_layer: Annotated[Path | None, model(metavar="FILE")] = None
    head: Annotated[Path | None, model(metavar="FOLDER")] = None
    backend: Annotated[str, model(metavar="auto|native|transformers")] = "auto"
    context: Annotated[int | None, model(metavar="N")] = None

    def __post_init__(self) -> None:
        check_backend(self.backend)
        if self.target is None and self.draft is not None:
            raise SpecgenError(f"--draft {self.draft} is given without --target", "Name the target too: --target MODEL")
        if self.draft_revision is not None and self.draft is None:
            raise SpecgenError("--draft-revision is given without --draft", "Name the draft model too")
        if self.revision is not None and self.target is None:
            raise SpecgenError("--revision is given without --target", "Name the target too: --target MODEL")
        check_draft_dtype(self.draft_dtype, has_draft=self.has_draft)

    @property
    def has_draft(self) -> bool:
        """Whether there will be a draft model: the one of --draft, or the demo pair's if no target is named."""
        return self.draft is not None or self.target is None

    @property
    def local_fingerprint(self) -> str | None:
        """The fingerprint (a hash that identifies weights) of a target in a local folder, computed without loading it.

        None for a model on the Hugging Face hub. Also None for damaged weights, for which loading raises an error later.
        """
        from specgen import demo
        from specgen.engine.weights import weights_fingerprint

        folder = demo.folder("target") if self.target is None else Path(self.target)
        try:
            return weights_fingerprint(folder) if (folder / "config.json").is_file() else None
        except SpecgenError:
            return None

    @property
    def probably_on_cpu(self) -> bool:
        """Whether both models will probably run on the CPU: a guess that does not import torch.

        A wrong guess only costs time.
        """
        devices = {self.device, self.draft_device or self.device}
        is_without_gpu = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
        return devices <= ({"cpu", "auto"} if is_without_gpu else {"cpu"})


@dataclass(frozen=True, slots=True)
class DecodingOptions(ModelOptions):
    """Which models to load, and how they compute, for a command that decodes."""

    exact: Annotated[bool, model()] = False


def open_pair(
    models: ModelOptions,
    err: Console,
    *,
    quiet: bool,
    parallel: bool = False,
    sequential: bool = True,
    tuned_draft: Callable[[Pair, DraftProcess | None], Pair] | None = None,
) -> Pair:
    """Loads the models and runs them once to warm them up, with a progress line on the console `err`.

    `parallel` says that a method drafts while the target verifies (PEARL). On a CPU it needs a second process for the draft.
    That process is started first, so that both processes import torch at the same time. `sequential` says that another method may
    run the draft model too; its weights are loaded here if one does, and its tokens can be translated. `tuned_draft` returns
    the pair with the draft's dtype that a profile says, if --draft-dtype is not given; its other argument is the process for the
    draft.
    """
    from rich.text import Text

    from specgen.view.progress import Progress
    from specgen.workers.process import DraftProcess, is_possible

    disable_hub_progress(err, quiet=quiet)
    with Progress(err, quiet=quiet) as loading:
        process = DraftProcess() if parallel and models.probably_on_cpu and is_possible() else None
        from specgen.pair.loading import load

        interrupts.check()
        pair = load(**asdict(models), announce=loading.announce, process=process)
        if tuned_draft is not None and models.draft_dtype is None and models.has_draft:
            pair = tuned_draft(pair, process)
        pair.warm_up(loading.announce, sequential=sequential, parallel=parallel)
        interrupts.check()
    doubts = [f"{part.path}: {part.warning}" for part in pair.parts.named.values() if part.warning is not None]
    for warning in (*doubts, getattr(pair.draft, "warning", None)):
        if warning is not None and not quiet:
            err.print(Text(f"warning: {warning}"), soft_wrap=True)
    if not gc.isenabled():  # `program` switched it off; no garbage is among the objects so far, and torch's are many
        gc.freeze()
        gc.enable()
    return pair


def show_overlap(pair: Pair, err: Console, *, quiet: bool) -> None:
    """Says, before a long run, how much of the target's text a draft model with another tokenizer can draft."""
    if quiet or pair.draft is None or pair.draft.translation is None:
        return
    from rich.text import Text

    from specgen.engine.text.translation import overlap_of_examples
    from specgen.view import pair_report as words

    err.print(Text(words.notice(overlap_of_examples(pair.tokenizer, pair.draft.tokenizer))), soft_wrap=True)


def disable_hub_progress(err: Console, *, quiet: bool) -> None:
    """Disables huggingface_hub's progress bars if `quiet` is True or `err` is not a terminal.

    It has no effect once huggingface_hub is imported.
    """
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
