"""From the common options to a loaded pair."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from specgen.cli.interrupts import noticed
from specgen.errors import SpecgenError
from specgen.ui.terminal.loading_line import LoadingLine
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
    def has_no_exit(self) -> bool:
        """Whether it is sure, before anything is loaded, that there will be no exit layer: none is named, and none is kept for
        the target's folder. Of a name on the hub nothing is known yet."""
        if self.exit_layer is not None or self.target is None:
            return False
        folder = Path(self.target)
        if not (folder / "config.json").is_file():
            return False
        from specgen.engine.fingerprint import weights_fingerprint
        from specgen.paths import kept_exit

        try:
            return kept_exit(self.target, weights_fingerprint(folder)) is None
        except SpecgenError:  # damaged weights: said when they are read
            return False

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

        noticed.check()
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
        pair.warm_up()
        noticed.check()
    return pair
