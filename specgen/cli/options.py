"""The options that commands share, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specgen.errors import SpecgenError

_MODELS, _SAMPLING, _OUTPUT = "Models", "Sampling and limits", "Output"

Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="What to go on from; standard input when it is - or missing.")
]
MethodName = Annotated[
    str | None,
    typer.Option("--method", "-m", metavar="NAME", help="How to decode; all of them: specgen inspect --methods."),
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method (repeatable).")]
Chat = Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system turn, with --chat.")]
HelpMethod = Annotated[bool, typer.Option("--help-method", help="Describe --method and leave.")]

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="MODEL",
        help="Hugging Face id or folder; without it the bundled demo pair.",
        rich_help_panel=_MODELS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", "-d", metavar="MODEL", help="Draft model, likewise; some methods need none.", rich_help_panel=_MODELS
    ),
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N|mps", help="Where the models run.", rich_help_panel=_MODELS)]
DraftDevice = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="Where the draft runs, if elsewhere.", rich_help_panel=_MODELS)
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="auto: the weights' own; on a CPU, what is measured to be faster.",
        rich_help_panel=_MODELS,
    ),
]
Revision = Annotated[str | None, typer.Option(metavar="REV", help="The target's branch, tag or commit.", rich_help_panel=_MODELS)]
DraftRevision = Annotated[str | None, typer.Option(metavar="REV", help="The draft's.", rich_help_panel=_MODELS)]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that a model brings along.", rich_help_panel=_MODELS),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never ask the hub; use what is cached.", rich_help_panel=_MODELS)]

ExitLayer = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="EESD's trained part; what was trained for the target here is found by itself.",
        rich_help_panel=_MODELS,
    ),
]

Profile = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A tuned profile instead of the one found by itself (specgen tune --out DIR)."),
]

MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", metavar="N", help="Longest answer, in tokens.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[float, typer.Option(metavar="T", help="0 decodes greedily.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens up to this mass.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[
    int,
    typer.Option("--top-k", metavar="K", help="Keep the K likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Same seed, same tokens.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the answer before this text (repeatable).", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end: for measuring.", rich_help_panel=_SAMPLING)]

CompareMethods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "-m",
        metavar="LIST",
        help="Methods between commas, settings behind the name: svip,sd:k=8,lookup:policy=beta-ts. "
        "all (the default) is every method; transformers and transformers-assisted are rivals to check us against.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML as examples.yaml (the default), JSONL with prompt, or Spec-Bench's question.jsonl."),
]
Category = Annotated[str | None, typer.Option(metavar="NAME", help="The prompts of this category alone.")]
Limit = Annotated[int | None, typer.Option(metavar="N", help="So many prompts, taken from each category in turn.")]
Turns = Annotated[bool, typer.Option("--turns", help="All turns of a question, behind plain decoding's answers; else the first.")]
CompareChat = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
Repeats = Annotated[int, typer.Option(metavar="N", help="Runs of each prompt; the median counts.")]
ByCategory = Annotated[bool, typer.Option("--by-category", help="A row for each category too.", rich_help_panel=_OUTPUT)]
Phases = Annotated[
    bool, typer.Option("--phases", help="Where the time goes: drafting, verifying, sampling.", rich_help_panel=_OUTPUT)
]
Predict = Annotated[
    bool,
    typer.Option(
        "--predict", help="What theory says beside what was measured: EESD's Eq. 14, pass costs.", rich_help_panel=_OUTPUT
    ),
]
Record = Annotated[
    list[str] | None,
    typer.Option(
        "--record",
        metavar="distributions",
        help="In the trace, how far draft and target agree at each drafted token (overlap, KL). Takes time.",
        rich_help_panel=_OUTPUT,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="Go on from an interrupted comparison's trace, and in it.", rich_help_panel=_OUTPUT),
]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="All figures, for pandas.", rich_help_panel=_OUTPUT)]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="One page with all of it, an example of each method too.", rich_help_panel=_OUTPUT),
]
Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="The table as a picture, for a README.", rich_help_panel=_OUTPUT)]

Trace = Annotated[
    Path | None, typer.Option(metavar="FILE.jsonl", help="Record every round as JSON lines.", rich_help_panel=_OUTPUT)
]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of text.", rich_help_panel=_OUTPUT)]
Rounds = Annotated[
    bool, typer.Option("--rounds", help="Show each round: accepted, rejected, discarded.", rich_help_panel=_OUTPUT)
]
Perplexity = Annotated[
    bool,
    typer.Option(
        "--perplexity", help="The answer's perplexity under the target; lossy methods show it anyway.", rich_help_panel=_OUTPUT
    ),
]
Energy = Annotated[
    bool, typer.Option("--energy", help="Joules a token above idle, where there are counters.", rich_help_panel=_OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no footer.", rich_help_panel=_OUTPUT)]
NoColor = Annotated[bool, typer.Option("--no-color", help="Attributes instead of colours.", rich_help_panel=_OUTPUT)]


def recorded(wanted: list[str] | None) -> bool:
    """Whether `--record` asks for the distributions' figures. Raises SpecgenError for anything else it may ask for."""
    for name in wanted or []:
        if name != "distributions":
            raise SpecgenError(f"--record is {name!r}", "There is --record distributions")
    return bool(wanted)
