"""What can be given on the command line: the options of the commands, in groups, and what the
help says of them.

A command takes each group as one parameter. A row (names and value, help text) describes an option.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from specgen.base.errors import SpecgenError
from specgen.base.files import file_identity
from specgen.base.grammars import Grammar
from specgen.base.model_options import Finding, ModelOptions
from specgen.base.schema import read_text
from specgen.base.types import SamplingParams
from specgen.tune.exports.engines import ENGINES

# By field: its names, if they are others than `--the-field`, with the value; and the help text.
Rows = Mapping[str, tuple[str, str]]
_DEFAULT = SamplingParams()
MAX_NEW_TOKENS = _DEFAULT.max_new_tokens
NO_DRAFT = "none"  # as a value of --draft
SHAPES = ("json_schema", "regex", "grammar")  # the options that say what an output has to match
ARGUMENTS = ("prompt", "traces")  # the other fields are options
# The options that --help shows of each command; --help-all shows all.
SHOWN = {
    "generate": (
        "prompt file prompts method settings chat target draft device dtype "
        "max_new_tokens temperature seed rounds json quiet"
    ),
    "compare": (
        "methods prompts limit budget target draft device dtype max_new_tokens "
        "temperature json trace html"
    ),
    "inspect": "traces list_methods html rounds measure target draft device json",
    "tune": (
        "methods budget prompts export train minutes corpus target draft device "
        "dtype max_new_tokens temperature json"
    ),
    "serve": (
        "host port method settings target draft device dtype api_key queue temperature quiet"
    ),
}
# the smallest number of an option, by its field
LEAST = {"limit": 1, "threads": 1, "repeats": 1, "rounds": 0, "run": 1, "queue": 0, "port": 0}
ROWS: Rows = {
    "chat": ("", "Format each prompt with the model's chat template."),
    "category": ("NAME", "Use only the prompts of this category."),
    # models
    "target": (
        "-t MODEL",
        (
            "The target model: a Hugging Face id, a folder or a GGUF file. Default: the "
            "bundled demo pair."
        ),
    ),
    "draft": (
        "-d MODEL",
        (
            "The draft model: an id, a folder or a GGUF file; none: no drafter. Default: one "
            "found here."
        ),
    ),
    "device": (
        "auto|cpu|cuda|cuda:N|mps|auto-map",
        "What runs the models; auto-map: all GPUs and the CPU, as far as needed.",
    ),
    "draft_device": ("DEVICE", "The device that runs the draft model. Default: --device."),
    "dtype": (
        "auto|float32|bfloat16|float16|int8",
        "Of both models. auto: the weights'; on a CPU float32.",
    ),
    "draft_dtype": (
        "auto|float32|...|int8|int4",
        "int8 and int4 round the draft. Default: the tuned one, else --dtype.",
    ),
    "revision": ("REV", "The target's branch, tag or commit on the hub."),
    "draft_revision": ("REV", "The draft model's branch, tag or commit on the hub."),
    "trust_remote_code": ("", "Allow models to run the Python code in their repository."),
    "offline": ("", "Use only models in the local cache, and never connect to the hub."),
    "exit_layer": (
        "FILE",
        (
            "The trained exit layer for the eesd methods. Default: the one trained here for "
            "the target."
        ),
    ),
    "head": (
        "FOLDER",
        (
            "A head for eagle, medusa, glide or block (also a hub id). Default: the one "
            "trained here for the target."
        ),
    ),
    "backend": (
        "auto|native|transformers",
        "Whose forward pass runs the models. auto: specgen's own where it supports them.",
    ),
    "context": ("N", "At most N tokens of prompt and output. Default: the target's limit."),
    "exact": (
        "",
        (
            "Make plain and speculative logits bit-equal (native backend). Costs nothing with "
            "kernels; without, not for draft trees, and slower for prompts on CUDA."
        ),
    ),
    "profile": (
        "DIR",
        (
            "Use the tuned profile in this folder; none: no profile. Default: what specgen "
            "tune saved for this pair."
        ),
    ),
    # sampling and limits
    "max_new_tokens": ("-n N", "Generate at most N tokens."),
    "temperature": ("T", "The sampling temperature. 0: greedy decoding."),
    "top_p": ("P", "Sample from the most probable tokens whose probabilities add up to P."),
    "top_k": ("K", "Sample from the K most probable tokens. 0: from all."),
    "min_p": (
        "P",
        "Sample only from tokens with at least P times the probability of the likeliest one.",
    ),
    "repetition_penalty": (
        "R",
        "Make tokens that are in the context less likely by this factor. Default: the model's own.",
    ),
    "threads": (
        "N",
        "Compute with N CPU threads. Default: as many as timed passes choose, or OMP_NUM_THREADS.",
    ),
    "seed": (
        "N",
        "The random seed: the same command gives the same tokens again, with every method.",
    ),
    "ignore_eos": (
        "",
        "Continue after an end-of-sequence token, so that every measured run is equally long.",
    ),
    "stop": ("TEXT", "End the output before this text (repeatable)."),
    "json_schema": (
        "SCHEMA",
        "Answer in JSON that matches this schema: a file, or text that begins with {. The answer "
        "is on one line. Objects may get further properties, unless the schema has "
        "additionalProperties: false.",
    ),
    "regex": ("REGEX", "Answer with text that matches this regular expression as a whole."),
    "grammar": ("FILE", "Answer with text of this grammar, in the notation of Lark or GBNF."),
    "logprobs": (
        "N",
        "Add each token's log-probability and those of the N likeliest, of the target's own "
        "logits, to the rounds in --trace.",
    ),
    # output
    "json": ("", "Write JSON lines to standard output instead of text."),
    "quiet": ("-q", "Show no progress and no footer."),
    "no_color": ("", "Use bold, underline and strikethrough instead of colours."),
    "trace": ("FILE.jsonl", "Write every round to this file, as JSON lines."),
    "record": (
        "distributions",
        "Add to the trace how close draft and target are at each drafted token. This takes time.",
    ),
    "perplexity": (
        "",
        "Compute the output's perplexity under the target. Lossy methods always do.",
    ),
    "energy": (
        "",
        "Measure the energy above idle, in joules per token, where the hardware has counters.",
    ),
}
GENERATE_ROWS: Rows = {
    "prompt": (
        "PROMPT",
        "The text to continue; --file and what is piped in follow it, after blank lines. "
        "A pipe's first byte has to come within "
        "a second. Standard input alone is read where PROMPT is - or missing.",
    ),
    "no_stdin": (
        "",
        (
            "Join nothing from standard input to the prompt, and do not wait for it, as in "
            "the body of a while read loop."
        ),
    ),
    "method": (
        "-m NAME",
        (
            "The decoding method (inspect --methods lists them), or your package.module:Class. "
            "Default: the tuned one, else adaptive."
        ),
    ),
    "file": (
        "-f FILE",
        "Read the prompt from a file, or what follows it (UTF-8; CRLF is read as LF).",
    ),
    "prompts": (
        "FILE",
        "Answer each prompt of a file in compare's formats; with --json one line each. "
        "With --trace the same command continues "
        "after an interruption.",
    ),
    "settings": ("--set KEY=VALUE", "Change a setting of the method (repeatable)."),
    "system": ("TEXT", "The system message for --chat."),
    "max_new_tokens": (
        "-n N",
        "Generate at most N tokens. Default: 128; in a conversation as many as the answer has.",
    ),
    "help_method": ("", "Describe --method and its settings, then exit."),
    "rounds": ("", "Show each round's accepted, rejected and discarded tokens."),
    "logprobs": (
        "N",
        "Show each token's log-probability and those of the N likeliest, of the target's own "
        "logits; with --json and --trace in the rounds.",
    ),
}
COMPARE_ROWS: Rows = {
    "trace": (
        "FILE.jsonl",
        (
            "Write every round to this file, as JSON lines, or continue the interrupted "
            "comparison in it."
        ),
    ),
    "methods": (
        "-m LIST",
        "Methods separated by commas, settings after the name: "
        "svip,sd:k=8,lookup:policy=beta-ts,package.module:Class. Default: up to six that are "
        "likely to be fast here; all: every one. "
        "transformers and transformers-assisted are baselines, on a CPU in float32 and, if the "
        "target is stored in 16 bits, in its dtype too.",
    ),
    "prompts": (
        "FILE",
        (
            "YAML like examples.yaml (the default), JSON lines with prompt, or Spec-Bench's "
            "question.jsonl."
        ),
    ),
    "limit": (
        "N",
        "Use at most N prompts, taken from the categories in turn. Default: 20 of the 36 in "
        "examples.yaml, all of --prompts.",
    ),
    "turns": (
        "",
        (
            "Use all turns of a question, with plain decoding's answers between them, not "
            "only the first."
        ),
    ),
    "tuned": (
        "",
        (
            "Run named methods with the settings of the tuned profile instead of their "
            "documented defaults."
        ),
    ),
    "repeats": ("N", "Run each prompt N times and use the median time."),
    "budget": (
        "SECONDS",
        (
            "End after this time, with what was measured. Default: 60 if nothing says what "
            "to compare, else none."
        ),
    ),
    "by_category": ("", "Show one row for each category as well."),
    "phases": ("", "Show the time for drafting, the length policy, verification and sampling."),
    "predict": (
        "",
        "Show the speedups predicted by EESD's Eq. 14 and by measured costs of the forward passes.",
    ),
    "resume": ("FILE.jsonl", "As --trace, and refuse the trace of another comparison."),
    "csv": ("FILE", "Write all figures to a CSV file."),
    "svg": ("FILE", "Write the table as an SVG image."),
    "html": ("FILE", "Write a self-contained page with all figures and an example of each method."),
}
INSPECT_ROWS: Rows = {
    "traces": ("TRACE.jsonl ...", "Traces to show, side by side if several."),
    "list_methods": (
        "--methods",
        "List every method with its paper, its settings and their defaults.",
    ),
    "html": ("FILE", "Write a self-contained page instead of text."),
    "rounds": (
        "N",
        "Show at most N rounds of each run. Default: 40 of a single run, none of several.",
    ),
    "run": ("N", "Show the rounds of each method's N-th run."),
    "pair": ("", "Inspect the bundled pair."),
    "measure": (
        "",
        (
            "Load the pair and time its passes, for the acceptance rate from which "
            "speculation is faster."
        ),
    ),
}
TUNE_ROWS: Rows = {
    "methods": (
        "-m LIST",
        (
            "Only these, separated by commas; with --train one of: eesd, sd, medusa, eagle, "
            "glide, block."
        ),
    ),
    "budget": ("SECONDS", "Time for everything, loading included."),
    "prompts": (
        "FILE",
        "Prompts to tune on, in compare's formats; by default those of examples.yaml "
        "that compare leaves out. With --train: "
        "those that the target continues.",
    ),
    "limit": ("N", "Number of prompts, taken from each category in turn."),
    "objective": (
        "speed|perplexity",
        "Choose lossy settings by speed under --max-perplexity, or by the lowest perplexity.",
    ),
    "max_perplexity": (
        "X|P%",
        "The largest perplexity of a lossy output, or its percentage of plain decoding's (100%).",
    ),
    "export": (
        "ENGINE",
        f"Print settings for {' or '.join(', '.join(ENGINES).rsplit(', ', 1))}. Tunes first, for "
        "--budget, where there is no profile.",
    ),
    "out": ("DIR", "The profile's folder; by default one for this pair in your data folder."),
    "train": (
        "",
        "Train EESD's exit layer and its predictor (with --exit-layer: only that); with "
        "-m sd the draft, with -m medusa, eagle, "
        "glide or block a head.",
    ),
    "minutes": ("M", "Total training time (10)."),
    "steps": ("S", "Optimizer steps instead of minutes: reproducible weights."),
    "corpus": (
        "FILE",
        (
            "Plain text, or JSON lines with text (--chat: prompt or messages); demo: the "
            "bundled pair's own. By default the target answers 200 prompts."
        ),
    ),
    "layer": ("N", "Put the exit after layer N (7 % of the layers)."),
    "exit_layers": ("0|1|2", "Layers in the exit; 0: only a head."),
    "exit_head": ("own|target", "Train the exit's LM head, or use the target's."),
    "self_text": (
        "SHARE",
        "Share of sequences that the target generates (0.5; for sd: that it labels, 1).",
    ),
    "batch": ("--batch-size B", "Sequences per step (64; on a CPU by timing, with --steps 16)."),
    "training_length": ("--window W", "Tokens per sequence (2048; on a CPU 256)."),
    "learning_rate": ("R", "Peak learning rate (0.001; for sd 0.0003); it decays to zero."),
}
SERVE_ROWS: Rows = {
    "host": (
        "ADDRESS",
        "Listen at this address. Beyond this machine (0.0.0.0: everywhere) a key is needed.",
    ),
    "port": ("N", "Listen at this port. 0: at any that is free."),
    "method": GENERATE_ROWS["method"],
    "settings": GENERATE_ROWS["settings"],
    "api_key": (
        "KEY",
        "Answer only requests with this key. Better set SPECGEN_API_KEY: other users of the "
        "machine can read options.",
    ),
    "queue": ("N", "Let at most N requests wait; more are refused."),
    "allow_host": (
        "NAME",
        "Also answer to this name in the Host header, beside the address (repeatable).",
    ),
    "allow_origin": (
        "ORIGIN",
        "Answer pages of this origin in a browser, such as https://example.org (repeatable).",
    ),
    "temperature": ("T", "Where a request names none. 0: greedy decoding."),
    "top_p": ("P", "Where a request names none."),
    "top_k": ("K", "Where a request names none. 0: all tokens."),
    "min_p": ("P", "Where a request names none."),
    "seed": ("N", "Where a request names none. Default: a random one."),
    "json_schema": (
        "SCHEMA",
        "Where a request has no response_format: answer in JSON that matches this schema, a file "
        "or text that begins with {.",
    ),
    "regex": (
        "REGEX",
        "Where a request has no response_format: answer with text that matches this expression.",
    ),
    "grammar": (
        "FILE",
        "Where a request has no response_format: answer with text of this grammar (Lark or GBNF).",
    ),
    "quiet": ("-q", "Show no progress, and no line for each request."),
}


@dataclass(frozen=True)
class DecodingGroup(ModelOptions):
    """Which models to load, and how they compute, for a command that decodes.

    `none` as a draft: nothing drafts for the target, and nothing is looked for.
    """

    panel: ClassVar[str] = "Models"
    not_options: ClassVar[tuple[str, ...]] = ("find",)

    @property
    def has_draft(self) -> bool:
        """Whether there will be a draft model: the one of --draft, the demo pair's if no target is
        named, or, as far as is known before the search, one that is found."""
        return self.draft != NO_DRAFT and (
            self.draft is not None or self.target is None or self.finds
        )

    @property
    def finds(self) -> bool:
        """Whether to look for what can draft for the target: no drafter is named, nor
        `--draft none`."""
        drafters = (self.draft, self.head, self.exit_layer)
        return self.target is not None and all(drafter is None for drafter in drafters)

    @property
    def probably_on_cpu(self) -> bool:
        """Whether both models will probably run on the CPU: a guess without torch. A wrong one only
        costs time."""
        devices = {self.device, self.draft_device or self.device}
        is_without_gpu = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
        return devices <= ({"cpu", "auto"} if is_without_gpu else {"cpu"})

    def loaded(self, find: bool | Finding = False) -> ModelOptions:
        """Returns what to load, with a search for drafters as in `find` if none is named. Without
        the profile, which commands open themselves, to say why one is not used."""
        draft = None if self.draft == NO_DRAFT else self.draft
        return replace(self, draft=draft, find=find if self.finds else False, profile=None)


@dataclass(frozen=True)
class ModelGroup(DecodingGroup):
    """Which models to load, for a command that only inspects or tunes them."""

    not_options: ClassVar[tuple[str, ...]] = ("find", "exact", "repetition_penalty", "profile")


@dataclass(frozen=True)
class SamplingOptions:
    """The options for sampling, for the length of the output and for what it has to match."""

    panel: ClassVar[str] = "Sampling and limits"
    max_new_tokens: int | None = MAX_NEW_TOKENS
    temperature: float = _DEFAULT.temperature
    top_p: float = _DEFAULT.top_p
    top_k: int = _DEFAULT.top_k
    seed: int | None = _DEFAULT.seed
    ignore_eos: bool = _DEFAULT.ignore_eos
    min_p: float = _DEFAULT.min_p
    logprobs: int | None = _DEFAULT.logprobs
    json_schema: str | None = None
    regex: str | None = None
    grammar: Path | None = None

    def params(self) -> SamplingParams:
        """Returns the options as SamplingParams. Raises SpecgenError for a value out of range, a
        file that cannot be read, and for several options that say what the output has to match."""
        values = asdict(self)
        shapes = {name: values.pop(name) for name in SHAPES}
        given = [name for name, value in shapes.items() if value is not None]
        if len(given) > 1:
            first, second, *_ = (f"--{name.replace('_', '-')}" for name in given)
            raise SpecgenError(f"{first} and {second} are given", "Leave one of them out")
        values["grammar"] = self._asked_grammar()
        if self.max_new_tokens is None:
            values["max_new_tokens"] = MAX_NEW_TOKENS
        try:
            return SamplingParams(**values)
        except SpecgenError as error:
            message = error.message.replace("max_new_tokens", "-n (--max-new-tokens)")
            message = message.replace("ignore_eos", "--ignore-eos")
            raise SpecgenError(message, error.hint) from error

    def _asked_grammar(self) -> Grammar | None:
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            return Grammar("grammar", read_text(self.grammar, "grammar", "Check the path"))
        if self.json_schema is None:
            return None
        if self.json_schema.lstrip().startswith("{"):
            return Grammar("json_schema", self.json_schema)
        if not self.json_schema.strip():
            raise SpecgenError("--json-schema is empty", "Give a file, or text that begins with {")
        path = Path(self.json_schema)
        return Grammar("json_schema", read_text(path, "JSON schema", "Check the path"))


@dataclass(frozen=True)
class OutputOptions:
    """How a command shows its result."""

    panel: ClassVar[str] = "Output"
    json: bool = False
    quiet: bool = False
    no_color: bool = False


@dataclass(frozen=True)
class RecordOptions(OutputOptions):
    """What a command that decodes shows, records and measures. `trace` is the file to write, None
    for no trace."""

    trace: Path | None = None
    record: Literal["distributions"] | None = None
    perplexity: bool = False
    energy: bool = False


@dataclass(frozen=True)
class GenerateOptions:
    """What `generate` decodes, and how."""

    panel: ClassVar[str | None] = None
    prompt: str | None = None
    file: Path | None = None
    prompts: Path | None = None
    no_stdin: bool = False
    method: str | None = None
    settings: list[str] | None = None
    chat: bool = False
    system: str | None = None
    help_method: bool = False


@dataclass(frozen=True)
class GenerateSampling(SamplingOptions):
    """The options for sampling, with the texts that end the output. If `max_new_tokens` is None, it
    is `MAX_NEW_TOKENS`; a conversation then has no limit."""

    max_new_tokens: int | None = None
    stop: list[str] | None = None


@dataclass(frozen=True)
class GenerateOutput(RecordOptions):
    """What `generate` shows, measures and records."""

    rounds: bool = False


@dataclass(frozen=True)
class CompareOptions:
    """What to measure, on which prompts."""

    panel: ClassVar[str | None] = None
    methods: list[str] | None = None
    prompts: Path | None = None
    category: str | None = None
    limit: int | None = None
    turns: bool = False
    chat: bool = False
    repeats: int = 3
    budget: float | None = None
    tuned: bool = False


@dataclass(frozen=True)
class CompareOutput(RecordOptions):
    """What `compare` shows, and the files that it writes; None: not this file. `resume` is the
    trace of an interrupted comparison, which is read first and then appended to. Raises
    SpecgenError for options that contradict each other."""

    by_category: bool = False
    phases: bool = False
    predict: bool = False
    resume: Path | None = None
    csv: Path | None = None
    svg: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        if (
            self.trace is not None
            and self.resume is not None
            and file_identity(self.trace) != file_identity(self.resume)
        ):
            raise SpecgenError(
                f"--trace {self.trace} differs from --resume {self.resume}",
                "--resume appends to its own file",
            )
        if self.record is not None and self.trace_path is None:
            raise SpecgenError(
                "--record distributions needs --trace", "Name the trace too: --trace FILE.jsonl"
            )

    @property
    def files(self) -> dict[str, Path | None]:
        """The paths of the files to write, by their options."""
        trace = {"--trace": self.trace} if self.resume is None else {"--resume": self.resume}
        return {**trace, "--csv": self.csv, "--svg": self.svg, "--html": self.html}

    @property
    def trace_path(self) -> Path | None:
        return self.resume or self.trace


@dataclass(frozen=True)
class InspectOptions:
    """The traces to inspect, or with `list_methods` the methods; neither for a pair of models."""

    panel: ClassVar[str | None] = None
    traces: list[Path] | None = None
    list_methods: bool = False


@dataclass(frozen=True)
class TraceOptions:
    """What to show of recorded runs: of each method at most `rounds` rounds (None: a default) of
    its run number `run`, from 1. `html` is the page to write, None for text."""

    panel: ClassVar[str] = "Recorded runs"
    html: Path | None = None
    rounds: int | None = None
    run: int = 1


@dataclass(frozen=True)
class PairOptions:
    """What to show of a pair of models. `pair` is for the bundled pair, `measure` also times the
    loaded models' passes."""

    panel: ClassVar[str] = "A pair of models"
    pair: bool = False
    measure: bool = False


