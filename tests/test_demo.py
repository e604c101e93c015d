"""The demo pair and its recipe: corpus, tokenizer, training loop, bundled weights, and the example prompts."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml

from specgen.demo import ROLES, folder
from specgen.demo.__main__ import main
from specgen.demo.corpus import DOMAINS, documents
from specgen.demo.facts import COUNTRIES, HOWTOS
from specgen.demo.stream import TokenStream
from specgen.demo.tokenizer import MIX, load_tokenizer, train_tokenizer
from specgen.demo.train import Progress, Recipe, Shape, learning_rate_factor, train
from specgen.errors import SpecgenError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples.yaml"
TINY = Recipe(Shape(hidden_size=32, layers=1, heads=2), learning_rate=0.1, steps=16, batch_size=4, window=48)
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def first(domain: str, count: int, seed: int = 0) -> list[str]:
    return list(islice(documents(domain, seed), count))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pair")
    train_tokenizer(out, vocabulary_size=400, characters=60_000)
    return out


@pytest.fixture
def out(tokenizers: Path, tmp_path: Path) -> Path:
    """A pair's folder with a tokenizer and no weights."""
    return shutil.copytree(tokenizers, tmp_path / "pair")


class TestCorpus:
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_the_seed_decides(self, domain: str) -> None:
        assert first(domain, 30) == first(domain, 30)
        assert first(domain, 30) != first(domain, 30, seed=1)

    @pytest.mark.parametrize(
        ("domain", "digest"),
        [("math", "59ca3fd3f7e0d69c"), ("news", "2fe69e17303f0531"), ("chat", "a93825e54b517b58")],
    )
    def test_the_templates_say_what_the_bundled_pair_learned(self, domain: str, digest: str) -> None:
        text = "\0".join(first(domain, 200))
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest

    @pytest.mark.parametrize(
        ("domain", "openings"),
        [
            ("math", [r" has \d+ ", "A shop sells", "A train travels", "shares"]),
            ("news", ["A fire broke out", "has won the", "The council in", "Scientists in"]),
            (
                "chat",
                ["capital of", "Tell me about", "How do I", "spelled", "letters are in", "plus", "larger", "Count"],
            ),
        ],
    )
    def test_every_form_turns_up(self, domain: str, openings: list[str]) -> None:
        texts = first(domain, 300)
        for opening in openings:
            assert any(re.search(opening, text) for text in texts), opening

    def test_the_forms_have_their_marks(self) -> None:
        assert all(re.fullmatch(r"Question: .+\nAnswer: .+ The answer is \d+\.", text) for text in first("math", 200))
        assert all(re.fullmatch(r"Article: .+\nSummary: .+\.", text) for text in first("news", 200))
        chats = first("chat", 200)
        assert all(re.match(r"User: .+\nAssistant: .+", text) for text in chats)
        assert {text.count("User: ") for text in chats} == {1, 2}

    def test_the_code_is_the_standard_library(self) -> None:
        texts = first("code", 200)
        assert len(set(texts)) >= 195  # some libraries have a file twice, or an empty one
        assert sum("import " in text for text in texts) > 150

    def test_the_sums_are_right(self) -> None:
        for text in first("math", 400):
            sums = re.findall(r"(\d+) ([*+-]) (\d+) = (-?\d+)", text)
            assert sums, text
            for left, operator, right, result in sums:
                assert OPERATIONS[operator](int(left), int(right)) == int(result), text
            assert text.endswith(f"The answer is {sums[-1][3]}.")

    def test_the_assistant_counts_and_adds(self) -> None:
        text = "\n".join(first("chat", 600))
        for a, b, result in re.findall(r"(\d+) \+ (\d+) = (\d+)", text):
            assert int(a) + int(b) == int(result)
        for a, b in re.findall(r"(\d+) is larger than (\d+)", text):
            assert int(a) > int(b)
        for word, letters in re.findall(r"The word (\w+) has (\d+) letters", text):
            assert len(word) == int(letters)
        for word, spelled in re.findall(r"The word (\w+) is spelled ([A-Z-]+)\.", text):
            assert spelled.replace("-", "").lower() == word

    def test_the_facts_are_whole(self) -> None:
        assert all(len(row) == 5 and all(row) for row in COUNTRIES)
        assert all(len(steps.splitlines()) == 5 for steps in HOWTOS.values())

    def test_help_and_folders_need_no_torch(self) -> None:
        code = "import sys, specgen.demo.__main__, specgen.demo.corpus; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestTokenizer:
    @pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 東京 🚀", "  two  spaces ", "User: Hi\nAssistant:"])
    def test_any_text_comes_back(self, tokenizers: Path, text: str) -> None:
        tokenizer = load_tokenizer(tokenizers / "target")
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text

    def test_special_tokens(self, tokenizers: Path) -> None:
        tokenizer = load_tokenizer(tokenizers / "draft")
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        assert tokenizer("one").input_ids[0] == tokenizer.bos_token_id
        assert len(tokenizer) == 400

    def test_the_chat_template_is_the_corpus_form(self, tokenizers: Path) -> None:
        turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "Why?")]
        messages = [{"role": role, "content": content} for role, content in turns]
        tokenizer = load_tokenizer(tokenizers / "target")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<s>User: Hi\nAssistant: Hello.\nUser: Why?\nAssistant:"

    def test_both_roles_have_the_same(self, tokenizers: Path) -> None:
        target, draft = ((tokenizers / role / "tokenizer.json").read_bytes() for role in ROLES)
        assert target == draft

    def test_a_vocabulary_without_room_for_bytes(self, tmp_path: Path) -> None:
        with pytest.raises(SpecgenError, match="at least 259"):
            train_tokenizer(tmp_path, vocabulary_size=258)


