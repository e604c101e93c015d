"""Where an answer ends: at the special token or text that the user, the chat template or the
generation config names; and that no character is shown in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import parsed, run_main
from families import LETTERS, make_model, make_tokenizer, near_copy, save
from pair_helpers import draft_here
from tokenizer_helpers import load, metaspace, write

import specgen
from specgen.decoding.run import StopTexts
from specgen.engine.text.stop_strings import StopStrings
from specgen.pair.pair import Pair
from specgen.view.generation import AnswerText

CLOSING = "ç"  # the fourth token of the answer to "hello", which is made a special one
CLOSED = "{% if m['role'] == 'assistant' %}ç\n{% endif %}"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}" + CLOSED + "{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and its near copy, whose configs name an end-of-sequence token that the model never
    writes."""
    folder = tmp_path_factory.mktemp("ends")
    model = make_model("llama")
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": [CLOSING]})
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = model.config.eos_token_id = 0
    return save(model, folder / "target", tokenizer), save(
        near_copy(model), folder / "draft", tokenizer
    )


@pytest.fixture(scope="module")
def ends(folders: tuple[str, str]) -> Pair:
    pair = specgen.load(*folders, device="cpu", dtype="float32")
    draft_here(pair)
    return pair


@pytest.mark.parametrize("method", ["ar", "sd", "lookup"])
def test_an_answer_ends_at_the_special_token_with_which_the_template_closes_a_turn(
    ends: Pair, method: str
) -> None:
    """Though no config names it, as in fine-tunes that keep the ids of their base model."""
    assert ends.tokenizer.turn_end == CLOSING
    answer = ends.generate(MESSAGES, method, max_new_tokens=12)
    assert (answer.text, len(answer.token_ids), answer.summary["finish_reason"]) == (
        "L6L",
        4,
        "stop",
    )
    assert len(ends.generate("hello", method, max_new_tokens=12).token_ids) == 12, (
        "a text has no turns"
    )
    assert len(ends.generate(MESSAGES, method, max_new_tokens=12, ignore_eos=True).token_ids) == 12


def test_a_stop_string_may_be_the_text_of_a_special_token(ends: Pair) -> None:
    for written in (CLOSING, f" {CLOSING}\n"):
        answer = ends.generate("hello", "lookup", max_new_tokens=12, stop=["never", written])
        assert (answer.text, len(answer.token_ids), answer.summary["finish_reason"]) == (
            "L6L",
            4,
            "stop",
        )
    assert ends.tokenizer.special_id("L") is None, "an ordinary token is found in the text"


@pytest.mark.parametrize("method", ["ar", "lookup"])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (["6L" + CLOSING], "L", 4),
        (["never", f"L{CLOSING}Q"], "L6", 5),
        ([CLOSING + "Q"], "L6L", 5),
        ([f"Q{CLOSING}{CLOSING}h"], "L6L", 8),
        (["x" + CLOSING], "L6LQhd", 11),
        (["6" + CLOSING, CLOSING + "x"], "L6LQhdxR", 12),
    ],
)
def test_a_stop_string_may_mix_a_special_token_with_other_text(
    ends: Pair, folders: tuple[str, str], method: str, stop: list[str], text: str, tokens: int
) -> None:
    """The text of `generate`, of Python and of the trace end before it, and special tokens stay
    without text."""
    answer = ends.generate("hello", method, max_new_tokens=12, stop=stop)
    assert (answer.text, len(answer.token_ids)) == (text, tokens)
    assert answer.summary["finish_reason"] == ("length" if tokens == 12 else "stop")
    shown = AnswerText(
        ends.tokenizer.detokenizer(ends.tokenizer.encode("hello")),
        StopStrings.of(stop, ends.tokenizer),
    )
    pieces = [piece.text for round_ in answer.rounds for piece in shown.add(round_)]
    pieces += [piece.text for piece in shown.finish()]
    assert ("".join(pieces), shown.text) == (text, text)
    assert all(pieces)


@pytest.mark.parametrize("strings", ["6L", ["never", "6L"]])
def test_stop_strings_of_the_generation_config_end_an_answer_before_them(
    folders: tuple[str, str],
    tmp_path: Path,
    strings: object,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of text and of turns, in `compare` too, whose baselines end there as well."""
    for file in Path(folders[0]).iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(
        json.dumps({**settings, "stop_strings": strings})
    )
    models = ["-t", str(tmp_path), "-d", folders[1], "--device", "cpu", "--dtype", "float32"]
    for more in ([], ["--chat"]):
        code, out, _ = run_main(
            monkeypatch, capfd, "generate", *models, *more, "-n", "12", "--json", "hello"
        )
        summary = parsed(out)[-1]
        assert (code, summary["text"], summary["finish_reason"], summary["new_tokens"]) == (
            0,
            "L",
            "stop",
            3,
        )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    methods = "ar,lookup,transformers,transformers-assisted"
    arguments = ["compare", *models, "--prompts", str(prompts), "-m", methods, "-n", "12", "--json"]
    code, out, err = run_main(monkeypatch, capfd, *arguments)
    lines = {line["method"]: line for line in parsed(out)}
    assert (code, set(lines)) == (0, set(methods.split(","))), err
    assert {line["new_tokens"] for line in lines.values()} == {3}, lines


@pytest.mark.parametrize("kind", ["first", "prepend", "gemma"])
@pytest.mark.parametrize("prompt", ["a😀", "😀😀", "日本語 😀", "👩‍👩‍👧 é", ""])
def test_a_tokenizer_with_bytes_for_characters_shows_whole_ones_after_others(
    tmp_path: Path, kind: str, prompt: str
) -> None:
    """Also where the prompt ends in what the model repeats; `--stop` finds such a character."""
    tokenizer = load(write(tmp_path, metaspace(kind), None, {"model_type": "llama"}))
    before = tokenizer.encode(prompt)
    said = "😀😀日本 語😀 ok 👩‍👩‍👧 é😀"
    ids = tokenizer.encode_after("a", said)
    assert ids
    detokenizer = tokenizer.detokenizer(before)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == said
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    stops = StopTexts.of(["語"], tokenizer, before)
    assert stops is not None
    assert [stops.completed_by(token) for token in ids].index(True) == len(
        tokenizer.encode_after("a", said[:6])
    ) - 1
