"""The store of trained parts: found, named, loaded once, described, refused; and the commands that
use them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import parsed
from families import BACKENDS, LETTERS, make_model, make_tokenizer, random_predictor, save
from head_layouts import write_head
from safetensors.torch import load_file
from training_helpers import invoke, opened

import specgen
from specgen import demo
from specgen.base import files as paths
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.engine.parts.own_layers import ExitWeights, default_exit_depth, make_runners
from specgen.engine.parts.part import MedusaWeights
from specgen.engine.parts.trained_part import (
    EXIT_DESCRIPTION,
    ExitDescription,
    describe_head,
    open_part,
    save_exit,
    save_head,
)
from specgen.engine.weights import weights_fingerprint
from specgen.models.parts import PartStore
from specgen.pair.pair import Pair

PROMPT = [1, 5, 6, 7, 8, 9]
WEIGHTS = paths.EXIT_WEIGHTS
LAYOUTS = {"eagle": "eagle3", "other": "eagle1", "medusa": "medusa-v2", "glide": "glide"}


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, exits after its layers 1 (with a predictor) and 2 (without), and random heads."""
    parent = tmp_path_factory.mktemp("parts")
    target = Path(
        save(make_model("llama", num_hidden_layers=8), parent / "target", make_tokenizer(LETTERS))
    )
    for name, after in (("first", 1), ("second", 2)):
        save_untrained(parent / name, target, after, predictor=after == 1)
    for name, layout in LAYOUTS.items():
        write_head(parent / name, layout, target)
    return parent


def save_untrained(
    out: Path, target: Path, after: int, *, predictor: bool = False, **described: Any
) -> Path:
    """An untrained exit; returns the path of its weights."""
    description = ExitDescription(
        "here", weights_fingerprint(target), after, predictor=predictor, **described
    )
    tensors = opened(target).model.last_layers(target, description.layers)
    return save_exit(out, tensors, random_predictor(32) if predictor else None, description)


@pytest.fixture
def pair(folder: Path) -> Pair:
    return specgen.load(str(folder / "target"), device="cpu", dtype="float32")


def called(*arguments: str) -> tuple[int, str, str]:
    result = invoke([*arguments, "--device", "cpu", "--dtype", "float32"])
    return result.exit_code, result.stdout, result.stderr


# exit layers and their files


def test_a_saved_exit_is_read_back_on_both_backends(folder: Path, tmp_path: Path) -> None:
    targets = [opened(folder / "target", backend) for backend in BACKENDS]
    tensors = targets[0].model.last_layers(folder / "target", 1)
    tensors = {
        name: torch.randn_like(weight).bfloat16().float()
        for name, weight in sorted(tensors.items())
    }
    described = ExitDescription(
        "here", weights_fingerprint(folder / "target"), 1, predictor=True, figures={"x": 0.123456}
    )
    path = save_exit(tmp_path, tensors, random_predictor(32), described)
    content = path.read_bytes()
    stored = load_file(path)
    assert {name for name in stored if name.startswith("exit.")} == {
        f"exit.{name}" for name in tensors
    }
    assert all(
        torch.equal(stored[f"exit.{name}"].float(), weight) for name, weight in tensors.items()
    )
    assert all(weight.dtype == torch.bfloat16 for weight in stored.values())
    assert save_exit(tmp_path, tensors, random_predictor(32), described).read_bytes() == content
    rows = []
    for target in targets:
        for named in (path, tmp_path, tmp_path / EXIT_DESCRIPTION):
            part = open_part(named, target, is_exit=True)
            weights = part.load()
            assert isinstance(weights, ExitWeights)
            assert (weights.after, part.has_predictor, part.path) == (1, True, path)
            assert part.description is not None
            assert part.description.figures == {"x": 0.1235}
        draft = make_runners(weights, target.model, None, lambda: None).draft
        rows.append(draft.logits(specgen.base.types.Context(PROMPT), [8, 9]).logits)
    torch.testing.assert_close(*rows, atol=2e-4, rtol=1e-3)
    small = save_exit(
        tmp_path / "small", tensors, None, replace(described, own_head=False, predictor=False)
    )
    assert small.stat().st_size < path.stat().st_size, "the target's own head is not saved"
    open_part(small, targets[0], is_exit=True).load()


