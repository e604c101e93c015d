"""From the common options to a loaded pair."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specgen import demo
from specgen.errors import SpecgenError
from specgen.ui.progress import LoadingLine
from specgen.workers.process import DraftProcess, is_possible

if TYPE_CHECKING:
    from specgen.pair import Pair


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options that say which models, where from and where to."""

    target: str | None
    draft: str | None
    device: str
    draft_device: str | None
    dtype: str
    revision: str | None
    draft_revision: str | None
    trust_remote_code: bool
    offline: bool
    exit_layer: Path | None = None

    @property
    def has_draft(self) -> bool:
        """Whether a draft model will be there: one is named, or the bundled pair brings it."""
        return self.draft is not None or self.target is None

    @property
    def has_exit(self) -> bool:
        """Whether there will be an exit layer: one is named, or it is the bundled target's."""
        return self.exit_layer is not None or (self.target is None and demo.exit_folder().is_dir())

    @property
    def probably_on_cpu(self) -> bool:
        """A guess, before torch can be asked; a wrong one costs time alone."""
        named = {self.device, self.draft_device or self.device}
        if named <= {"cpu"}:
            return True
        return named <= {"cpu", "auto"} and sys.platform == "linux" and not Path("/dev/nvidiactl").exists()

    def __post_init__(self) -> None:
        if self.target is None and self.draft is not None:
            raise SpecgenError(f"--draft {self.draft} stands without --target", "Name the target too: --target MODEL")
        if self.draft_revision is not None and self.draft is None:
            raise SpecgenError("--draft-revision stands without --draft", "Name the draft model too")
        if self.revision is not None and self.target is None:
            raise SpecgenError("--revision stands without --target", "Name the target too: --target MODEL")


def open_pair(models: ModelOptions, err: Console, *, quiet: bool, parallel: bool = False) -> Pair:
    """Load the models, with a spinner while it takes. What is heavy is imported here.

    For a `parallel` method the draft's process is started before that, so that both get ready side by side.
    """
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the hub reads it when it is imported, below
    with LoadingLine(err, quiet=quiet) as loading:
        process = DraftProcess() if parallel and models.probably_on_cpu and is_possible() else None
        from specgen.loading import load

        pair = load(
            models.target,
            models.draft,
            device=models.device,
            dtype=models.dtype,
            draft_device=models.draft_device,
            revision=models.revision,
            draft_revision=models.draft_revision,
            trust_remote_code=models.trust_remote_code,
            offline=models.offline,
            announce=loading.announce,
            process=process,
            exit_layer=models.exit_layer,
        )
        loading.still("warming up")
        pair.settle()
    return pair
