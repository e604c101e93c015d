"""`python -m specgen.demo.recipe eval`: fresh prompts, the check of answers, scores and their table."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from families import make_model, make_tokenizer, save
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specgen.compare.prompts import load_prompts
from specgen.demo import ROLES
from specgen.demo.corpus.documents import DOMAINS, documents
from specgen.demo.corpus.held_out import is_held_out
from specgen.demo.recipe.__main__ import main
from specgen.demo.recipe.fresh_prompts import FreshPrompt, final_answer, fresh_prompts, starts_with_function
from specgen.demo.recipe.hyperparameters import Shape
from specgen.demo.recipe.tokenizer import load_tokenizer
from specgen.demo.recipe.train import model_config

NEWS = FreshPrompt(
    "news", "Article: Ada Baker won in Ashford. It took 3 days.\nSummary:", " Ada Baker won in Ashford after 3 days."
)


def question(text: str) -> str:
    return text.removeprefix("Question: ").split("\n")[0]


class TestFreshPrompts:
    def test_one_in_five_is_code_and_all_differ(self) -> None:
        prompts = fresh_prompts(200)
        assert [sum(one.category == domain for one in prompts) for domain in DOMAINS] == [40, 53, 53, 54]
        assert fresh_prompts(200) == prompts
        assert len({one.prompt for one in prompts}) == 200
        assert not {one.prompt for one in fresh_prompts(200, seed=1)} >= {one.prompt for one in prompts if one.category == "math"}

    def test_prompts_are_held_out_from_training(self) -> None:
        prompts = fresh_prompts(200)
        assert all(is_held_out(question(one.prompt)) for one in prompts if one.category == "math")
        trained = [text for text in islice(documents("math", 0), 2000) if " has " in text or " finds " in text]
        assert len(trained) > 300
        assert not any(is_held_out(question(text)) for text in trained)
        heads = [one.prompt for one in prompts if one.category == "code"][::2]  # composed functions
        assert all(is_held_out(head.split("(")[0]) for head in heads)
        code = "\n".join(islice(documents("code", 0), 3000))
        assert not any(head in code for head in heads)

    def test_answers_of_the_corpus_are_right(self) -> None:
        for one in fresh_prompts(200):
            assert one.is_right(one.answer), one
            assert one.copied_all(one.answer) is not False, one
            assert one.category != "news" or one.copied_all(one.answer) is True, one

    def test_news_answers_have_to_be_exact_and_math_answers_end_with_the_number(self) -> None:
        assert NEWS.copied_all(" Ada Baker won in Ashford after 3 days.") is True
        assert NEWS.copied_all(" Ada Baker won in Milford after 3 days.") is False
        assert NEWS.copied_all(" Ada Baker won in Ashford after 2 days.") is False
        assert NEWS.is_right("Ada Baker won in Ashford after 3 days.")
        assert not NEWS.is_right(" Ada Baker won in Ashford after 3 days!")
        assert FreshPrompt("math", "Question: Why?\nAnswer:", " The answer is 1.").copied_all(" no") is None
        assert final_answer(" 2 + 2 = 5. The answer is 5.") == "5"
        assert final_answer(" The answer is 5") is None
        math = FreshPrompt("math", "Question: What is 2 + 2?\nAnswer:", " 2 + 2 = 4. The answer is 4.")
        assert math.is_right("Four. The answer is 4.")
        assert not math.is_right(" The answer is 44.")

    @pytest.mark.parametrize(
        ("text", "good"),
        [
            ('def f(x):\n    """Doc."""\n    return x', True),
            ('def f(x):\n    """Doc."""\n    return x\n\n\ndef g(', True),  # text after the function is ignored
            ("def f(\n    x,\n):\n    return x", True),
            ("def f(x):\n    pass", True),
            ('def f(x):\n    """Doc."""', False),  # no body
            ('def f(x):\n    """Doc."""\n    return (x', False),
            ("def f(x):\n    for y in x:\n", False),
            ("def f(x):\n    return x\n  y = 1", False),
            ("def f(x):", False),
            ("x = 1", False),
        ],
    )
    def test_starts_with_function(self, text: str, good: bool) -> None:
        assert starts_with_function(text) is good


@pytest.fixture
def pair(tokenizers: Path, tmp_path: Path) -> Path:
    """An untrained pair: the same model in both roles."""
    out = shutil.copytree(tokenizers, tmp_path / "pair")
    for role in ROLES:
        LlamaForCausalLM(model_config(Shape(32, 1), load_tokenizer(out / role))).save_pretrained(out / role)
    shutil.copy(out / "target" / "model.safetensors", out / "draft")
    return out


class TestEvaluate:
    def test_a_model_agrees_with_itself(self, pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["eval", str(pair), "--prompts", "8", "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)
        assert list(scores["categories"]) == list(DOMAINS)
        for category in scores["categories"].values():
            assert category["target"] == category["draft"]
            assert category["target"]["right"] == 0
            assert category["target"]["loss"] == pytest.approx(6, abs=0.4)  # ln 400: an untrained model
            assert category["agreement"] == 1
        assert scores["mean"]["agreement"] == 1

    def test_the_draft_option_and_the_table(self, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = shutil.copytree(pair / "draft", tmp_path / "other")
        LlamaForCausalLM(AutoModelForCausalLM.from_pretrained(other).config).save_pretrained(other)
        assert main(["eval", str(pair), "--prompts", "4", "--draft", str(other)]) == 0
        table = capsys.readouterr().out
        assert [line.split()[0] for line in table.splitlines()[2:]] == [*DOMAINS, "mean"]
        assert main(["eval", str(pair), "--prompts", "4", "--draft", str(other), "--json"]) == 0
        mean = json.loads(capsys.readouterr().out)["mean"]
        assert mean["target"]["loss"] != mean["draft"]["loss"]

    def test_a_draft_with_a_different_tokenizer_is_refused(
        self, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = save(make_model("llama"), tmp_path, make_tokenizer())
        assert main(["eval", str(pair), "--prompts", "4", "--draft", other]) == 2
        assert "the tokenizers differ" in capsys.readouterr().err

    @pytest.mark.parametrize("arguments", [["--prompts", "3"], ["nowhere"]])
    def test_invalid_values(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["eval", *arguments]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_the_prompts_are_written_for_training(tmp_path: Path) -> None:
    assert main(["prompts", str(tmp_path / "fresh.jsonl"), "--prompts", "20", "--seed", "5"]) == 0
    written = [(prompt.text, prompt.category) for prompt in load_prompts(tmp_path / "fresh.jsonl")]
    assert sorted(written) == sorted((one.prompt, one.category) for one in fresh_prompts(20, 5))
    assert len({category for _, category in written[:8]}) > 2, "they are mixed"
