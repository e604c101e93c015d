"""The bytes of tokens, the translation between two vocabularies, and kappa, the share of tokens
that are one token in both."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from cli_helpers import parsed, run_main
from foreign_tokenizers import write_model
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizer_helpers import CORPUS, LLAMA, TEXTS, byte_level, load, metaspace, other_model, write
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from specgen.engine.text import translation as overlaps
from specgen.engine.text.token_bytes import NoTokenBytes, token_bytes
from specgen.engine.text.tokenizer import Tokenizer
from specgen.engine.text.translation import Translation, token_overlap
from specgen.tune import pair_inspection
from specgen.view import pair_report as words

KINDS = ["byte-level", "first", "prepend", "gemma"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@cache
def tokenizer(kind: str, folder: Path) -> Tokenizer:
    declared = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return load(
        write(
            folder / kind,
            byte_level() if kind == "byte-level" else metaspace(kind),
            NAMED | declared,
            LLAMA,
        )
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("token_bytes")


def plain(found: Tokenizer, text: str) -> list[int]:
    assert found.pipeline is not None
    ids: list[int] = found.pipeline.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_encoded_text_are_the_text(kind: str, folder: Path) -> None:
    found = tokenizer(kind, folder)
    tokens = token_bytes(found)
    assert token_bytes(found) is tokens
    for text in (text for text in (*TEXTS, *CORPUS) if "<" not in text and "fox" not in text):
        text = text.replace("\u2581", " ")  # SentencePiece cannot tell its mark from a space
        ids = plain(found, text)
        expected = " " + text if kind in ("first", "prepend") and text else text
        # `first` adds none before a space
        accepted = {expected, text} if text.startswith(" ") else {expected}
        assert tokens.of_ids(ids).decode() in accepted, text
        if kind != "prepend":
            assert all(
                tokens.ids[piece] == id_ for id_ in ids if (piece := tokens.pieces[id_]) is not None
            )
    assert tokens.special == {"bos": 1, "eos": 2, "unk": 0}
    assert tokens.names[2] == "</s>"
    assert tokens.pieces[2] is None


def test_of_two_tokens_with_the_same_bytes_the_emitted_one_counts(folder: Path) -> None:
    found = tokenizer("first", folder)
    tokens = token_bytes(found)
    vocabulary = found.vocabulary()
    assert tokens.pieces[vocabulary["<0x6F>"]] == tokens.pieces[vocabulary["o"]] == b"o"
    assert tokens.ids[b"o"] == vocabulary["o"]
    translation = Translation(tokenizer("byte-level", folder), found)
    of_target = tokenizer("byte-level", folder).vocabulary()["o"]
    assert (
        translation.draft_to_target[vocabulary["<0x6F>"]]
        == translation.draft_to_target[vocabulary["o"]]
        == of_target
    )
    assert translation.target_to_draft[of_target] == vocabulary["o"]


def changed(step: str) -> str:
    pipeline = Pipeline.from_str(byte_level())
    pipeline.normalizer = getattr(normalizers, step)()
    changed: str = pipeline.to_str()
    return changed


REFUSED = [
    (lambda: other_model("WordLevel"), "a WordLevel model"),
    (lambda: other_model("WordPiece"), "a WordPiece model"),
    (lambda: changed("Lowercase"), r"changes the text before it splits it \(Lowercase\)"),
    (lambda: changed("NFKC"), "NFKC"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_tokenizers_without_bytes_are_refused(
    make: Callable[[], str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NoTokenBytes, match=reason):
        token_bytes(load(write(tmp_path, make(), {}, LLAMA)))


PAIRS = [(target, draft) for target in KINDS for draft in KINDS if target != draft]


@cache
def translation(target: str, draft: str, folder: Path) -> Translation:
    return Translation(tokenizer(target, folder), tokenizer(draft, folder), {2}, {2, 5})


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_every_token_is_spelled_with_its_bytes(target: str, draft: str, folder: Path) -> None:
    made = pickle.loads(pickle.dumps(translation(target, draft, folder)))
    for id_, piece in enumerate(made.target.pieces):
        if piece is not None:
            assert made.draft.of_ids(made.spelling(id_)) == piece
        single = made.target_to_draft[id_]
        assert single < 0 or made.spelling(id_) == (single,)
    assert made.common == sum(id_ >= 0 for id_ in made.target_to_draft) > 100
    assert made.target_to_draft[2] == 2
    assert made.draft_to_target[2] == 2
    assert made.draft_to_target[5] == 2  # another token that ends the draft's outputs
    assert made.spelling(10**6) == (0,)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(st.sampled_from("ab \n\tThe quick12\u00e9\u65e5\U0001f600(.")))
def test_prompts_are_translated_as_the_draft_would_encode_them(
    target: str, draft: str, folder: Path, text: str
) -> None:
    made = translation(target, draft, folder)
    # its tokens do not tell whether there was a space
    assume(target != "first" or not text.startswith(" "))
    ids = tokenizer(target, folder).encode(text)
    assert made.prompt(ids) == tokenizer(draft, folder).encode(text)
    later = made.prompt(tokenizer(target, folder).encode(f"{text}</s>{text}"))
    assert later[: later.index(2)] == tokenizer(draft, folder).encode(text)
    assert made.draft.of_ids(later[later.index(2) :]).decode() == text


def test_special_tokens_that_the_draft_lacks_are_text(folder: Path, tmp_path: Path) -> None:
    pipeline = Pipeline.from_str(byte_level())
    pipeline.add_special_tokens([AddedToken("<turn>", special=True)])
    pipeline.add_tokens([AddedToken("\n\n\n", normalized=False)])
    target = load(
        write(
            tmp_path,
            pipeline.to_str(),
            NAMED | {"tokenizer_class": "PreTrainedTokenizerFast"},
            LLAMA,
        )
    )
    draft = tokenizer("first", folder)
    made = Translation(target, draft)
    ids = target.encode("<turn>The\n\n\ndog</s>fox")
    assert made.target.names[ids[0]] == "<turn>"
    assert made.target.pieces[ids[2]] == b"\n\n\n"
    assert made.prompt(ids) == [*draft.encode("<turn>The\n\n\ndog"), 2, *made.spelling(ids[-1])]
    assert made.draft.of_ids(made.spelling(ids[0])) == b"<turn>"


def pieces(folder: Path, *longer: str) -> Tokenizer:
    """A byte-level tokenizer of single characters and of longer tokens, each of which is merged
    left to right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marked = [token.replace(" ", "Ġ") for token in longer]
    vocabulary = {token: id_ for id_, token in enumerate([*alphabet, *marked])}
    pipeline = Pipeline(
        models.BPE(vocab=vocabulary, merges=[(token[:-1], token[-1]) for token in marked])
    )
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return load(
        write(folder, pipeline.to_str(), {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA)
    )


def test_kappa_against_a_count_by_hand(tmp_path: Path) -> None:
    """`the cat sat` ten times: the target's tokens are `the`, ` c`, `a`, `t`, ` `, `s`, `a`, `t`
    (after the first: ` the`)."""
    target = pieces(tmp_path / "target", "th", "the", " c")
    draft = pieces(tmp_path / "draft", "th", "the", "sa", "sat", "at")
    text = "the cat sat"
    assert [draft.text_of([token]) for token in draft.encode(text, special=False)] == [
        "the",
        " ",
        "c",
        "at",
        " ",
        "sat",
    ]
    found = token_overlap(target, draft, [text] * 4)
    assert (found.covered, found.tokens, found.is_output) == (4 * 2, 4 * 8, False), (
        "`the` and the second space"
    )
    assert found.kappa == 0.25
    assert found.expected_run == pytest.approx(1 / 3)
    assert found.is_low
    assert (found.vocabulary, found.common) == (259, 258), "all but ` c`"
    assert token_overlap(target, target, [text] * 4).kappa == 1
    assert token_overlap(target, draft, [text]).kappa is None, "of eight tokens it would say little"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    parent = tmp_path_factory.mktemp("models")
    return cache(lambda name: write_model(parent / name.replace(" ", "-"), name))


Folders = Callable[[str], str]
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def specgen_(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, with what it writes to stdout and stderr."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", "400")
        capfd.readouterr()  # of what has saved the models
        found, out, err = run_main(monkeypatch, capfd, *arguments, "--device", "cpu")
        assert found == code, err
        return out, err

    return call


def test_inspect_prices_the_overlap(
    folders: Folders, specgen_: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured. What it shows without measuring is in `golden/pair.txt`."""
    monkeypatch.setattr(overlaps, "LOW", 0.99)
    pair = ("inspect", "-t", folders("byte-level"), "-d", folders("other merges"))
    monkeypatch.setattr(
        pair_inspection, "time_passes", lambda _, widths, length: dict.fromkeys(widths, 0.01)
    )
    monkeypatch.setattr(pair_inspection, "measure_parallel", lambda *_: None)
    out, _ = specgen_(*pair, "--measure")
    assert "of the tokens of the target's output are one token in both (kappa)" in out
    assert "· tokens     " in out, "a draft pass takes as long as one of the target"
    assert "so drafts in common tokens are slower, unless the draft was trained" in out
    assert out.count(words.ALTERNATIVES) == 1
    line = parsed(specgen_(*pair, "--measure", "--json")[0])[0]
    assert line["tokenizers"]["overlap"]["is_output"]
    assert line["measured"]["at_kappa"]["speedup"] < 1


def test_what_works_without_token_bytes_runs_and_the_rest_says_why(
    folders: Folders, specgen_: Run, tmp_path: Path
) -> None:
    """Of a draft with a WordPiece tokenizer, drafts by way of their text; and methods without a
    draft model."""
    pair = ("-t", folders("byte-level"), "-d", folders("word piece"), "-n", "8")
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("prompts: [{prompt: the quick dog}]", encoding="utf-8")
    compare = ("compare", *pair, "--prompts", str(prompts), "--repeats", "1", "--methods")
    generate = ("generate", "the quick", *pair)
    for command in (generate, (*generate, "-m", "sd"), (*compare, "sd:k=2")):
        (line,) = specgen_(*command, code=2)[1].splitlines()
        for part in (
            "their tokens cannot be translated",
            "WordPiece",
            "sd:translation=text",
            "-m lookup",
        ):
            assert part in line
    found = parsed(specgen_(*compare, "sd,sd:translation=text,pearl,adaptive,lookup", "--json")[0])
    lines = {line["method"]: line for line in found}
    assert [lines[name]["identical"] for name in ("ar", "sd:translation=text", "lookup")] == [1] * 3
    assert all(
        "tokens cannot be translated" in lines[name]["error"]
        for name in ("sd", "pearl", "adaptive")
    )
    tune = (
        "tune",
        *pair,
        "--prompts",
        str(prompts),
        "--budget",
        "5",
        "--out",
        str(tmp_path / "out"),
        "--methods",
    )
    (tuned,) = parsed(specgen_(*tune, "sd,lookup", "--json")[0])
    assert "lookup" in tuned["predicted"]
    assert "tokens cannot be translated" in tuned["left_out"]["sd"]
    message = specgen_(*tune, "sd,pearl", code=2)[1].splitlines()[-1]
    assert message.startswith("error: no method can be tuned: sd: the tokenizers differ")