@dataclass(frozen=True)
class TuneOptions:
    """Options for tuning. With `--train`, only `methods`, `prompts`, `chat` and `out` can be
    given."""

    panel: ClassVar[str | None] = None
    methods: str | None = None
    budget: float = 60.0
    prompts: Path | None = None
    category: str | None = None
    limit: int = 8
    chat: bool = False
    objective: str = "speed"
    max_perplexity: str | None = None
    export: str | None = None
    out: Path | None = None


@dataclass(frozen=True)
class TuneSampling(SamplingOptions):
    """Options for choosing tokens during tuning. With `--train`, only the seed can be given."""

    not_options: ClassVar[tuple[str, ...]] = ("logprobs", *SHAPES)
    max_new_tokens: int | None = 64
    seed: int | None = 0


@dataclass(frozen=True)
class TrainingOptions:
    """Options for training an exit layer, a draft model or a head: only with `--train`."""

    panel: ClassVar[str] = "Training"
    train: bool = False
    minutes: float | None = None
    steps: int | None = None
    corpus: Path | None = None
    layer: int | None = None
    exit_layers: int = 1
    exit_head: str = "own"
    self_text: float | None = None
    batch: int | None = None
    training_length: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class ServeOptions:
    """The options of `serve`: its address, who may ask, and the decoding method."""

    panel: ClassVar[str | None] = None
    host: str = "127.0.0.1"
    port: int = 8080
    method: str | None = None
    settings: list[str] | None = None
    api_key: str | None = None
    queue: int = 16
    allow_host: list[str] | None = None
    allow_origin: list[str] | None = None


