"""The command `specgen tune --train`: trains what the request says, and prints the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.base.errors import RunError
from specgen.base.files import make_writable_folder
from specgen.base.interrupts import interrupts
from specgen.base.text import print_json, print_result
from specgen.cli.error_reporting import INTERRUPTED
from specgen.cli.model_options import ModelOptions, disable_hub_progress
from specgen.cli.train_request import TrainRequest
from specgen.compare.prompts import load_prompts

if TYPE_CHECKING:
    from rich.console import Console


def train(models: ModelOptions, request: TrainRequest, err: Console, *, quiet: bool, as_json: bool) -> int | None:
    """Loads the models, trains, and prints the result. Returns None, or an exit code if the user interrupted the training."""
    prompts = [] if request.prompts is None else load_prompts(request.prompts, for_tuning=True)
    if request.out is not None:
        make_writable_folder(request.out)
    disable_hub_progress(err, quiet=quiet)
    from rich.text import Text

    from specgen.cli.train_inputs import load_models, training_task
    from specgen.cli.trainers import TRAINERS
    from specgen.train.training_task import TrainingStopped
    from specgen.view.progress import Progress, TrainingLine

    with Progress(err, quiet=quiet) as loading:
        loaded = load_models(models, request, loading.announce)
        trainer = TRAINERS[request.part]
        trainer.check(loaded, request)
        loading.announce("reading texts")
        task = training_task(models, request, loaded, prompts)
    make_writable_folder(task.folder)
    with interrupts.held(raises=False) as stop_requested, Progress(err, quiet=quiet) as progress:
        bars = TrainingLine(progress, stop_requested)
        target = loaded.target
        bars.announce(f"{target.name} on {target.device}, {target.dtype_name}; output: {task.out}")
        try:
            path, fields, sentence = trainer.train(loaded, request, task, bars)
        except TrainingStopped:
            bars.announce(f"interrupted; the same command resumes from here (state in {task.folder})")
            return INTERRUPTED
        except OSError as error:
            raise RunError(
                f"cannot write to {task.out}: {error.strerror or error}",
                "What was saved before is still there: free some space and run the same command again",
            ) from error
    if as_json:
        print_json({"type": "train", **fields})
    else:
        print_result(str(path))
    if not quiet:
        err.print(Text(sentence), soft_wrap=True)
    return None
