"""A published model: every method gives the ids of transformers' own `generate`, and each command
works on it.

Skipped where the model is not installed; see `published_model`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import parsed, run_main
from families import plain, with_exit
from head_layouts import write_head
from pair_helpers import draft_here
from published_model import draft_folder, needs_published_model, target_folder
from recipe.published_prompts import held_out_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgen
from specgen import demo, methods
from specgen.base.settings import parse_pairs
from specgen.pair.pair import Pair

pytestmark = needs_published_model

Message = dict[str, str]
RunMain = Callable[..., tuple[int, str, str]]

COUNT = 12  # new tokens
QUESTION: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
COPYING: list[Message] = [
    {"role": "user", "content": "Repeat this twice: the quick brown fox jumps over the lazy dog."}
]
# of the draft, on a few prompts: it was 0.31
ACCEPTANCE_PROMPTS = 6
ACCEPTANCE_TOKENS = 40
LEAST_ACCEPTANCE = 0.30
EXIT_DEPTH = 3  # the layer after which the untrained exit drafts
HEADS = {"medusa": "medusa-v2", "eagle": "eagle1", "glide": "glide", "block": "block-zlab"}
# the model has no layers of its own for it, see `test_mtp.py` for models that have
NO_HEAD = {"mtp"}
DRAFTS = ("layers", "bundled", "none")

# Settings that spare a search, and further forms of a method.
SETTINGS = {"selfsd": ("skip=8+15+20",), "pearl": ("window=4",)}
MORE = (
    "sd:k=8",
    "sd:width=2:depth=3",
    "sd:policy=svip",
    "lookup:k=10",
    "suffix:k=6",
    "svip:threshold=0.9",
)
LOSSLESS = [name for name, method in methods.METHODS.items() if method.lossless] + list(MORE)
LOSSY = [name for name, method in methods.METHODS.items() if not method.lossless]


@cache
def reference() -> Any:
    """The model in float32 by transformers."""
    return AutoModelForCausalLM.from_pretrained(target_folder(), dtype=torch.float32)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(target_folder())


@cache
def ids_of_chat(text: str) -> list[int]:
    """The prompt that transformers makes from messages, which `text` holds as JSON."""
    encoded = tokenizer().apply_chat_template(json.loads(text), add_generation_prompt=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def prompt_of(messages: list[Message]) -> list[int]:
    return ids_of_chat(json.dumps(messages))


@cache
def expected(text: str) -> list[int]:
    """What transformers generates after the messages in `text`, as JSON."""
    return plain(reference(), ids_of_chat(text), COUNT)


@cache
def pair_with(draft: str) -> Pair:
    """The model in float32 with its own draft, with the bundled one (other tokens), or without a
    draft."""
    drafts = {"layers": str(draft_folder()), "bundled": str(demo.folder("draft")), "none": None}
    pair = specgen.load(str(target_folder()), drafts[draft], device="cpu", dtype="float32")
    draft_here(pair)  # PEARL's draft in this process
    return with_exit(pair, EXIT_DEPTH)


@cache
def head_pair(head: Path) -> Pair:
    return specgen.load(str(target_folder()), device="cpu", dtype="float32", head=head)


def generated(pair: Pair, written: str, prompt: list[int]) -> list[int]:
    name, *given = written.split(":")
    settings = dict(parse_pairs([*SETTINGS.get(name, ()), *given]))
    sampling = specgen.SamplingParams(max_new_tokens=COUNT)
    return pair.generate(prompt, name, sampling, **settings).token_ids


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a random head for the model."""

    @cache
    def made(method: str) -> Path:
        torch.manual_seed(0)
        return write_head(tmp_path_factory.mktemp(method), HEADS[method], target_folder())

    return made


def drafts_of(written: str) -> tuple[str, ...]:
    method = methods.METHODS[written.split(":")[0]]
    return ("layers", "bundled") if method.uses_draft_model else ("none",)


CASES = [(written, draft) for written in LOSSLESS for draft in drafts_of(written)]


@pytest.mark.parametrize(("written", "draft"), CASES)
def test_lossless_methods_give_the_ids_of_transformers(
    written: str, draft: str, heads: Callable[[str], Path]
) -> None:
    name = written.split(":")[0]
    if name in NO_HEAD:
        with pytest.raises(specgen.SpecgenError, match="mtp"):
            generated(pair_with(draft), written, prompt_of(QUESTION))
        return
    pair = head_pair(heads(name)) if name in HEADS else pair_with(draft)
    copies = draft == "none"  # drafts that the text itself suggests
    for messages in (QUESTION, COPYING) if copies else (QUESTION,):
        assert generated(pair, written, prompt_of(messages)) == expected(json.dumps(messages))


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_methods_run(name: str) -> None:
    ids = generated(pair_with("layers"), name, prompt_of(QUESTION))
    assert 1 <= len(ids) <= COUNT


