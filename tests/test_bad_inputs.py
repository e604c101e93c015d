"""Every mistake of a user ends with its exit code and one line that names what is wrong: one row a
mistake.

Rows of LIGHT are refused before torch is imported, and run one after the other in one process
without it. Rows of MODELS run in this process, with a tiny pair. In a row's arguments and words,
`{name}` stands for a path: `{file}` for the row's own file (`content`), `{model}` for a copy of the
pair's target that `change` has changed, and the others for those of `places`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import traces
from cli_helpers import run_main
from families import CONTEXT, VOCAB, make_model, make_tokenizer, save
from processes import one_by_one
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from specgen.base.errors import SpecgenError
from specgen.base.files import examples_file
from specgen.engine.weights import check_no_extra

LONG = "a" * 5000
LATIN_1 = os.fsdecode(b"caf\xe9")
NINES = "9" * 400
Change = Callable[[Path], object]


class Row(NamedTuple):
    arguments: list[str]
    words: tuple[str, ...]
    code: int = 2
    stdin: bytes = b""
    name: str = "file"  # of the row's own file
    content: str | bytes | None = None
    change: Change | None = None

    @property
    def id(self) -> str:
        return " ".join((*self.arguments, self.words[0])).encode("unicode_escape").decode()[:90]


def row(arguments: str | list[str], *words: str, **more: Any) -> Row:
    """`arguments` in one text are split at spaces."""
    return Row(arguments.split(" ") if isinstance(arguments, str) else arguments, words, **more)


def generate(options: str, *words: str, **more: Any) -> Row:
    return row(f"generate hi {options}", *words, **more)


def prompts(content: str | bytes, *words: str, name: str = "p.yaml") -> Row:
    return row("compare -m ar --prompts {file}", *words, name=name, content=content)


def trace(change: Callable[[str], str | bytes], *words: str) -> Row:
    """A trace whose text is changed."""
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in traces.a_run())
    return row("inspect {file}", *words, name="t.jsonl", content=change(content))


def start(**values: Any) -> Callable[[str], str]:
    """Sets values in the first line of a trace."""
    return lambda text: "".join(
        [json.dumps(json.loads(text.splitlines()[0]) | values) + "\n", *text.splitlines(True)[1:]]
    )


LIGHT = [
    # commands and options
    row("genrate hi", "'genrate'", "Did you mean 'generate'? See --help"),
    row("inspect", "specgen inspect --methods"),
    row("inspect --methods --pair", "--pair and --methods cannot be combined"),
    row("inspect t.jsonl --pair", "a trace and --pair cannot be combined"),
    row("inspect t.jsonl --draft-dtype int8", "a trace and --draft-dtype cannot be combined"),
    row("inspect --pair --html x.html", "--html is given without a trace"),
    row("inspect --pair --target x", "--pair is the bundled pair"),
    row("inspect t.jsonl --rounds -1", "--rounds is '-1'", "greater than or equal to 0"),
    row("inspect t.jsonl --run 0", "--run is '0'"),
    row("inspect nowhere.jsonl", "cannot read the trace nowhere.jsonl"),
    row("inspect nowhere.jsonl --html nowhere/page.html", "cannot write the page"),
    generate("another", "another", "--help"),
    generate("--tempratur 1", "--tempratur", "--temperature"),
    generate("-n 0", "-n (--max-new-tokens) is 0", "between 1"),
    generate(f"-n {NINES}", "-n (--max-new-tokens) is 999", "between 1"),
    generate("--temperature nan", "temperature is nan", "between 0"),
    generate("--temperature 1e-9", "temperature is 1e-09", "0 for greedy decoding"),
    generate("--top-p 0", "top_p is 0", "above 0"),
    generate("--top-p 2", "top_p is 2", "between 0 and 1"),
    row(["generate", "hi", "--stop", ""], "stop holds", "at least one character"),
    row(["generate", "hi", "--stop", LATIN_1], r"stop holds ('caf\udce9',), which is not UTF-8"),
    generate("--draft some/model", "--draft some/model", "--target MODEL"),
    generate("--revision main", "--revision", "--target MODEL"),
    generate("--draft-dtype int3", "there is no draft dtype 'int3'"),
    generate(
        "-t some/model --draft-dtype int8 -m lookup", "--draft-dtype int8 is given without --draft"
    ),
    row("tune --train -m sd --draft-dtype int8", "--draft-dtype cannot be combined with --train"),
    generate("--backend onnx", "'onnx'", "auto, native or transformers"),
    generate("--system x", "--system", "Add --chat"),
    # methods and settings
    generate("-m sivp", "'sivp'", "did you mean svip?", "specgen inspect --methods"),
    generate("-m ", "there is no method ''. All of them: specgen inspect --methods"),
    generate("-m eagel:policy=svip:width=2", "there is no method 'eagel'; did you mean eagle?"),
    generate("-m eagle:policy=svip:wide=2", "eagle with policy=svip has no setting 'wide'"),
    generate(
        "-m svip --set treshold=1",
        "svip has no setting 'treshold'",
        "did you mean threshold?",
        "max_draft",
    ),
    generate("-m sd --set k=0", "k is 0", "between 1 and 1,000"),
    generate("-m sd --set k", "'k'", "NAME=VALUE"),
    generate("-m sd --set policy=fixd", "'fixd'", "did you mean fixed?", "beta-ts"),
    generate("-m eesd --set exit=", "exit is empty", "leave exit out"),
    generate(
        "-m lookup --set policy=svip", "lookup", "'svip'", "Use one of fixed, heuristic, beta-ts"
    ),
    generate(
        "-m lookup --set k=3 --set policy=svip",
        "lookup with policy=svip has no setting 'k'",
        "threshold",
    ),
    generate("-m suffix --set history=maybe", "history is 'maybe'", "true or false"),
    generate(
        "-m pearl --set policy=adaptive --set draft_cost=1", "pearl drafts during", "Leave it out"
    ),
    generate("-m mtad --set beam=wide", "beam is 'wide'", "greedy, sample"),
    generate(
        "-m mtad --set policy=cali-ts",
        "mtad cannot use the policy 'cali-ts'",
        "model_prediction=false, fixed",
    ),
    generate("-m eesd-beta --set k=3", "eesd-beta has no setting 'k'", "alpha"),
    generate("-m bild -t some/model -d none", "bild needs a draft model", "--draft"),
    generate(
        "-m sd --set cape=true --set width=3", "cape adds candidates to a chain, and width is 3"
    ),
    generate("-m eesd-tree --set nodes=9 --set width=1", "nodes is 9, but width is 1"),
    generate("-m pearl --set cape=true", "pearl has no setting 'cape'"),
    generate("-m svip --set copy=0", "copy is 0", "between 1 and 32"),
    generate("-m eagle:copy=always", "copy is 'always'", "a whole number or auto or off"),
    *(
        generate(f"-m {name} --set copy=auto", f"{name} has no setting 'copy'")
        for name in ("pearl", "spectr", "ouroboros")
    ),
    generate("-m sd --set every=2", "sd has no setting 'every'"),
    generate("-m spectr --set policy=cali-ts", "its drafter does not compute predicted_acceptance"),
    generate(
        "-m sd --set translation=text --set policy=adaptive",
        "translation=text cannot use the policy 'adaptive'",
    ),
    generate(
        "-m sd --set translation=text --set width=2",
        "translation=text drafts a chain, and width is 2",
    ),
    generate("-m sd --set translation=words", "translation is 'words'"),
    row(
        "tune -t some/model -d none -m svip --export vllm",
        "svip needs a draft model, and there is none",
    ),
    row(
        "tune -t some/model -d none -m selfsd --export vllm",
        "vllm has none of the methods that can be tuned",
        "--draft",
    ),
    row(
        "tune -t some/model -m bild --export mlx -d a/b",
        "mlx has none of the methods that can be tuned. It has sd",
    ),
    row("tune --budget 1", "--budget is 1", "at least 5 seconds"),
    row("tune -m joint", "joint is only a yardstick for other methods and cannot be tuned"),
    row("tune --export vlm", "did you mean vllm"),
    row("tune --steps 3", "needs --train"),
    row("tune --train --export mlx", "--export cannot be combined with --train"),
    row("tune --objective quality", "--objective is 'quality'", "speed or perplexity"),
    row("tune --max-perplexity 0.9", "--max-perplexity is '0.9'"),
    row("tune --max-perplexity 0%", "a percentage of plain decoding's such as 105%"),
    row("tune --max-perplexity 105", "a percentage of plain decoding's such as 105%"),
    row(
        "tune --objective perplexity --max-perplexity 2",
        "--max-perplexity cannot be combined with --objective perplexity",
    ),
    row(
        "tune --objective perplexity -m sd",
        "--objective perplexity is for lossy methods, and none is tuned",
    ),
    row(
        "tune --max-perplexity 110% -m svip",
        "--max-perplexity is for lossy methods, and none is tuned",
    ),
    # comparisons
    row("compare -m sivp", "did you mean svip"),
    row("compare -m transformer", "did you mean transformers"),
    row("compare -m sd:k", "cannot read 'k'"),
    row("compare -m svip,,sd", "there is no method ''"),
    row("compare -m transformers:k=3", "transformers has no setting 'k'"),
    row("compare -m transformers-assisted:schedule=often", "schedule is 'often'"),
    row("compare --limit 0", "--limit is '0'"),
    row("compare --category codes", "'codes'", "did you mean code?"),
    row("compare --record distributions", "--record distributions", "--trace"),
    row("compare --csv /nowhere/f.csv", "CSV file", "/nowhere"),
    row("compare --resume /nowhere/t.jsonl", "/nowhere"),
    generate("--record distributions", "--record distributions", "--json"),
    generate("-m joint --temperature 1", "joint decodes greedily only"),
    row(
        "generate --prompts {file} -m joint --temperature 1",
        "joint",
        name="p.jsonl",
        content='{"prompt": "a"}',
    ),
    # the prompt
    row(["generate", " \n"], "the prompt is empty"),
    row("generate -", "the prompt is empty", stdin=b"\n"),
    row("generate -", "the prompt on standard input is not UTF-8", "iconv", stdin=b"caf\xe9"),
    row(["generate", LATIN_1], "the prompt is not UTF-8"),
    # paths
    generate("--trace {places}/no/t.jsonl", "{places}/no", "no folder"),
    generate("--trace {places}", "{places}", "is a folder"),
    *(row(["generate", "hi", option, LONG], "aaa") for option in ("--trace", "--profile")),
    *(row(["compare", f"--{name}", LONG], "aaa") for name in ["trace", "csv", "prompts", "resume"]),
    row(["tune", "--out", LONG], "aaa"),
    row("tune --out {file}/out", "{file}", content=""),
    row("tune --train --out /proc/out", "cannot write to the folder /proc/out"),
    # files
    prompts("prompts: {", "line 2 is not YAML: "),
    prompts("prompts:\n  - prompt: a\n   bad", "{file}", "line 3", "not YAML"),
    prompts("prompts: 5", "no list of prompts"),
    prompts("prompts: []", "no prompts"),
    prompts("\n", "p.txt is empty", "on each line", str(examples_file()), name="p.txt"),
    prompts("prompts: {}", "no list of prompts", str(examples_file())),
    prompts(
        "prompts: a".encode("utf-16"),
        "p.yaml is UTF-16, not UTF-8",
        "iconv -f UTF-16",
        "PowerShell",
    ),
    prompts("prompts:\n  - prompt: [1]", "prompt 1: prompt", "it is a list of 1"),
    prompts("prompts:\n  - text: a", "neither `prompt` nor `turns`"),
    prompts("prompts:\n  - prompt: ' '", "the prompt is empty"),
    prompts('{"prompt": "a"}\n{"prompt": "b', "{file}, line 2", "is not JSON", name="p.jsonl"),
    prompts('{"prompt": "\\ud800"}', "line 1", "hex escape", name="p.jsonl"),
    prompts('{"turns": "abc"}', "turns: ", "it is 'abc'", name="p.jsonl"),
    prompts('{"prompt": "a", "tuning": "yes"}', "line 1: tuning", "it is 'yes'", name="p.jsonl"),
    prompts('{"prompt": "' + "a" * (256 << 20), "larger than 256 MB", name="p.jsonl"),
    prompts(
        '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}',
        "line 1",
        "placeholder of",
        "prepare_data.py",
        name="p.jsonl",
    ),
    prompts('{"turns": ["Sum up: {article}"]}', "placeholder of SPEED-Bench", name="p.jsonl"),
    prompts("a" * ((4 << 20) + 1), "larger than 4 MB"),
    prompts(b"caf\xe9", "not UTF-8 (at byte 3)"),
    prompts("prompts: [&x a]\nmore: *x", "line 2 is not YAML: aliases (*name) are not allowed"),
    prompts("[" * 30, "more than 20 levels of nesting"),
    prompts("? [1, 2]\n: 3", "unhashable key"),
    prompts("prompts: !!python/object:os.system x", "could not determine a constructor"),
    prompts("prompts: " + "9" * 5000, "a value does not fit its type"),
    *(
        prompts(f"prompts: {number}", "no list of prompts")
        for number in ("0x" + "f" * 5000, ":".join(["59"] * 3000))
    ),
    trace(lambda _: "\n\n", "holds no run"),
    trace(lambda _: b"%PDF-1.7\n", "t.jsonl is a PDF", "Name an unchanged file from --trace"),
    trace(lambda text: text.encode("utf-16"), "t.jsonl is UTF-16"),
    trace(lambda _: "{", "line 1 is not JSON"),
    trace(lambda text: text + '"round"\n', "line 9: it has to be an object"),
    trace(lambda text: text.encode() + b"\xff\xfe{}\n{}\n", "line 9 is not JSON"),
    trace(lambda text: text + '{"type": "\\ud800"}\n', "line 9 is not JSON"),
    trace(lambda text: text + "[" * (16 << 20), "line 9: it is longer than 16 MiB"),
    trace(start(settings={"x": float("nan")}), "is not JSON (expected value"),
    trace(
        lambda text: text.replace('"temperature": 0.0', '"temperature": ' + NINES),
        "99999999999999999999 is too large",
    ),
    trace(
        lambda text: text.replace('"temperature": 0.0', '"temperature": ' + "[" * 600 + "]" * 600),
        "recursion limit exceeded",
    ),
]


def changed_config(file: str = "config.json", **values: Any) -> Change:
    """Sets keys of a JSON file in the model's folder, which may not be there."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(
            json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values)
        )

    return change


