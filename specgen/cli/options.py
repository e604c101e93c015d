"""The command-line options that several commands have, with their types and help texts.

Dataclasses group related options, so that a command takes each group as one parameter (see `grouped`). An option is named after
its field, and has the text of `HELP` unless it gives its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from specgen.base.errors import SpecgenError
from specgen.base.files import file_identity
from specgen.base.types import SamplingParams

HELP = {
    "prompt": "The text to continue. Standard input is read where it is - or missing.",
    "method": "The decoding method (specgen inspect --methods lists them). Default: the tuned one, else adaptive.",
    "set": "Change a setting of the method (repeatable).",
    "system": "The system message for --chat.",
    "help_method": "Describe --method and its settings, then exit.",
    "profile": "Use the tuned profile in this folder. Default: the one that specgen tune saved for this pair.",
    "target": "The target model: a Hugging Face id or a folder. Default: the bundled demo pair.",
    "draft": "The draft model: a Hugging Face id or a folder. Some methods need none.",
    "device": "The device that runs the models; auto-map: the target over all GPUs and the CPU, as far as needed.",
    "draft_device": "The device that runs the draft model. Default: --device.",
    "dtype": "The dtype of both models. auto: the dtype of the weights, on a CPU the one that is measured to be faster.",
    "draft_dtype": "The draft model's dtype; int8 and int4 round its weights. Default: what tune has found to be faster, else "
    "--dtype.",
    "revision": "The target's branch, tag or commit on the hub.",
    "draft_revision": "The draft model's branch, tag or commit on the hub.",
    "trust_remote_code": "Allow models to run the Python code in their repository.",
    "offline": "Use only models in the local cache, and never connect to the hub.",
    "backend": "Whose forward pass runs the models. auto: specgen's own where it supports the model, else transformers'.",
    "exact": "Compute a token's logits alike in every pass, so that plain and speculative decoding see equal bits. For specgen's"
    " own forward pass on a CPU or one CUDA device, and for methods that draft no trees. On CUDA a prompt takes longer:"
    " it is run 16 tokens at a time.",
    "context": "At most N tokens of prompt and output. Default: the target's limit.",
    "exit_layer": "The trained exit layer for the eesd methods. Default: the one that was trained here for the target.",
    "head": "A trained head for eagle, medusa or glide, a folder or a Hugging Face id. Default: the one trained here for the "
    "target.",
    "max_new_tokens": "Generate at most N tokens.",
    "temperature": "The sampling temperature. 0: greedy decoding.",
    "top_p": "Sample from the most probable tokens whose probabilities add up to P.",
    "top_k": "Sample from the K most probable tokens. 0: from all.",
    "seed": "The seed for sampling and for bandit policies. The same seed gives the same tokens; with adaptive and pearl, for "
    "equal measured costs. Default: a random one.",
    "stop": "End the output before this text (repeatable).",
    "ignore_eos": "Continue after an end-of-sequence token, so that every measured run is equally long.",
    "category": "Use only the prompts of this category.",
    "trace": "Write every round to this file, as JSON lines.",
    "record": "Add to the trace the overlap and KL divergence of draft and target at each drafted token. This takes time.",
    "rounds": "Show each round's accepted, rejected and discarded tokens.",
    "phases": "Show the time for drafting, the length policy, verification and sampling.",
    "predict": "Show the speedups predicted by EESD's Eq. 14 and by measured costs of the forward passes.",
    "resume": "Continue an interrupted comparison from its trace, and append to it.",
    "perplexity": "Compute the output's perplexity under the target. Lossy methods always do.",
    "energy": "Measure the energy above idle, in joules per token, where the hardware has counters.",
    "json": "Write JSON lines to standard output instead of text.",
    "quiet": "Show no progress and no footer.",
    "no_color": "Use bold, underline and strikethrough instead of colours.",
}
_NO_NAME = {"": "it is empty", "-": "it is -, which is no file (/dev/stdout is standard output)"}

model = partial(typer.Option, rich_help_panel="Models")
sampling = partial(typer.Option, rich_help_panel="Sampling and limits")
shown = partial(typer.Option, rich_help_panel="Output")

Profile = Annotated[Path | None, typer.Option(metavar="DIR")]
MaxNewTokens = Annotated[int, sampling("-n", metavar="N")]
FixedSeed = Annotated[int | None, sampling(metavar="N", help="The seed for sampling and for training.")]
Category = Annotated[str | None, typer.Option(metavar="NAME")]
CompareChat = Annotated[bool, typer.Option(help="Format each prompt with the model's chat template.")]
Trace = Annotated[Path | None, shown(metavar="FILE.jsonl")]
Record = Annotated[Literal["distributions"] | None, shown(metavar="distributions")]
Perplexity = Annotated[bool, shown()]
Energy = Annotated[bool, shown()]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The options for sampling and for the length of the output.

    A command that needs other default values uses a subclass that sets them.
    """

    max_new_tokens: MaxNewTokens = 128
    temperature: Annotated[float, sampling(metavar="T")] = 0.0
    top_p: Annotated[float, sampling(metavar="P")] = 1.0
    top_k: Annotated[int, sampling(metavar="K")] = 0
    seed: Annotated[int | None, sampling(metavar="N")] = None
    ignore_eos: Annotated[bool, sampling()] = False

    def params(self, stop: Sequence[str] = ()) -> SamplingParams:
        """Returns the options as SamplingParams, with the stop strings `stop`. Raises SpecgenError for a value out of range."""
        return SamplingParams(**asdict(self), stop=tuple(stop))


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a command shows its result."""

    json: Annotated[bool, shown()] = False
    quiet: Annotated[bool, shown("-q")] = False
    no_color: Annotated[bool, shown()] = False


@dataclass(frozen=True, slots=True)
class GenerateOutput(OutputOptions):
    """What `generate` shows, measures and records."""

    rounds: Annotated[bool, shown()] = False
    trace: Trace = None
    record: Record = None
    perplexity: Perplexity = False
    energy: Energy = False


@dataclass(frozen=True, slots=True)
class CompareOutput:
    """What to measure, to display and to write to files. `resume` is the trace of an interrupted comparison, which is read first
    and then appended to. Paths that are None are not written.

    Raises SpecgenError for options that contradict each other.
    """

    by_category: Annotated[bool, shown(help="Show one row for each category as well.")] = False
    phases: Annotated[bool, shown()] = False
    predict: Annotated[bool, shown()] = False
    perplexity: Perplexity = False
    energy: Energy = False
    trace: Trace = None
    record: Record = None
    resume: Annotated[Path | None, shown(metavar="FILE.jsonl")] = None
    csv: Annotated[Path | None, shown(metavar="FILE", help="Write all figures to a CSV file.")] = None
    svg: Annotated[Path | None, shown(metavar="FILE", help="Write the table as an SVG image.")] = None
    html: Annotated[
        Path | None, shown(metavar="FILE", help="Write a self-contained page with all figures and an example of each method.")
    ] = None

    def __post_init__(self) -> None:
        if self.trace is not None and self.resume is not None and file_identity(self.trace) != file_identity(self.resume):
            raise SpecgenError(f"--trace {self.trace} differs from --resume {self.resume}", "--resume appends to its own file")
        if self.record is not None and self.trace_path is None:
            raise SpecgenError("--record distributions needs --trace", "Name the trace too: --trace FILE.jsonl")

    @property
    def files(self) -> dict[str, Path | None]:
        """The paths of the files to write, by their options."""
        trace = {"--trace": self.trace} if self.resume is None else {"--resume": self.resume}
        return {**trace, "--csv": self.csv, "--svg": self.svg, "--html": self.html}

    @property
    def trace_path(self) -> Path | None:
        return self.resume or self.trace


def grouped(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorates a command so that each parameter whose type is a dataclass becomes one command-line option per field.

    Each field's type must be `Annotated` with a `typer.Option`. The options appear in the help text at the parameter's position.
    The decorator `reported` has to be written above this one, because the dataclass's `__post_init__` may raise errors to report.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if is_dataclass(group):
            groups[parameter.name] = group
            types = get_type_hints(group, include_extras=True)
            parameters += [_option(each.name, each.default, types[each.name]) for each in fields(group)]
        else:
            parameters.append(_option(parameter.name, parameter.default, group))

    @wraps(command)
    def with_groups(**values: Any) -> int | None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    with_groups.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_groups


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """Returns a command's parameter for typer: with its help text, the name `--like-this`, and a check of paths and models."""
    if get_args(annotation):
        kind, info = get_args(annotation)[0], copy(annotation.__metadata__[0])
        info.help = info.help or HELP[name]
        given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]  # typer takes the first so
        if isinstance(info, typer.models.OptionInfo) and not any(each.startswith("--") for each in given):
            info.default, *info.param_decls = (f"--{name.replace('_', '-')}", *given)
        if "Path" in str(kind):
            info.parser = _path
        elif info.metavar in ("MODEL", "REV"):
            info.parser = _name
        annotation = Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _name(text: str) -> str:
    """Refuses empty text and `-` as a file, a folder or a model: empty text would be the working folder, and `-` a file of that
    name, where users mean a standard stream."""
    if text in _NO_NAME:
        raise typer.BadParameter(_NO_NAME[text])
    return text


def _path(text: str) -> Path:
    return Path(_name(text))