@dataclass(frozen=True)
class ServeSampling(SamplingOptions):
    """The sampling parameters of requests that name none."""

    panel: ClassVar[str] = "Sampling"
    not_options: ClassVar[tuple[str, ...]] = ("max_new_tokens", "ignore_eos", "logprobs")


@dataclass(frozen=True)
class ServeOutput(OutputOptions):
    """What `serve` shows."""

    not_options: ClassVar[tuple[str, ...]] = ("json",)


# By name: a command's help, the help of options that only it has, and the groups of options that
# its function takes.
COMMANDS: Mapping[str, tuple[str, Rows, tuple[Any, ...]]] = {
    "generate": (
        "Continue a prompt. The tokens that the draft proposed are green, the target's own plain.",
        GENERATE_ROWS,
        (GenerateOptions, DecodingGroup, GenerateSampling, GenerateOutput),
    ),
    "compare": (
        (
            "Measure methods against plain decoding and against transformers: speed, "
            "acceptance, is the output the target's?"
        ),
        COMPARE_ROWS,
        (CompareOptions, DecodingGroup, SamplingOptions, CompareOutput),
    ),
    "inspect": (
        (
            "Show a recorded run (TRACE.jsonl), a pair before it is used (--target, "
            "--draft), or the methods (--methods)."
        ),
        INSPECT_ROWS,
        (InspectOptions, TraceOptions, PairOptions, ModelGroup, OutputOptions),
    ),
    "tune": (
        (
            "Find the fastest method and its settings for a pair on this machine. With "
            "--train: train what drafts for a target."
        ),
        TUNE_ROWS,
        (TuneOptions, TrainingOptions, TuneSampling, ModelGroup, OutputOptions),
    ),
    "serve": (
        ("Serve a model to editors, chat windows and scripts: a server with OpenAI's protocol."),
        SERVE_ROWS,
        (ServeOptions, DecodingGroup, ServeSampling, ServeOutput),
    ),
}