def test_digests_change_with_the_files_and_need_no_part_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "specgen.models.parts.open_part", lambda *_, **__: pytest.fail("a part is opened")
    )
    with specgen.load(device="cpu", dtype="float32") as loaded:
        store = loaded.parts
        digests = store.digests()
        assert digests.keys() == {"exit", "medusa", "eagle", "glide", "block"}
        assert len(set(digests.values())) == len(digests)

        shutil.copytree(demo.exit_folder(), tmp_path / "exit")
        monkeypatch.setattr(demo, "exit_folder", lambda: tmp_path / "exit")
        assert store.digests() == digests
        description = tmp_path / "exit" / EXIT_DESCRIPTION
        description.write_text(description.read_text() + "# changed")
        changed = store.digests()
        assert changed.pop("exit") != digests.pop("exit")
        assert changed == digests
        description.unlink()
        assert "exit" not in store.digests()


EXIT_MISTAKES = [
    ("format: 2", "format: 3", "format: "),
    ("joined: false", "joined: true", r"lacks 2 of its tensors \(the first: exit.join.bias\)"),
    ("after: 1", "after: 8", "after layer 8 of 8"),  # no layer would be left to verify with
    ("layers: 1", "layers: 2", "lacks 9 of its tensors"),
    ("own_head: true", "own_head: false", r"does not have \(the first: exit.head.weight\)"),
    (
        "predictor: false",
        "predictor: true",
        r"lacks 3 of its tensors \(the first: predictor.bias\)",
    ),
    (
        "fingerprint: ",
        "fingerprint: '0'  # ",
        r"was trained for here \(0\), not for .*target\. Train one",
    ),
]
HEAD_MISTAKES = [
    (
        "kind: medusa",
        "kind: eagle",
        "of the kind medusa, and their head.yaml do not belong together",
    ),
    ("target: ", "zebra: 1\ntarget: ", "zebra: there is no such key"),
    ("fingerprint: ", "fingerprint: '0'  # ", r"was trained for .*target \(0\), not for"),
    ("weights: ", "weights: '0'  # ", "do not belong together"),
    ("rank_accuracies: []", "rank_accuracies: [[1.5]]", "less than or equal to 1"),
]