def unreadable(**values: Any) -> Change:
    """Sets keys of config.json, and empties the weights, which must not be read."""

    def change(folder: Path) -> None:
        changed_config(**values)(folder)
        (folder / "model.safetensors").write_bytes(b"")

    return change


def changed_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def written(file: str, content: bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content)


def removed(*patterns: str) -> Change:
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)]


def lost_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "model-1.safetensors"}}'
    )


def fifo(file: str) -> Change:
    def make(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return make


def profile(content: str, words: str) -> Row:
    return row(
        "generate hi --device cpu --profile {places}", words, name="profile.yaml", content=content
    )


def model(change: Change, *words: str, options: str = "-m ar -n 3", **more: Any) -> Row:
    return row(
        f"generate abc -q -t {{model}} --device cpu {options}", *words, change=change, **more
    )


def generation(words: str, **values: Any) -> Row:
    return model(changed_config("generation_config.json", **values), words)


GGUF = "Name the GGUF file itself"
TEMPLATE = "chat_template.jinja"
NATIVE = "-m ar -n 3 --backend native"
TRANSFORMERS = "-m ar -n 3 --backend transformers"
DEEP = b"[" * 100_000
MODELS = [
    generate(
        "--backend transformers --draft-dtype int8", "--draft-dtype int8 needs the native backend"
    ),
    row(
        "generate --prompts {file} -n 5 -t {target}",
        *("prompt 0", f"{3 * CONTEXT} tokens", "Shorten the prompt"),
        name="p.jsonl",
        content=json.dumps({"prompt": "a" * 3 * CONTEXT}),
    ),
    generate(
        "-t {other-ids} -d {target}",
        "tokenizers differ",
        "WordLevel",
        "translation=text",
        "-m lookup",
    ),
    row(
        f"generate {'a' * 3 * CONTEXT} -n 5 -t {{target}}",
        f"{3 * CONTEXT} tokens",
        f"{CONTEXT}",
        "Shorten the prompt",
    ),
    generate("-t {target} --context 1", "--context is 1"),
    generate("-t {target} --context 129", "--context is 129, and ", " for 128 tokens"),
    generate("-t nobody/nothing", "nobody/nothing", "Check the spelling"),
    generate("-t nothing --offline", "nothing", "offline"),
    generate("-t what?", "what?", "Check the spelling"),
    generate("-t {places}/nowhere", "{places}/nowhere", "Check the path"),
    generate("-t {target}/config.json", "{target}/config.json", "Name the folder"),
    *(row(["generate", "hi", option, LONG], "aaa") for option in ("--exit-layer", "-t")),
    generate("-t {target} --revision v2", "'v2'", "Leave the revision out"),
    generate("-t {target}@v2", "is a folder", "'v2'", "Leave the revision out"),
    generate("-t {encoder}", "{encoder} (bert) is an encoder", "decoder-only"),
    generate("-t {encoder-decoder}", "{encoder-decoder}", "decoder-only"),
    generate("-m selfsd --set skip=3,5", "skip is '3,5'", "Write layers as 3+5a+7m"),
    generate("-m selfsd --set skip=1+", "skip is '1+'"),
    generate("-m selfsd --set skip=12", "skip names layer 12. The target has the layers 0 to 11"),
    generate("-t {target} -m svip", "svip needs a draft model", "--draft", "-m lookup"),
    generate(
        "--backend transformers --dtype int8",
        "--dtype int8 needs the native backend",
        "chosen by --backend transformers",
    ),
    generate("--dtype int4", "there is no dtype 'int4'", "or int8"),
    generate("-t {target} --dtype float8", "'float8'", "auto, float32, bfloat16, float16"),
    *(
        generate(f"--device {device}", f"'{device}'", "auto, cpu, cuda")
        for device in ("gpu", "cuda:x", "meta")
    ),
    generate("--draft-device gpu", "'gpu'", "auto, cpu, cuda"),
    generate("-t ./\x1b[2J\nfolder\x9b", "␛[2J↵folder"),
    model(removed("config.json"), "{model}", "no config.json", "save_pretrained"),
    *(
        model(written("config.json", content), "configuration")
        for content in (b"{", b"[1]", b"\xff", DEEP)
    ),
    model(changed_config(model_type="unheard"), "model_type", "Install a newer transformers"),
    model(changed_config(hidden_act="unheard"), "'unheard' is unknown"),
    model(
        changed_config(quantization_config="fp8"),
        "quantization_config that is no JSON object: 'fp8'",
    ),
    *(
        row(
            f"{command} {{model}} --device cpu",
            words,
            change=unreadable(quantization_config=settings),
        )
        for command in ("generate abc -t {target} -d", "inspect -t")
        for settings, words in (
            (
                {"quant_method": "awq", "bits": 4, "group_size": 128},
                "quantised with awq, which transformers cannot load here: ",
            ),
            ({"bits": 4}, "transformers cannot load here: "),
            ({"quant_method": "gguf"}, GGUF),
        )
    ),
    generate(
        "-t {file}",
        "model.gguf",
        "the file ends within its header",
        name="model.gguf",
        content=b"GGUF",
    ),
    model(
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        "model.gguf: it is no GGUF file",
    ),
    generate(
        "-t {places}",
        "model.gguf",
        "the file ends within its header",
        name="model.gguf",
        content=b"GGUF",
    ),
    model(
        changed_config(num_hidden_layers=2**64),
        "has a num_hidden_layers above 4,096",
        options=TRANSFORMERS,
    ),
    model(
        changed_config(text_config={"num_layers": 2**64}),
        "has a num_layers above 4,096",
        options=TRANSFORMERS,
    ),
    model(
        changed_config(sliding_window="x"),
        "forward passes after a rollback fail (",
        options=TRANSFORMERS,
    ),
    model(
        changed_config("tokenizer_config.json", model_max_length="x", unusual=1),
        "cannot read the tokenizer of ",
    ),
    model(
        removed("tokenizer*"),
        "has no tokenizer: it lacks tokenizer.json",
        "vocab.txt",
        "save_pretrained",
    ),
    model(removed("model.safetensors"), "no safetensors weights", "save it again"),
    model(lost_shards, "index of weight files, but none of the files"),
    model(
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "only pytorch_model.bin",
    ),
    model(
        changed_weights(lambda weights: weights["model.norm.weight"].fill_(float("nan"))),
        "NaN",
        "float32",
        code=1,
    ),
    *(
        each
        for options in (NATIVE, TRANSFORMERS)
        for each in (
            model(
                changed_weights(lambda weights: weights.pop("model.norm.weight")),
                "norm.weight",
                options=options,
            ),
            model(
                changed_weights(lambda weights: weights.update(x=torch.ones(3))),
                "(the first: x)",
                options=options,
            ),
            model(
                changed_weights(
                    lambda weights: weights.update({"model.norm.weight": torch.ones(3)})
                ),
                "model.norm.weight is 3 in its file, but ",
                options=options,
            ),
            model(
                changed_config(num_hidden_layers=2),
                "does not describe (the first: model.layers.2.",
                options=options,
            ),
            model(written("model.safetensors", b"\xff" * 300), "weights", options=options),
            model(
                written("model.safetensors", len(DEEP).to_bytes(8, "little") + DEEP),
                "cannot read the weights",
                options=options,
            ),
            model(
                lambda folder: os.truncate(folder / "model.safetensors", 5000),
                "weights",
                options=options,
            ),
        )
    ),
    *(
        model(fifo(file), f"{file} is not a file")
        for file in ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors")
    ),
    profile("", "it is None"),
    profile("a: [", "is not YAML"),
    profile("a: &x 1\nb: *x", "aliases"),
    profile("version: 2", "version: it has to be 1"),
    # generation_config.json
    *(
        model(written("generation_config.json", content), "{model}/generation_config.json", "is no")
        for content in (b"", b"[]", b"\xff", DEEP, b'{"a": ' + b"9" * 5000 + b"}")
    ),
    *(
        generation("generation_config.json: repetition_penalty", repetition_penalty=value)
        for value in ("abc", 0, float("nan"), 1e300, 1e-300, 10**400, True)
    ),
    *(
        generation("generation_config.json: eos_token_id", eos_token_id=value)
        for value in (1.5, [[1]], -1, "x", {})
    ),
    *(
        generation("generation_config.json: no_repeat_ngram_size", no_repeat_ngram_size=value)
        for value in (-3, 1.5)
    ),
    *(
        generation("generation_config.json: suppress_tokens", suppress_tokens=value)
        for value in ("x", [-1], 5)
    ),
    *(
        generation("generation_config.json: sequence_bias", sequence_bias=value)
        for value in ([[[1], 1e300]], [[[1], float("inf")]], [[[1], "x"]], {"x": 1})
    ),
    *(
        generation(name, **{name: value})
        for name, value in (("num_beams", 4), ("guidance_scale", 1.5), ("forced_eos_token_id", 2))
    ),
    generation("generation_config.json: bad_words_ids", bad_words_ids=[[]]),
    model(
        lambda folder: [
            change(folder)
            for change in (
                removed("generation_config.json"),
                changed_config(repetition_penalty="x"),
            )
        ],
        "/config.json: repetition_penalty",
    ),
    generation("forbids all tokens", suppress_tokens=list(range(5000))),
    # chat templates
    model(removed(TEMPLATE), "no chat template", "Leave --chat out", options="--chat"),
    model(
        written(TEMPLATE, b"{{ raise_exception('no\nway\x1b') }}"),
        "refuses these turns: no↵way␛",
        options="--chat",
    ),
    model(
        written(TEMPLATE, b"{% for"),
        "the model's chat template refuses these turns: ",
        options="--chat",
    ),
    model(written(TEMPLATE, b"{{ messages.append(1) }}"), "unsafe", options="--chat"),
    model(
        written(TEMPLATE, b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
        "maximum recursion depth",
        options="--chat",
    ),
]


# ------------------------------------------------------------------ the tests


def check(row: Row, code: int, out: str, err: str, places: Mapping[str, str]) -> None:
    assert code == row.code, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert err[:-1].isprintable()
    assert len(err) < 1100
    assert "?." not in err  # a question mark ends its sentence
    assert "Traceback" not in err
    for word in row.words:
        assert word.format_map(places) in err


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Mapping[str, str]]]:
    """What each row of LIGHT gave."""
    folder = tmp_path_factory.mktemp("light")
    named = [with_file(row, folder / str(number)) for number, row in enumerate(LIGHT)]
    commands = [
        [part.format_map(places) for part in row.arguments]
        for row, places in zip(LIGHT, named, strict=True)
    ]
    return list(zip(one_by_one(*commands, stdin=[row.stdin for row in LIGHT]), named, strict=True))