class TestStream:
    def test_windows_follow_on(self, tokenizers: Path) -> None:
        windows = TokenStream(load_tokenizer(tokenizers / "target"), seed=0, window=32).batch(5)
        assert windows.shape == (5, 33)
        assert windows.dtype == torch.int64
        assert torch.equal(windows[:-1, -1], windows[1:, 0])

    def test_a_stream_taken_up_again_goes_on_the_same(self, tokenizers: Path) -> None:
        tokenizer = load_tokenizer(tokenizers / "target")
        stream = TokenStream(tokenizer, seed=3, window=100)
        stream.batch(80)
        state = stream.state()
        expected = stream.batch(80)
        again = TokenStream(tokenizer, seed=3, window=100)
        again.restore(state)
        assert torch.equal(again.batch(80), expected)

    def test_the_domains_keep_their_shares(self, tokenizers: Path) -> None:
        stream = TokenStream(load_tokenizer(tokenizers / "target"), seed=0, window=200)
        stream.batch(200)
        used = stream.state()["used"]
        assert {d: used[d] / sum(used.values()) for d in MIX} == pytest.approx(MIX, abs=0.03)


class Interruption:
    """A report that stops the run after a step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, progress: Progress) -> None:
        if progress.step == self.step:
            raise KeyboardInterrupt


class TestTraining:
    def test_the_loss_falls(self, out: Path) -> None:
        reports: list[Progress] = []
        train("draft", replace(TINY, steps=40), out, device="cpu", report=reports.append, report_every=8)
        assert [report.step for report in reports] == [8, 16, 24, 32, 40]
        assert reports[-1].share == 1
        assert reports[-1].tokens == 40 * TINY.batch_size * TINY.window
        assert reports[-1].loss < reports[0].loss - 0.5
        assert (out / "draft" / "model.safetensors").is_file()

    def test_interrupted_and_resumed_is_the_same(self, tokenizers: Path, tmp_path: Path) -> None:
        whole, parts = (shutil.copytree(tokenizers, tmp_path / name) for name in ("whole", "parts"))
        train("draft", TINY, whole, device="cpu")
        for step in (7, 12):
            with pytest.raises(KeyboardInterrupt):
                train("draft", TINY, parts, device="cpu", report=Interruption(step), report_every=1, checkpoint_every=5)
        torch.manual_seed(random.randrange(1000))  # what else went on in the process has no say
        train("draft", TINY, parts, device="cpu", checkpoint_every=5)
        weights = [(path / "draft" / "model.safetensors").read_bytes() for path in (whole, parts)]
        assert weights[0] == weights[1]
        assert sorted(path.name for path in parts.iterdir()) == ["draft", "target"]

    def test_a_budget_in_minutes_ends(self, out: Path) -> None:
        reports: list[Progress] = []
        train("draft", replace(TINY, steps=None, minutes=0.3 / 60), out, device="cpu", report=reports.append)
        assert reports[-1].share == 1

    def test_another_recipe_does_not_take_up_the_checkpoint(self, out: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            train("draft", TINY, out, device="cpu", report=Interruption(2), report_every=1, checkpoint_every=1)
        with pytest.raises(SpecgenError, match=r"learning_rate: 0\.1, now 0\.001"):
            train("draft", replace(TINY, learning_rate=0.001), out, device="cpu")

    def test_a_broken_checkpoint_is_named(self, out: Path) -> None:
        (out / "draft.checkpoint.pt").write_bytes(b"PK\x03\x04 cut short")
        with pytest.raises(SpecgenError, match="cannot be read"):
            train("draft", TINY, out, device="cpu")

    def test_the_learning_rate_warms_up_and_falls_to_a_tenth(self) -> None:
        assert learning_rate_factor(0, 0.0) == pytest.approx(0.01)
        assert learning_rate_factor(99, 0.0) == pytest.approx(1.0)
        assert learning_rate_factor(5000, 1.0) == pytest.approx(0.1)

    def test_shapes(self) -> None:
        assert Shape(256, 12) == Shape(256, 12, heads=4)
        assert Shape(256, 12).intermediate_size == 704
        for sizes in [(0, 1), (64, 0), (64, 1, -2), (66, 1, 4), (6, 1, 2)]:
            with pytest.raises(SpecgenError):
                Shape(*sizes)

    @pytest.mark.parametrize(
        "change",
        [{"steps": None}, {"minutes": 1.0}, {"steps": 0}, {"learning_rate": float("nan")}, {"window": 2000}],
    )
    def test_recipes_that_make_no_sense(self, change: dict[str, float | None]) -> None:
        with pytest.raises(SpecgenError):
            Recipe(**{"shape": TINY.shape, "learning_rate": 1e-3, "steps": 1} | change)


class TestCommandLine:
    def test_a_missing_tokenizer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["draft", str(tmp_path), "--steps", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "python -m specgen.demo tokenizer" in error

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--steps", "0"],
            ["--minutes", "nan"],
            ["--hidden-size", "100", "--heads", "3"],
            ["--checkpoint-every", "0"],
            ["--batch-size", "-1"],
            pytest.param(["--device", "cuda"], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")),
        ],
    )
    def test_bad_values(self, out: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["draft", str(out), *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("arguments", [[], ["nothing"], ["draft"], ["draft", "o", "--steps", "1", "--minutes", "1"]])
    def test_bad_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_file_is_no_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        assert main(["tokenizer", str(tmp_path / "file")]) == 2
        assert "is not a folder" in capsys.readouterr().err

    def test_a_run(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = "--steps 2 --batch-size 2 --window 16 --hidden-size 32 --layers 1 --heads 2 --device cpu"
        assert main(["draft", str(out), *options.split()]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "step 2" in captured.err


class TestBundledPair:
    @pytest.mark.parametrize("role", ROLES)
    def test_weights_are_safetensors_alone(self, role: str) -> None:
        data = {path.name for path in folder(role).iterdir() if path.suffix not in {".json", ".jinja"}}
        assert data == {"model.safetensors"}

    @pytest.mark.parametrize("role", ROLES)
    def test_it_loads(self, role: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder(role), local_files_only=True)
        tokenizer = load_tokenizer(folder(role))
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer)
        prompt = tokenizer("User: What is the capital of France?\nAssistant: The capital of", return_tensors="pt")
        with torch.inference_mode():
            logits = model(input_ids=prompt.input_ids).logits
        assert tokenizer.decode(logits[0, -1].argmax().item()) == " France"

    def test_another_role(self) -> None:
        with pytest.raises(ValueError, match="target, draft"):
            folder("judge")


@pytest.fixture(scope="module")
def examples() -> list[dict[str, str]]:
    prompts: list[dict[str, str]] = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))["prompts"]
    return prompts


class TestExamples:
    def test_every_category_has_at_least_seven(self, examples: list[dict[str, str]]) -> None:
        counts = Counter(example["category"] for example in examples)
        assert set(counts) == set(DOMAINS)
        assert min(counts.values()) >= 7
        assert len(examples) >= 28

    def test_no_two_are_the_same(self, examples: list[dict[str, str]]) -> None:
        for name in ("id", "prompt"):
            assert len({example[name] for example in examples}) == len(examples)

    def test_they_have_the_forms_of_the_corpus(self, examples: list[dict[str, str]]) -> None:
        forms = {"math": r"Question: .+\nAnswer:", "news": r"Article: .+\nSummary:", "chat": r"User: .+\nAssistant:"}
        for example in examples:
            assert set(example) == {"id", "category", "prompt"}
            assert example["prompt"] == example["prompt"].strip()
            form = forms.get(example["category"], r"[\s\S]*\b(class|def)\b")
            assert re.match(form, example["prompt"]), example["id"]

    @pytest.mark.parametrize("domain", ["math", "news", "chat"])
    def test_they_are_not_the_training_text(self, examples: list[dict[str, str]], domain: str) -> None:
        openings = tuple(example["prompt"] for example in examples if example["category"] == domain)
        assert not any(text.startswith(openings) for text in first(domain, 3000))
