"""Every mistake is reported in one line with the wrong value and a remedy, and ends with the documented exit code.

Mistakes that are refused before torch is imported are tested in one process without torch, most others in this process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from cli_helpers import run_main
from families import CONTEXT, VOCAB, WORDS, make_model, make_tokenizer, save
from processes import Forked, one_by_one
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

RUN_FAILED, USER_ERROR = 1, 2
DEVICES, WRONG_DEVICES = ("--device", "--draft-device"), ("gpu", "cuda:x", "meta")
Folders = Mapping[str, str]
Fails = Callable[..., str]


def refused_together(*commands: Sequence[str], stdin: Sequence[bytes] = ()) -> list[tuple[str, str]]:
    """The stdout and stderr of each command. Checks that all are refused with exit code 2 before torch is imported."""
    found = one_by_one(*commands, stdin=stdin)
    assert [(ended.code, ended.has_torch) for ended in found] == [(USER_ERROR, False)] * len(commands)
    return [(ended.out, ended.err) for ended in found]


def check_line(out: str, err: str, named: tuple[str, ...]) -> None:
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    for text in named:
        assert text in err
    assert "?." not in err  # a question mark ends its sentence


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Fails:
    """Run `specgen generate` in this process: its error line, which has to contain each of `named`."""

    def call(*arguments: str, named: tuple[str, ...], code: int = USER_ERROR) -> str:
        found, out, err = run_main(monkeypatch, capfd, "generate", *arguments)
        assert found == code
        check_line(out, err, named)
        return err

    return call


# ------------------------------------------------------------------ refused before anything heavy is imported


OPTIONS: list[tuple[list[str], tuple[str, ...]]] = [
    (["-m", "sivp"], ("'sivp'", "did you mean svip?", "specgen inspect --methods")),
    (["-m", "SVIP"], ("'SVIP'", "did you mean svip?")),
    (["-m", "eagle:policy=svip:width=2"], ("'eagle:policy=svip:width=2'", "-m eagle --set policy=svip --set width=2")),
    (["-m", "svip", "--set", "treshold=1"], ("svip has no setting 'treshold'", "did you mean threshold?", "max_draft")),
    (["-m", "ar", "--set", "k=1"], ("ar has no setting 'k'",)),
    (["-m", "sd", "--set", "k=abc"], ("k is 'abc'", "whole number")),
    (["-m", "sd", "--set", "k=2.5"], ("k is '2.5'", "whole number")),
    (["-m", "sd", "--set", "k=0"], ("k is 0", "between 1 and 1,000")),
    (["-m", "joint", "--set", "nodes=10"], ("nodes is 10", "between 16 and 1,048,576")),
    (["-m", "eesd", "--set", "exit="], ("exit is empty", "leave exit out")),
    (["-m", "svip", "--set", "threshold=nan"], ("threshold is nan", "between 0 and 100")),
    (["-m", "sd", "--set", "k"], ("'k'", "NAME=VALUE")),
    (["-m", "sd", "--set", "policy=fixd"], ("'fixd'", "did you mean fixed?", "beta-ts")),
    (["-m", "lookup", "--set", "policy=svip"], ("lookup", "'svip'", "Use one of fixed, heuristic, beta-ts")),
    (["-m", "lookup", "--set", "k=3", "--set", "policy=svip"], ("lookup with policy=svip has no setting 'k'", "threshold")),
    (["-m", "lookup", "--set", "k=3", "--set", "max_draft=9"], ("lookup with policy=fixed has no setting 'max_draft'",)),
    (["-m", "lookup", "--set", "kk=3"], ("lookup has no setting 'kk'", "did you mean k?")),
    (["-m", "suffix", "--set", "policy=svip"], ("suffix", "'svip'", "Use one of fixed, heuristic, confidence")),
    (["-m", "suffix", "--set", "min_prob=1.5"], ("min_prob is 1.5", "between 0 and 1")),
    (["-m", "suffix", "--set", "factor=0"], ("factor is 0", "between 0.1 and 1,000")),
    (["-m", "suffix", "--set", "history=maybe"], ("history is 'maybe'", "true or false")),
    (["-m", "pearl", "--set", "policy=adaptive", "--set", "draft_cost=1"], ("pearl drafts during", "Leave it out")),
    (["-m", "mtad", "--set", "tau=2"], ("tau is 2", "between 0 and 1")),
    (["-m", "mtad", "--set", "beams=0"], ("beams is 0", "between 1 and 256")),
    (["-m", "mtad", "--set", "beam=wide"], ("beam is 'wide'", "greedy, sample")),
    (["-m", "eesd-beta", "--set", "policy=svip"], ("eesd-beta has no setting 'policy'", "alpha")),
    (["-m", "mtad", "--set", "policy=cali-ts"], ("mtad cannot use the policy 'cali-ts'", "model_prediction=false, fixed")),
    (["-m", "bild", "-t", "some/model"], ("bild needs a draft model", "--draft")),
    (["-n", "0"], ("max_new_tokens is 0", "at least 1")),
    (["-n", "-5"], ("max_new_tokens is -5", "at least 1")),
    (["-n", "9" * 400], ("max_new_tokens is above 2^40", "smaller")),
    (["--top-k", str(2**40 + 1)], ("top_k is above 2^40", "smaller")),
    (["-n", "abc"], ("--max-new-tokens is 'abc'", "integer")),
    (["--temperature", "-1"], ("temperature is -1", "between 0")),
    (["--temperature", "nan"], ("temperature is nan", "between 0")),
    (["--temperature", "1e-9"], ("temperature is 1e-09", "0 for greedy decoding")),
    (["--temperature", "1e9"], ("temperature is 1000000000", "between 0")),
    (["--temperature", "warm"], ("--temperature is 'warm'", "number")),
    (["--top-p", "0"], ("top_p is 0", "above 0")),
    (["--top-p", "2"], ("top_p is 2", "at most 1")),
    (["--top-p", "nan"], ("top_p is nan", "at most 1")),
    (["--top-k", "-1"], ("top_k is -1", "0 for no cut")),
    (["--seed", "-1"], ("seed is -1", "from 0")),
    (["--stop", ""], ("stop holds", "at least one character")),
    (["--tempratur", "1"], ("--tempratur", "--temperature")),
    (["--draft", "some/model"], ("--draft some/model", "--target MODEL")),
    (["--revision", "main"], ("--revision", "--target MODEL")),
    (["--backend", "onnx"], ("'onnx'", "auto, native or transformers")),
    (["--system", "Be brief."], ("--system", "Add --chat")),
    (["another"], ("another", "--help")),
]
PROMPTS: dict[str, tuple[list[str], bytes, tuple[str, ...]]] = {
    "argument": ([""], b"", ("the prompt is empty",)),
    "blank-argument": ([" \n"], b"", ("the prompt is empty",)),
    "standard-input": ([], b"", ("the prompt is empty",)),
    "blank-standard-input": (["-"], b"\n", ("the prompt is empty",)),
    "latin-1": (["-"], b"caf\xe9", ("standard input is not UTF-8", "byte 3", "iconv")),
}


@pytest.fixture(scope="module")
def wrong_options() -> list[tuple[str, str]]:
    return refused_together(*(["generate", "hi", *arguments] for arguments, _ in OPTIONS))


@pytest.fixture(scope="module")
def no_prompts() -> Mapping[str, tuple[str, str]]:
    commands = [["generate", *arguments] for arguments, _, _ in PROMPTS.values()]
    found = refused_together(*commands, stdin=[stdin for _, stdin, _ in PROMPTS.values()])
    return dict(zip(PROMPTS, found, strict=True))


@pytest.mark.parametrize("position", range(len(OPTIONS)), ids=lambda position: " ".join(OPTIONS[position][0]))
def test_a_wrong_option_is_named_with_its_value(wrong_options: list[tuple[str, str]], position: int) -> None:
    check_line(*wrong_options[position], OPTIONS[position][1])


def test_an_unknown_command_is_named_and_inspect_needs_an_argument() -> None:
    unknown, nothing, both = refused_together(["genrate", "hi"], ["inspect"], ["inspect", "--methods", "--pair"])
    check_line(*both, ("--methods lists the methods, and --pair is given too",))
    check_line(*unknown, ("'genrate'", "Did you mean 'generate'? See --help"))
    check_line(*nothing, ("specgen inspect --methods",))


@pytest.mark.parametrize("name", PROMPTS)
def test_an_empty_prompt_is_refused(no_prompts: Mapping[str, tuple[str, str]], name: str) -> None:
    check_line(*no_prompts[name], PROMPTS[name][2])


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="there, no argument can hold such bytes")
def test_an_argument_that_is_not_utf8_is_refused() -> None:
    system = ["generate", "hi", "--chat", "--system", os.fsdecode(b"\xff")]
    prompt, message = refused_together(["generate", os.fsdecode(b"caf\xe9")], system)
    check_line(*prompt, ("the prompt is not UTF-8",))
    check_line(*message, ("--system is not UTF-8",))


def test_a_trace_needs_an_existing_folder(tmp_path: Path) -> None:
    missing = ["generate", "hi", "--trace", str(tmp_path / "no" / "t.jsonl")]
    nowhere, folder = refused_together(missing, ["generate", "hi", "--trace", str(tmp_path)])
    check_line(*nowhere, (str(tmp_path / "no"), "no folder"))
    check_line(*folder, (str(tmp_path), "is a folder"))


def test_a_mistake_leaves_an_old_trace_unchanged(tmp_path: Path, fails: Fails) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("precious")
    fails("hi", "-t", str(tmp_path / "no"), "--trace", str(trace), named=("no folder",))
    assert trace.read_text() == "precious"


# ------------------------------------------------------------------ refused when models are opened, or later


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    parent = tmp_path_factory.mktemp("cli-errors")
    model = make_model("llama")
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}
    return {
        "good": save(model, parent / "good"),
        "other-ids": save(model, parent / "other-ids", make_tokenizer([*WORDS[:3], *reversed(WORDS[3:])])),
        "encoder-decoder": save(t5, parent / "encoder-decoder"),
        "recurrent": save(MambaForCausalLM(MambaConfig(vocab_size=VOCAB, **sizes)), parent / "recurrent"),
    }


@pytest.mark.skipif(sys.platform == "win32", reason="needs forks")
def test_a_missing_folder_in_a_new_process(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    process = Forked("generate", "hi", "-t", missing)
    out, err = process.communicate(timeout=120)
    assert process.returncode == USER_ERROR
    check_line(out.decode(), err.decode(), (missing, "Check the path"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("abc -t {good} -d {other-ids}", ("tokenizers differ", "{good}", "WordLevel", "translation=text", "-m lookup")),
        (f"{'a' * 3 * CONTEXT} -n 5 -t {{good}}", (f"{3 * CONTEXT} tokens", f"{CONTEXT}", "Shorten the prompt")),
        (f"{'a' * CONTEXT} -n 1 -t {{good}}", ("1 over", "Shorten the prompt")),
        ("hi -t nobody/nothing", ("nobody/nothing", "Check the spelling")),
        ("hi -t nothing", ("nothing", "Check the spelling")),
        ("hi -t nothing --offline", ("nothing", "offline")),
        ("hi -t what?", ("what?", "Check the spelling")),
        ("hi -t {good}/config.json", ("{good}/config.json", "Name the folder")),
        ("hi -t {good} --revision v2", ("'v2'", "Leave the revision out")),
        ("abc -t {encoder-decoder}", ("{encoder-decoder}", "decoder-only")),
        ("abc -t {good} -d {encoder-decoder}", ("{encoder-decoder}", "decoder-only")),
        ("abc -t {recurrent}", ("{recurrent}", "attention in every layer")),
        ("abc -t {good} -d {recurrent}", ("{recurrent}", "attention in every layer")),
        ("abc -t {good} -m svip", ("svip needs a draft model", "--draft", "-m lookup")),
        ("abc -t {good} --chat", ("no chat template", "Leave --chat out")),
        ("abc -t {good} --dtype float8", ("'float8'", "auto, float32, bfloat16, float16")),
        *((f"hi {option} {device}", (f"'{device}'", "auto, cpu, cuda")) for option, device in product(DEVICES, WRONG_DEVICES)),
        ("hi -t ./\x1b[2J\nfolder\x9b", ("␛[2J↵folder",)),
    ],
)
def test_wrong_models_and_devices_are_named(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, fails: Fails, arguments: str, named: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = [argument.format_map(folders) for argument in arguments.split(" ")]
    assert fails(*given, named=tuple(name.format_map(folders) for name in named)).rstrip("\n").isprintable()


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def change_config(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def lose_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "model-1.safetensors"}}')


NAN = change_weights(lambda weights: weights["model.norm.weight"].fill_(float("nan")))


@pytest.mark.parametrize(
    ("damage", "named", "code"),
    [
        (lambda folder: (folder / "config.json").unlink(), ("no config.json", "save_pretrained"), USER_ERROR),
        (lambda folder: (folder / "config.json").write_text("{"), ("configuration",), USER_ERROR),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            ("only pytorch_model.bin", "convert it to safetensors"),
            USER_ERROR,
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 300), ("weights",), USER_ERROR),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), ("weights",), USER_ERROR),
        (
            change_weights(lambda weights: weights.pop("model.norm.weight")),
            ("model.norm.weight", "Download or save it again"),
            USER_ERROR,
        ),
        (
            lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
            ("has no tokenizer: it lacks tokenizer.json", "vocab.txt", "save_pretrained"),
            USER_ERROR,
        ),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            ("has no tokenizer: it lacks tokenizer.json", "vocab.txt", "save_pretrained"),
            USER_ERROR,
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), ("no safetensors weights", "save it again"), USER_ERROR),
        (lose_shards, ("index of weight files, but none of the files",), USER_ERROR),
        (change_config(model_type="unheard"), ("model_type", "Install a newer transformers"), USER_ERROR),
        (change_config(hidden_act="unheard"), ("'unheard' is unknown",), USER_ERROR),
        (change_config(quantization_config="fp8"), ("quantization_config that is no JSON object: 'fp8'",), USER_ERROR),
        (NAN, ("NaN", "--dtype float32"), RUN_FAILED),
    ],
    ids=[
        "no-config",
        "config",
        "pickled",
        "noise",
        "half",
        "tensor",
        "tokenizer",
        "tokenizer.json",
        "no-weights",
        "shards",
        "type",
        "act",
        "fp8",
        "nan",
    ],
)
def test_a_damaged_model_is_named(
    folders: Folders, tmp_path: Path, fails: Fails, damage: Callable[[Path], object], named: tuple[str, ...], code: int
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(folders["good"], folder)
    damage(folder)
    fails("abc", "-t", str(folder), named=named if damage is NAN else (str(folder), *named), code=code)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_trace_on_a_full_disk_is_a_failure_of_the_run_and_the_text_is_shown(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(monkeypatch, capfd, "generate", "abc", "-q", "-t", folders["good"], "--trace", "/dev/full")
    assert code == RUN_FAILED
    assert len(out) > 10
    check_line("", err, ("/dev/full", "No space left"))


@pytest.mark.parametrize(
    ("device", "count", "named"),
    [
        ("cuda", 0, ("no CUDA device", "Leave --device out to use the CPU")),
        ("cuda:99", 0, ("no CUDA device", "Leave --device out to use the CPU")),
        ("cuda:99", 2, ("cuda:99", "This machine has 2: cuda:0 to cuda:1")),
    ],
)
def test_a_gpu_that_is_not_there(
    fails: Fails, monkeypatch: pytest.MonkeyPatch, device: str, count: int, named: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    fails("hi", "--device", device, named=named)