def with_file(row: Row, folder: Path) -> dict[str, str]:
    """Writes the row's own file. Returns the paths that the row may name."""
    folder.mkdir()
    if row.content is not None:
        content = row.content if isinstance(row.content, bytes) else row.content.encode()
        (folder / row.name).write_bytes(content)
    return {"places": str(folder), "file": str(folder / row.name)}


@pytest.mark.skipif(
    sys.platform in ("win32", "darwin"),
    reason="there, no argument can hold bytes that are not UTF-8",
)
@pytest.mark.parametrize("number", range(len(LIGHT)), ids=lambda number: LIGHT[number].id)
def test_a_mistake_is_named_before_torch_is_imported(
    light: list[tuple[Any, Mapping[str, str]]], number: int
) -> None:
    ended, places = light[number]
    check(LIGHT[number], ended.code, ended.out, ended.err, places)
    assert not ended.has_torch


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, pair: tuple[str, ...]) -> Mapping[str, str]:
    parent = tmp_path_factory.mktemp("places")
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    bert = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        vocab_size=VOCAB,
    )
    return {
        "target": pair[1],
        "draft": pair[3],
        "other-ids": save(make_model("llama"), parent / "other-ids", make_tokenizer()),
        "encoder-decoder": save(t5, parent / "encoder-decoder"),
        "encoder": save(BertForMaskedLM(bert), parent / "encoder"),
    }