def test_a_trace_of_rejections() -> None:
    """The draft of fifteen layers is often rejected, so many of the committed tokens are the
    target's."""
    story = [{"role": "user", "content": held_out_prompts()[1]}]
    result = pair_with("layers").generate(prompt_of(story), "sd", max_new_tokens=COUNT)
    assert result.summary["drafted"] > result.summary["accepted"]


def test_the_draft_is_accepted() -> None:
    """As often as when it was made, on prompts of which it has learned none."""
    accepted = drafted = 0
    for prompt in held_out_prompts()[:ACCEPTANCE_PROMPTS]:
        messages = [{"role": "user", "content": prompt}]
        sampling = specgen.SamplingParams(max_new_tokens=ACCEPTANCE_TOKENS)
        summary = pair_with("layers").generate(messages, "sd", sampling, k=3).summary
        accepted += summary["accepted"]
        drafted += summary["drafted"]
    assert accepted / drafted >= LEAST_ACCEPTANCE


def test_the_chat_template_and_the_end_of_the_turn() -> None:
    pair = pair_with("none")
    result = pair.generate(QUESTION, "ar", max_new_tokens=40)
    ids = plain(reference(), prompt_of(QUESTION), 40)
    assert result.token_ids == ids
    assert ids[-1] == 2
    assert result.summary["finish_reason"] == "eos"
    assert result.text == "The capital of France is Paris."


def test_a_conversation_of_two_turns() -> None:
    """The second turn's prompt holds the first answer, whose passes are not run again."""
    pair = pair_with("none")
    first = pair.generate(QUESTION, "suffix", max_new_tokens=40)
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = pair.generate(turns, "suffix", max_new_tokens=COUNT)
    assert second.token_ids == plain(reference(), prompt_of(turns), COUNT)


def test_a_long_prompt() -> None:
    """2,000 tokens of prompt; the same ids as transformers', by a method that copies."""
    sentences = (f"Line {number}: the value is {number * 7 % 101}." for number in range(400))
    prompt = tokenizer()("\n".join(sentences))["input_ids"][:2000]
    result = pair_with("none").generate(prompt, "suffix", max_new_tokens=8)
    assert result.token_ids == plain(reference(), prompt, 8)
    assert result.summary["accepted"] > 0


def command(*arguments: str) -> tuple[str, ...]:
    return (*arguments, "--target", str(target_folder()), "--device", "cpu")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunMain:
    """Runs the command in this process: its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_main(monkeypatch, capfd, *arguments)

    return run


def test_generate_streams_the_answer_and_its_rounds(invoke: RunMain) -> None:
    arguments = command("generate", "--draft", "none", "--chat", QUESTION[0]["content"], "--json")
    code, out, _ = invoke(*arguments, "--dtype", "float32", "-n", "20")
    assert code == 0
    start, *rounds, summary = parsed(out)
    assert start["dtype"] == "float32"
    assert start["prompt_ids"] == prompt_of(QUESTION)
    committed = [token for line in rounds for token in [*line["accepted_ids"], line["token_id"]]]
    assert [token for token in committed if token is not None] == summary["token_ids"]
    assert summary["text"] == "The capital of France is Paris."
    assert summary["finish_reason"] == "eos"


def test_compare_finds_the_same_output(invoke: RunMain) -> None:
    names = "suffix,lookup,svip,transformers"
    arguments = command("compare", "--methods", names, "--draft", str(draft_folder()), "--json")
    code, out, _ = invoke(*arguments, "--limit", "2", "-n", "8", "--repeats", "1")
    assert code == 0
    lines = [line for line in parsed(out) if line["type"] == "method"]
    stored = "transformers:dtype=bfloat16"  # the baseline in the dtype of the model's files
    assert [line["method"] for line in lines] == ["ar", *names.split(","), stored]
    assert all(line["identical"] + line["tied"] == 2 for line in lines)


def test_tune_saves_a_profile_that_generate_uses(
    invoke: RunMain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    arguments = command("tune", "--draft", "none", "--budget", "10", "--json")
    code, out, _ = invoke(*arguments)
    assert code == 0
    (tuned,) = parsed(out)
    assert Path(tuned["profile"]).exists()
    code, out, _ = invoke(*command("generate", "--draft", "none", "x", "-n", "4", "--json"))
    assert code == 0
    assert parsed(out)[0]["method"] == tuned["chosen"]["method"]


def test_inspect_describes_the_pair(invoke: RunMain) -> None:
    code, out, _ = invoke(*command("inspect", "--draft", str(draft_folder()), "--json"))
    assert code == 0
    (report,) = parsed(out)
    assert "llama" in json.dumps(report).lower()