@pytest.mark.parametrize(("old", "new", "message"), [*EXIT_MISTAKES, *HEAD_MISTAKES])
def test_a_wrong_description_is_refused_in_one_line(
    folder: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    target = opened(folder / "target")
    is_exit = (old, new, message) in EXIT_MISTAKES
    if is_exit:
        save_untrained(tmp_path, folder / "target", 1)
    else:
        weights = open_part(folder / "medusa", target, is_exit=False).load()
        save_head(tmp_path, weights, describe_head("medusa", target, {}, {}))  # type: ignore[arg-type]
    path = tmp_path / (EXIT_DESCRIPTION if is_exit else "head.yaml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpecgenError, match=message) as caught:
        open_part(tmp_path, target, is_exit=is_exit).load()
    assert str(caught.value).isprintable()


def test_the_exits_depth_is_the_papers() -> None:
    """5 of 80 and 3 of 40 layers (EESD, section 4.1), and always 5 to 10 % of them (section
    5.4)."""
    assert [default_exit_depth(count) for count in (80, 40, 32, 28, 10, 4, 2)] == [
        5,
        3,
        2,
        2,
        1,
        1,
        1,
    ]
    assert all(0.05 <= default_exit_depth(count) / count <= 0.1 for count in range(10, 200))


# the store


@pytest.mark.parametrize("kind", ["exit", "medusa"])
def test_the_part_trained_here_is_found_without_being_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Under the target's name, else the same weights under another name, else the bundled one or
    one beside the models; nothing for other weights."""
    monkeypatch.setattr(demo, "_PACKAGE", tmp_path / "package")
    target = opened(folder / "target")
    own = weights_fingerprint(target.folder)
    weights = open_part(folder / "medusa", target, is_exit=False).load()
    assert isinstance(weights, MedusaWeights)

    def keep(where: Path) -> Path:
        if kind == "exit":
            return save_untrained(where, target.folder, 1)
        save_head(where, weights, describe_head("medusa", target, {}, {}))
        return where

    beside = keep(tmp_path / "beside")

    def found(*, is_bundled: bool = True, has_beside: bool = False) -> Path | None:
        store = PartStore(target, is_bundled=is_bundled)
        if has_beside:
            store.beside[kind] = beside
        part = store.find(kind)
        return None if part is None else part.path

    def kept(name: str, fingerprint: str = own) -> Path:
        return paths.part_folder(kind, name, fingerprint)

    keep(kept("another/name", "0" * 16))
    assert found() is None
    bundled = keep(demo.exit_folder() if kind == "exit" else demo.head_folder(kind))
    assert (found(), found(is_bundled=False)) == (bundled, None)
    assert found(is_bundled=False, has_beside=True) == beside
    other = keep(kept("another/name"))
    assert found() == found(has_beside=True) == other
    mine = keep(kept(target.name))
    assert found() == mine
    store = PartStore(target)
    assert store.find("eagle") is None
    part = store.load(kind)
    assert part is not None
    assert store.load(kind) is part
    weights_file = mine if kind == "exit" else mine / "medusa_lm_head.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-400])
    store = PartStore(target)
    assert store.load(kind) is None
    assert store.load(kind) is None
    assert "cannot read" in str(store.refusal(kind)) or "do not belong together" in str(
        store.refusal(kind)
    )


def test_each_run_has_the_part_that_it_names(folder: Path, pair: Pair) -> None:
    sampling = SamplingParams(16, ignore_eos=True, seed=1)
    expected = pair.generate(PROMPT, "ar", sampling).token_ids
    for name, policy in (("first", "cali-ts"), ("second", "beta-ts")):
        given = {"exit": folder / name, "policy": policy}
        run = pair.run(pair.request(PROMPT, "eesd", sampling, **given))
        assert run.settings.values["exit"] == str(folder / name)
        assert [token for round_ in run.rounds() for token in round_.token_ids] == expected
    for kind, name in (
        ("eagle", "eagle"),
        ("eagle", "other"),
        ("medusa", "medusa"),
        ("glide", "glide"),
    ):
        assert pair.generate(PROMPT, kind, sampling, head=folder / name).token_ids == expected
    with pytest.raises(
        SpecgenError, match="needs an exit layer trained for the target, and there is none"
    ):
        pair.generate(PROMPT, "eesd", sampling)
    pair.parts.name(folder / "second", is_exit=True)
    assert pair.run(pair.request(PROMPT, "eesd-fixed", sampling)).settings.values["exit"] == "auto"
    assert not pair.parts.has_predictor()


def test_a_part_is_loaded_once_and_has_its_own_caches(
    folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = pair.parts
    monkeypatch.chdir(folder)
    first, second = (parts.runners("exit", name) for name in ("first", str(folder / "second")))
    assert first is not None
    assert parts.runners("exit", str(folder / "." / "first")) is first
    assert len({id(each.cache) for runners in (first, second) for each in runners[:3]}) == 6  # type: ignore[union-attr]
    pair.generate(PROMPT, "eesd", SamplingParams(4), exit="first")
    assert parts.runners("medusa", "medusa") is parts.runners("medusa", str(folder / "medusa"))
    assert parts.load("medusa", str(folder / "medusa"))._weights is None, "the runner has its own"  # type: ignore[union-attr]
    pair.forget()
    assert first.target._cached.length == first.first._cached.length == 0  # type: ignore[union-attr]


# the commands


WRONG: list[tuple[list[str], str]] = [
    (
        ["-m", "eesd"],
        (
            "eesd needs an exit layer trained for the target, and there is none. Train one "
            "with specgen tune --train"
        ),
    ),
    (
        ["-m", "eagle", "-d", "none"],
        (
            "eagle needs a head trained for the target, and there is none. Train one with "
            "specgen tune --train"
        ),
    ),
    (
        ["-m", "medusa", "--head", "{folder}/eagle"],
        "the head {folder}/eagle is for eagle, not for medusa",
    ),
    (
        ["-m", "glide", "--set", "head={folder}/eagle"],
        "the head {folder}/eagle is for eagle, not for glide",
    ),
    (["-m", "eesd", "--exit-layer", "{tmp}/none"], "there is no exit layer {tmp}/none"),
    (["-m", "eesd", "--exit-layer", "{tmp}/exit.bin"], "there is no exit layer {tmp}/exit.bin"),
    (["-m", "eesd", "--exit-layer", "{folder}"], "cannot read the description of the exit layer"),
    (["-m", "eesd", "--exit-layer", "{tmp}/swapped"], "do not belong together"),
    (
        ["-m", "eesd", "--set", "exit={tmp}/damaged"],
        "cannot read the weights of the exit layer {tmp}/damaged",
    ),
]


@pytest.mark.parametrize(("more", "said"), WRONG)
def test_what_is_missing_or_does_not_fit_is_one_line(
    folder: Path, tmp_path: Path, more: list[str], said: str
) -> None:
    """Options and settings refuse alike."""
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / EXIT_DESCRIPTION).write_text(
        (folder / "first" / EXIT_DESCRIPTION).read_text()
    )
    (tmp_path / "damaged" / WEIGHTS).write_bytes(b"no weights")
    other = save_exit(
        tmp_path / "swapped",
        load_file(folder / "first" / WEIGHTS),
        None,
        ExitDescription("here", "0" * 16, 1),
    )
    (other.parent / EXIT_DESCRIPTION).write_text((folder / "first" / EXIT_DESCRIPTION).read_text())
    filled = [word.format(folder=folder, tmp=tmp_path) for word in more]
    code, out, err = called("generate", "abc", "-t", str(folder / "target"), "-n", "2", *filled)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
    assert said.format(folder=folder, tmp=tmp_path) in err
    if "--set" in more and "exit" in more[-1]:
        spec = f"eesd:exit={filled[-1].removeprefix('exit=')}"
        assert called(
            "compare", "-t", str(folder / "target"), "-m", f"ar,{spec}", "--limit", "1", "-n", "2"
        ) == (2, "", err)


def test_a_head_in_the_hubs_cache_is_found_by_its_id(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    repository = tmp_path / "models--lab--eagle"
    found = write_head(repository / "snapshots" / commit, "eagle1", folder / "target")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    command = [
        "generate",
        "abc",
        "-t",
        str(folder / "target"),
        "-m",
        "eagle",
        "-n",
        "3",
        "--offline",
        "--json",
        "--head",
    ]
    outputs = [called(*command, name) for name in ("lab/eagle", str(found))]
    assert [code for code, *_ in outputs] == [0, 0], outputs
    assert len({str(parsed(out)[-1]["token_ids"]) for _, out, _ in outputs}) == 1
    code, _, err = called(*command, "lab/none")
    assert (code, err.count("\n"), "lab/none" in err) == (2, 1, True)


def test_notes_about_heads(folder: Path, tmp_path: Path) -> None:
    """A doubtful head is used with one warning; a head that the method does not use is named."""
    command = ["generate", "abc", "-t", str(folder / "target"), "-n", "2"]
    for number, (layout, own) in enumerate(
        (("eagle3-speculators", False), ("eagle3-speculators", True), ("eagle1", True))
    ):
        head = write_head(tmp_path / str(number), layout, folder / "target", own_embedding=own)
        code, _, err = called(*command, "-m", "eagle", "--head", str(head))
        assert code == 0, err
        assert err.count(f"warning: {head}: its embedding is not that of") == own
    for method, note in (
        ("lookup", f"--head is not used by lookup: for {folder}/eagle take -m eagle\n"),
        ("eagle", ""),
    ):
        code, _, err = called(*command, "-m", method, "--head", str(folder / "eagle"))
        assert code == 0, err
        assert err.startswith(note) if note else "--head" not in err


def test_a_fingerprint_depends_on_the_weights_and_not_on_their_files(
    folder: Path, tmp_path: Path
) -> None:
    model = make_model("llama", num_hidden_layers=8)
    before = weights_fingerprint(folder / "target")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_fingerprint(tmp_path / "shards") == before
    for _ in range(2):  # the second time in a file whose fingerprint is cached
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        model.save_pretrained(tmp_path / "changed")
        found = weights_fingerprint(tmp_path / "changed")
        assert found != before
        before = found