@pytest.mark.skipif(sys.platform == "win32", reason="needs FIFOs")
@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.id)
def test_a_wrong_model_is_named(
    row: Row,
    places: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    named = {**places, **with_file(row, tmp_path / "own"), "model": str(tmp_path / "model")}
    if row.change is not None:
        row.change(Path(shutil.copytree(places["target"], tmp_path / "model")))
    found = run_main(monkeypatch, capfd, *(part.format_map(named) for part in row.arguments))
    check(row, *found, named)


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [("cuda", 0, "no CUDA device"), ("cuda:99", 2, "This machine has 2: cuda:0")],
)
def test_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    device: str,
    count: int,
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    row = generate(f"--device {device}", words)
    check(row, *run_main(monkeypatch, capfd, *row.arguments), {})


# ------------------------------------------------------------------ odd, but accepted


def test_ids_beyond_the_vocabulary_change_nothing(
    places: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(places["target"], tmp_path / "model"))
    ids = [10**9, 10**30]
    fields = {
        "eos_token_id": ids,
        "suppress_tokens": ids,
        "begin_suppress_tokens": ids,
        "min_length": 10**30,
    }
    (folder / "generation_config.json").write_text(json.dumps(fields))
    command = [
        "generate",
        "abc",
        "-m",
        "ar",
        "-n",
        "3",
        "-q",
        "--device",
        "cpu",
        "--ignore-eos",
        "-t",
    ]
    found, expected = (
        run_main(monkeypatch, capfd, *command, model) for model in (str(folder), places["target"])
    )
    assert found == expected
    assert found[0] == 0


def test_layers_that_predict_several_tokens_are_expected_where_the_config_has_them() -> None:
    names = ["model.layers.2.a.weight", "model.layers.2.b.weight"]
    check_no_extra(names, "m", 2, prediction_layers=1)
    for layers, prediction_layers in ((2, 0), (1, 1), (3, 1)):
        with pytest.raises(
            SpecgenError, match=r"m has 2 tensors .* \(the first: model.layers.2.a.weight\)"
        ):
            check_no_extra(names, "m", layers, prediction_layers)


def test_too_long_a_prompt_on_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data = io.BytesIO(bytes(40 << 20))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data))
    code, out, err = run_main(monkeypatch, capfd, "generate", "-n", "3")
    assert (code, out, err) == (
        2,
        "",
        "error: the prompt on standard input is longer than 16 MiB. Give a part of it\n",
    )
    assert data.tell() < 20 << 20
