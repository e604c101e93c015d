"""The bundled demo pair, the corpus and tokenizer it was trained with, and the example prompts."""

from __future__ import annotations

import ast
import hashlib
import math
import random
import re
import string
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specgen.base.errors import SpecgenError
from specgen.demo import ROLES, folder
from specgen.demo.corpus import standard_library
from specgen.demo.corpus.documents import DOMAINS, documents
from specgen.demo.corpus.exercises import exercise, module
from specgen.demo.corpus.standard_library import library_function
from specgen.demo.recipe.tokenizer import load_tokenizer, train_tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples.yaml"


def value(side: str) -> int:
    """The value of one side of an equation with +, - and *."""
    total = 0
    for term in re.findall(r"-? ?\d+(?: \* \d+)*", side):
        total += (-1 if term[0] == "-" else 1) * math.prod(map(int, re.findall(r"\d+", term)))
    return total


def digest_of(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def first(domain: str, count: int, seed: int = 0) -> list[str]:
    return list(islice(documents(domain, seed), count))


class TestCorpus:
    @pytest.mark.slow
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_documents_depend_only_on_the_seed(self, domain: str) -> None:
        assert first(domain, 12) == first(domain, 12) != first(domain, 12, seed=1)

    @pytest.mark.parametrize(
        ("domain", "digest"),
        [("math", "00b4746ab41499c1"), ("news", "2c77059c123a6e9d"), ("chat", "07b550c5c4bdbf51")],
    )
    def test_generated_documents_do_not_change(self, domain: str, digest: str) -> None:
        assert digest_of(first(domain, 200)) == digest
        assert first(domain, 30) != first(domain, 30, seed=1)

    def test_generated_modules_do_not_change(self) -> None:
        rng = random.Random(0)
        assert digest_of([module(rng) for _ in range(200)]) == "08a926a25de7436a"

    def test_code_is_valid_python(self) -> None:
        for text in first("code", 120):
            ast.parse(text)
        rng = random.Random(1)
        assert not any("$" in module(rng) for _ in range(300))

    def test_exercises_do_what_their_names_say(self) -> None:
        rng = random.Random(5)
        functions = {text.split("(")[0]: text for text in (exercise(rng) for _ in range(3000))}
        namespace: dict[str, Any] = {}
        for name in ("is_prime", "gcd", "median", "bubble_sort", "sum_even", "binary_search", "keep_digits"):
            exec(functions[f"def {name}"], namespace)
        assert [n for n in range(20) if namespace["is_prime"](n)] == [2, 3, 5, 7, 11, 13, 17, 19]
        assert namespace["gcd"](48, 36) == 12
        assert namespace["median"]([5, 1, 4]) == 4
        assert namespace["bubble_sort"]([3, 1, 2]) == [1, 2, 3]
        assert namespace["sum_even"]([1, 2, 4]) == 6
        assert namespace["binary_search"]([1, 4, 9], 9) == 2
        assert namespace["keep_digits"]("a1b2") == "12"

    @pytest.mark.slow
    def test_held_out_library_files_are_not_trained(self) -> None:
        held_out_files, trained = (set(standard_library._files(held_out)[0]) for held_out in (True, False))
        assert held_out_files.isdisjoint(trained)
        assert 0.03 < len(held_out_files) / len(held_out_files | trained) < 0.1
        for held_out, files in ((True, held_out_files), (False, trained)):
            rng = random.Random(0)
            functions = {text for file in files for text in standard_library._functions(file)}
            assert {library_function(rng, held_out=held_out) for _ in range(15)} <= functions

    def test_equations_are_correct(self) -> None:
        for text in first("math", 400):
            equations = re.findall(r"\d+(?: [*+-] \d+)+(?: = \d+(?: [*+-] \d+)*)+", text)
            assert equations, text
            for equation in equations:
                assert len({value(side) for side in equation.split(" = ")}) == 1, text
            if not text.startswith("Sums:"):
                assert text.endswith(f"The answer is {equations[-1].rsplit(' = ', 1)[1]}.")

    def test_chat_arithmetic_spelling_and_repetition_are_correct(self) -> None:
        text = "\n".join(first("chat", 600))
        for a, b, result in re.findall(r"(\d+) \+ (\d+) = (\d+)", text):
            assert int(a) + int(b) == int(result)
        for a, b in re.findall(r"(\d+) is larger than (\d+)", text):
            assert int(a) > int(b)
        for word, letters in re.findall(r"The word (\w+) has (\d+) letters", text):
            assert len(word) == int(letters)
        for word, spelled in re.findall(r"The word (\w+) is spelled ([A-Z-]+)\.", text):
            assert spelled.replace("-", "").lower() == word
        exchanges = re.findall(r"(Repeat these words|Say this backwards): (.+)\.\nAssistant: (.+)\.", text)
        assert {how for how, _, _ in exchanges} == {"Repeat these words", "Say this backwards"}
        for how, words, answer in exchanges:
            assert answer.split(", ") == words.split(", ")[:: 1 if how.startswith("Repeat") else -1]

    def test_help_and_corpus_do_not_import_torch(self) -> None:
        code = "import sys, specgen.demo.recipe.__main__, specgen.demo.corpus.documents; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestTokenizer:
    @pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 東京 🚀", "  two  spaces ", "User: Hi\nAssistant:"])
    def test_decoding_restores_any_text(self, tokenizers: Path, text: str) -> None:
        tokenizer = load_tokenizer(tokenizers / "target")
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text

    def test_each_digit_is_one_token_and_both_roles_have_the_same_tokenizer(self, tokenizers: Path) -> None:
        tokenizer = load_tokenizer(tokenizers / "draft")
        digits = [token for token in tokenizer.get_vocab() if any(c in string.digits for c in token)]
        assert sorted(digits) == list(string.digits)
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        assert tokenizer("one").input_ids[0] == tokenizer.bos_token_id
        assert len(tokenizer) == 400
        target, draft = ((tokenizers / role / "tokenizer.json").read_bytes() for role in ROLES)
        assert target == draft

    def test_the_chat_template_gives_the_form_of_the_corpus(self, tokenizers: Path) -> None:
        turns = [("user", "Hi"), ("assistant", "Hello."), ("user", "Why?")]
        messages = [{"role": role, "content": content} for role, content in turns]
        tokenizer = load_tokenizer(tokenizers / "target")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<s>User: Hi\nAssistant: Hello.\nUser: Why?\nAssistant:"

    def test_a_vocabulary_too_small_for_bytes_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SpecgenError, match="at least 259"):
            train_tokenizer(tmp_path, vocabulary_size=258)


