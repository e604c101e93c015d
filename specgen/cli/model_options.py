"""The options that select models and devices, and loading the pair that they select."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import options
from specgen.cli.interrupts import interrupt_watch
from specgen.errors import SpecgenError
from specgen.paths import kept_exit

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.pair import Pair


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which models to load, and onto which devices. Raises SpecgenError for options that need another one."""

    target: options.Target = None
    draft: options.Draft = None
    device: options.Device = "auto"
    draft_device: options.DraftDevice = None
    dtype: options.Dtype = "auto"
    revision: options.Revision = None
    draft_revision: options.DraftRevision = None
    trust_remote_code: options.TrustRemoteCode = False
    offline: options.Offline = False
    exit_layer: options.ExitLayer = None

    def __post_init__(self) -> None:
        if self.target is None and self.draft is not None:
            raise SpecgenError(f"--draft {self.draft} is given without --target", "Name the target too: --target MODEL")
        if self.draft_revision is not None and self.draft is None:
            raise SpecgenError("--draft-revision is given without --draft", "Name the draft model too")
        if self.revision is not None and self.target is None:
            raise SpecgenError("--revision is given without --target", "Name the target too: --target MODEL")

    @property
    def has_draft(self) -> bool:
        """Whether there will be a draft model: a named one, or the bundled pair's."""
        return self.draft is not None or self.target is None

    @property
    def local_fingerprint(self) -> str | None:
        """The fingerprint of the target's weights, before they are loaded. None for a model on the hub, and for damaged weights,
        which are reported when they are loaded."""
        from specgen import demo
        from specgen.engine.fingerprint import weights_fingerprint

        folder = demo.folder("target") if self.target is None else Path(self.target)
        try:
            return weights_fingerprint(folder) if (folder / "config.json").is_file() else None
        except SpecgenError:
            return None

    @property
    def lacks_exit_layer(self) -> bool:
        """Whether it is certain before loading that there is no exit layer: none is named, and none was trained for the target's
        folder."""
        if self.exit_layer is not None or self.target is None:
            return False
        fingerprint = self.local_fingerprint
        return fingerprint is not None and kept_exit(self.target, fingerprint) is None

    @property
    def probably_on_cpu(self) -> bool:
        """A guess that does not import torch. A wrong guess only costs time."""
        devices = {self.device, self.draft_device or self.device}
        if devices <= {"cpu"}:
            return True
        return devices <= {"cpu", "auto"} and sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def open_pair(models: ModelOptions, err: Console, *, quiet: bool, parallel: bool = False) -> Pair:
    """Load the models and warm them up, with a spinner on `err`.

    For a `parallel` method on a CPU the draft's process starts first, so that it imports torch at the same time.
    """
    from specgen.ui.terminal.loading_line import LoadingLine
    from specgen.workers.process import DraftProcess, is_possible

    disable_hub_progress(err, quiet=quiet)
    with LoadingLine(err, quiet=quiet) as loading:
        process = DraftProcess() if parallel and models.probably_on_cpu and is_possible() else None
        from specgen.loading import load

        interrupt_watch.check()
        pair = load(**asdict(models), announce=loading.announce, process=process)
        loading.still("warming up")
        pair.warm_up()
        interrupt_watch.check()
    return pair


def disable_hub_progress(err: Console, *, quiet: bool) -> None:
    """Disable the hub's download bars where they would not be seen. Has to be called before huggingface_hub is imported."""
    if quiet or not err.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
