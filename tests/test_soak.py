"""Some runs with every lossless method on one pair, every tenth interrupted: nothing is left, and outputs are a fresh pair's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import soak
from cli_helpers import POSIX
from families import LETTERS, exit_of, make_model, make_tokenizer, near_copy, save

import specgen
from specgen.methods import METHODS
from specgen.pair.pair import Pair

PROMPTS = ["abc abc", "hello hello", "the cat sat on the mat", "x y z x y"]
pytestmark = POSIX


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Pair]:
    folder, tokenizer, model = tmp_path_factory.mktemp("soak"), make_tokenizer(LETTERS), make_model("llama")
    names = save(model, folder / "target", tokenizer), save(near_copy(model), folder / "draft", tokenizer)

    def made() -> Pair:
        pair = specgen.load(*names, device="cpu", dtype="float32")
        pair.exits.default = exit_of(pair.target, 1)
        pair._worker = None  # PEARL's draft in a thread: test_workers has the process
        return pair

    return made


@pytest.mark.slow
def test_nothing_is_left_by_many_runs_some_interrupted(make_pair: Callable[[], Pair], tmp_path: Path) -> None:
    with make_pair() as pair:  # loads what Python imports once
        for name in (name for name, method in METHODS.items() if not method.head):
            pair.generate("abc", name, specgen.SamplingParams(max_new_tokens=3), **soak.SETTINGS.get(name, {}))
    runs = soak.schedule(60, len(PROMPTS), 8, seed=3, heads=False)
    lossless = {name for name, method in METHODS.items() if method.lossless and not method.head}
    assert {run.method for run in runs} == lossless
    found = soak.soak(make_pair, PROMPTS, runs, warm=soak.WARM)
    assert found.wrong == []
    assert sum(found.interrupted.values()) == 6
    assert set(found.interrupted) == {"ctrl-c", "closed", "dropped"}
    for before, after in ((found.warm, found.end), (found.start, found.closed)):
        for name in ("threads", "children", "descriptors", "shared_mappings"):
            assert getattr(after, name) == getattr(before, name), name
    assert found.end.objects - found.warm.objects < 40  # not one for each run


def test_an_injected_interrupt_is_raised_in_the_middle_of_a_round(make_pair: Callable[[], Pair]) -> None:
    with make_pair() as pair, pytest.raises(KeyboardInterrupt) as raised, soak.keyboard_interrupt(40):
        pair.generate("abc", "svip", specgen.SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert any("specgen" in str(entry.path) for entry in raised.traceback)