class TestBundledPair:
    @pytest.mark.parametrize("role", ROLES)
    def test_models_load_and_know_a_fact(self, role: str) -> None:
        from transformers import AutoModelForCausalLM

        assert {path.name for path in folder(role).iterdir() if path.suffix not in {".json", ".jinja"}} == {"model.safetensors"}
        model = AutoModelForCausalLM.from_pretrained(folder(role), local_files_only=True)
        tokenizer = load_tokenizer(folder(role))
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer)
        prompt = tokenizer("User: What is the capital of France?\nAssistant: The capital of", return_tensors="pt")
        with torch.inference_mode():
            logits = model(input_ids=prompt.input_ids).logits
        assert tokenizer.decode(logits[0, -1].argmax().item()) == " France"

    def test_an_unknown_role_is_refused(self) -> None:
        with pytest.raises(ValueError, match="target, draft"):
            folder("judge")


@pytest.fixture(scope="module")
def examples() -> list[dict[str, str]]:
    prompts: list[dict[str, str]] = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))["prompts"]
    return prompts


class TestExamples:
    def test_every_category_has_at_least_seven_different_prompts(self, examples: list[dict[str, str]]) -> None:
        counts = Counter(example["category"] for example in examples)
        assert set(counts) == set(DOMAINS)
        assert min(counts.values()) >= 7
        assert len(examples) >= 28
        for name in ("id", "prompt"):
            assert len({example[name] for example in examples}) == len(examples)

    def test_prompts_have_the_forms_of_the_corpus(self, examples: list[dict[str, str]]) -> None:
        forms = {"math": r"Question: .+\nAnswer:", "news": r"Article: .+\nSummary:", "chat": r"User: .+\nAssistant:"}
        for example in examples:
            assert set(example) == {"id", "category", "prompt"} | ({"tuning"} & set(example))
            assert example["prompt"] == example["prompt"].strip()
            form = forms.get(example["category"], r"[\s\S]*\b(class|def)\b")
            assert re.match(form, example["prompt"]), example["id"]

    @pytest.mark.parametrize("count", [400, pytest.param(3000, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_prompts_are_not_in_the_training_text(self, examples: list[dict[str, str]], domain: str, count: int) -> None:
        trained = "\n\n".join(first(domain, count))
        assert not any(example["prompt"] in trained for example in examples if example["category"] == domain)
