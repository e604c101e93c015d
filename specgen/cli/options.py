"""The command-line options that several commands have, with their types and help texts.

Dataclasses group related options, so that a command takes each group as one parameter (see `grouped`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams

_model = partial(typer.Option, rich_help_panel="Models")
_sampling = partial(typer.Option, rich_help_panel="Sampling and limits")
_output = partial(typer.Option, rich_help_panel="Output")

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue. Standard input is read where it is - or missing."),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        help="The decoding method (specgen inspect --methods lists them). Default: the tuned one, else adaptive.",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the method (repeatable).")
]
Chat = Annotated[bool, typer.Option("--chat", help="Format the prompt with the model's chat template.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message for --chat.")]
HelpMethod = Annotated[bool, typer.Option("--help-method", help="Describe --method and its settings, then exit.")]
Profile = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Use the tuned profile in this folder. Default: the one that specgen tune saved for this pair."
    ),
]

Target = Annotated[
    str | None,
    _model(
        "--target", "-t", metavar="MODEL", help="The target model: a Hugging Face id or a folder. Default: the bundled demo pair."
    ),
]
Draft = Annotated[
    str | None,
    _model("--draft", "-d", metavar="MODEL", help="The draft model: a Hugging Face id or a folder. Some methods need none."),
]
Device = Annotated[
    str,
    _model(
        metavar="auto|cpu|cuda|cuda:N|mps|auto-map",
        help="The device that runs the models; auto-map: the target over all GPUs and the CPU, as far as needed.",
    ),
]
DraftDevice = Annotated[str | None, _model(metavar="DEVICE", help="The device that runs the draft model. Default: --device.")]
Dtype = Annotated[
    str,
    _model(
        metavar="auto|float32|bfloat16|float16",
        help="The dtype of both models. auto: the dtype of the weights, on a CPU the one that is measured to be faster.",
    ),
]
DraftDtype = Annotated[
    str | None,
    _model(
        metavar="auto|float32|...|int8|int4",
        help="The draft model's dtype; int8 and int4 round its weights. Default: what tune has found to be faster, else --dtype.",
    ),
]
Revision = Annotated[str | None, _model(metavar="REV", help="The target's branch, tag or commit on the hub.")]
DraftRevision = Annotated[str | None, _model(metavar="REV", help="The draft model's branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[bool, _model("--trust-remote-code", help="Allow models to run the Python code in their repository.")]
Offline = Annotated[bool, _model("--offline", help="Use only models in the local cache, and never connect to the hub.")]
Backend = Annotated[
    str,
    _model(
        metavar="auto|native|transformers",
        help="Whose forward pass runs the models. auto: specgen's own where it supports the model, else transformers'.",
    ),
]
Exact = Annotated[
    bool,
    _model(
        "--exact",
        help="Compute a token's logits alike in every pass, so that plain and speculative decoding see equal bits. For specgen's"
        " own forward pass on a CPU or one CUDA device, and for methods that draft no trees. On CUDA a prompt takes longer:"
        " it is run 16 tokens at a time.",
    ),
]
ContextLength = Annotated[
    int | None, _model("--context", metavar="N", help="At most N tokens of prompt and output. Default: the target's limit.")
]
ExitLayer = Annotated[
    Path | None,
    _model(
        metavar="FILE", help="The trained exit layer for the eesd methods. Default: the one that was trained here for the target."
    ),
]
Head = Annotated[
    Path | None,
    _model(
        metavar="FOLDER",
        help="A trained head for eagle, medusa or glide, a folder or a Hugging Face id. Default: the one trained here for the "
        "target.",
    ),
]

MaxNewTokens = Annotated[int, _sampling("--max-new-tokens", "-n", metavar="N", help="Generate at most N tokens.")]
Temperature = Annotated[float, _sampling(metavar="T", help="The sampling temperature. 0: greedy decoding.")]
TopP = Annotated[
    float, _sampling("--top-p", metavar="P", help="Sample from the most probable tokens whose probabilities add up to P.")
]
TopK = Annotated[int, _sampling("--top-k", metavar="K", help="Sample from the K most probable tokens. 0: from all.")]
Seed = Annotated[
    int | None,
    _sampling(
        metavar="N",
        help="The seed for sampling and for bandit policies. The same seed gives the same tokens; with adaptive and pearl, for "
        "equal measured costs. Default: a random one.",
    ),
]
FixedSeed = Annotated[int | None, _sampling("--seed", metavar="N", help="The seed for sampling and for training.")]
Stop = Annotated[list[str] | None, _sampling(metavar="TEXT", help="End the output before this text (repeatable).")]
IgnoreEos = Annotated[
    bool, _sampling("--ignore-eos", help="Continue after an end-of-sequence token, so that every measured run is equally long.")
]

Category = Annotated[str | None, typer.Option(metavar="NAME", help="Use only the prompts of this category.")]
CompareChat = Annotated[bool, typer.Option("--chat", help="Format each prompt with the model's chat template.")]

Trace = Annotated[Path | None, _output(metavar="FILE.jsonl", help="Write every round to this file, as JSON lines.")]
Record = Annotated[
    list[str] | None,
    _output(
        "--record",
        metavar="distributions",
        help="Add to the trace the overlap and KL divergence of draft and target at each drafted token. This takes time.",
    ),
]
Rounds = Annotated[bool, _output("--rounds", help="Show each round's accepted, rejected and discarded tokens.")]
Perplexity = Annotated[
    bool, _output("--perplexity", help="Compute the output's perplexity under the target. Lossy methods always do.")
]
Energy = Annotated[
    bool, _output("--energy", help="Measure the energy above idle, in joules per token, where the hardware has counters.")
]
Json = Annotated[bool, _output("--json", help="Write JSON lines to standard output instead of text.")]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Show no progress and no footer.")]
NoColor = Annotated[bool, _output("--no-color", help="Use bold, underline and strikethrough instead of colours.")]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The options for sampling and for the length of the output.

    A command that needs other default values uses a subclass that sets them.
    """

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed = None
    ignore_eos: IgnoreEos = False

    def params(self, stop: Sequence[str] = ()) -> SamplingParams:
        """Returns the options as SamplingParams, with the stop strings `stop`. Raises SpecgenError for a value out of range."""
        return SamplingParams(**asdict(self), stop=tuple(stop))


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a command shows its result."""

    json: Json = False
    quiet: Quiet = False
    no_color: NoColor = False


@dataclass(frozen=True, slots=True)
class GenerateOutput(OutputOptions):
    """What `generate` shows, measures and records."""

    rounds: Rounds = False
    trace: Trace = None
    record: Record = None
    perplexity: Perplexity = False
    energy: Energy = False


def grouped(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorates a command so that each parameter whose type is a dataclass becomes one command-line option per field.

    Each field's type must be `Annotated` with a `typer.Option`. The options appear in the help text at the parameter's position.
    The decorator `reported` has to be written above this one, because the dataclass's `__post_init__` may raise errors to report.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def with_groups(**values: Any) -> int | None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    with_groups.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_groups


def _parameters(group: Any) -> list[inspect.Parameter]:
    """Returns a function parameter for each field of the dataclass `group`."""
    types = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(field.name, kind, default=field.default, annotation=types[field.name]) for field in fields(group)]


def recorded(names: list[str] | None) -> bool:
    """Whether `--record distributions` is given. Raises SpecgenError for any other value of `--record`."""
    for name in names or []:
        if name != "distributions":
            raise SpecgenError(f"--record is {name!r}", "The only value is --record distributions")
    return bool(names)
