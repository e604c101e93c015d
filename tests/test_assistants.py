"""Assistants of Gemma 4, in files made by hand with the published names: their logits, lossless
output, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LETTERS, make_tokenizer, plain, prompt
from families import save as save_model
from native_models import make, variant
from runner_checks import path_to
from safetensors.torch import load_file, save_file
from training_helpers import invoke
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams
from specgen.tune.exports.choice import export
from specgen.tune.exports.loaded_pair import exported_models
from specgen.tune.outcome import Candidate

pytestmark = pytest.mark.skipif(
    not hasattr(Gemma4TextConfig, "kv_sharing_modes"),
    reason="this version of transformers has no such assistants",
)
WIDTH = 24
COUNT = 40
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
NONE = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "eos_token_id": 2}
SETTINGS: list[dict[str, Any]] = [
    *({"k": k} for k in range(1, 9)),
    {"width": 3, "k": 3},
    {"policy": "svip"},
    {"cape": True},
]


@pytest.fixture(autouse=True)
def buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 cannot build assistants, and targets without shared layers return no keys
    and values."""
    original = Gemma4TextConfig.kv_sharing_modes

    def modes(self: Any) -> list[str | None]:
        count = self.num_hidden_layers
        types = self.layer_types
        if self.num_kv_shared_layers == count:
            return ["reuse"] * count
        if self.num_kv_shared_layers:
            return original.fget(self)  # type: ignore[attr-defined,no-any-return]
        return [
            "store" if kind not in types[index + 1 :] else None for index, kind in enumerate(types)
        ]

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))


@pytest.fixture
def models(tmp_path: Path) -> Callable[..., tuple[Any, Any, Path]]:
    """Returns a target (a variant of Gemma 4) and an assistant, saved in the folders `t` and `a` of
    the third result."""

    def made(number: int, *, ordered: bool) -> tuple[Any, Any, Path]:
        config = {"head_dim": 8, **variant("gemma4_text", number)}
        target = make(config)
        target.generation_config.eos_token_id = 2
        heads = (
            "num_attention_heads",
            "head_dim",
            "global_head_dim",
            "attention_k_eq_v",
            "num_global_key_value_heads",
        )
        text = {
            name: config[name]
            for name in (*heads, "vocab_size", "num_key_value_heads")
            if name in config
        } | NONE
        text |= {
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "layer_types": TYPES,
            "sliding_window": 5,
        }
        made = Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**text, num_kv_shared_layers=3),
            backbone_hidden_size=config["hidden_size"],
            use_ordered_embeddings=ordered,
            num_centroids=12,
            centroid_intermediate_top_k=4,
        )
        torch.manual_seed(number)
        assistant = Gemma4AssistantForCausalLM(made).eval().requires_grad_(False)
        for name, weight in [*assistant.named_parameters(), *assistant.named_buffers()]:
            if name.endswith("token_ordering"):
                weight.copy_(torch.randperm(len(weight)))
            elif "norm" in name or name.endswith("layer_scalar"):
                weight.uniform_(0.3, 1.0)
            elif not name.endswith(("inv_freq", "embed_scale")):
                weight.normal_(std=weight.shape[-1] ** -0.5)
        save_model(target, tmp_path / "t", make_tokenizer(LETTERS[:96]))
        assistant.save_pretrained(tmp_path / "a")
        return target, assistant, tmp_path

    return made


@pytest.mark.parametrize(("number", "ordered"), [(0, False), (1, True), (2, False), (3, True)])
@torch.no_grad()
def test_logits_are_those_of_transformers(models: Any, number: int, *, ordered: bool) -> None:
    """Along each path of chains and trees, of growing and of other contexts, shorter and longer
    than the windows."""
    target, assistant, folder = models(number, ordered=ordered)
    pair = specgen.load(str(folder / "t"), str(folder / "a"), device="cpu", dtype="float32")
    made = pair.parts.runners("mtp")
    assert made is not None
    runner = made.draft
    rng = random.Random(number)
    for length in (3, 9, 10, 30, 4):
        context = Context([rng.randrange(3, 96) for _ in range(length - 1)])
        runner.logits(context, [7, 8])
        context.extend([rng.randrange(3, 96)])
        run = target.model(
            torch.tensor([context.ids[:-1]]), return_shared_kv_states=True, use_cache=False
        )
        for tokens, parents in (
            ([7, 8, 9, 5], [-1, 0, 1, 2]),
            ([7, 8, 6, 5, 4], [-1, 0, -1, 0, 2]),
        ):
            found = runner.logits(context, tokens, parents, start=1).logits
            for node in range(len(tokens)):
                state = run.last_hidden_state[:, -1:]
                for token in [context.ids[-1], *path_to(tokens, parents, node)]:
                    read = torch.cat(
                        (target.model.embed_tokens(torch.tensor([[token]])), state), dim=-1
                    )
                    at = {
                        "position_ids": torch.tensor([[length - 1]]),
                        "shared_kv_states": run.shared_kv_states,
                    }
                    output = assistant(inputs_embeds=read, attention_mask=None, **at)
                    state = output.last_hidden_state
                wanted = output.logits[0, 0]
                if ordered:  # their other tokens have a low logit instead
                    wanted = wanted.masked_fill(wanted == wanted.min(), -torch.inf)
                    assert wanted.isfinite().sum() == 96 // 12 * 4
                torch.testing.assert_close(found[node], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", [0, 1])
def test_greedy_ids_are_the_targets_own(models: Any, number: int) -> None:
    target, _, folder = models(number, ordered=number == 1)
    pair = specgen.load(str(folder / "t"), str(folder / "a"), device="cpu", dtype="float32")
    wanted = [plain(target, prompt(seed), COUNT) for seed in range(2)]
    for case, settings in list(enumerate(SETTINGS))[number::2]:
        ids = prompt(case // 2 % 2)
        sampling = SamplingParams(COUNT)
        assert pair.generate(ids, "mtp", sampling, **settings).token_ids == wanted[case // 2 % 2], (
            settings
        )
    assert pair.generate([5], "mtp", SamplingParams(3)).token_ids == plain(target, [5], 3)
    pair = specgen.load(str(folder / "t"), device="cpu", dtype="float32", head=str(folder / "a"))
    assert pair.generate(prompt(0), "adaptive", SamplingParams(COUNT)).token_ids == wanted[0]


def test_an_assistant_beside_the_target_is_found_and_named(models: Any) -> None:
    *_, folder = models(0, ordered=True)
    assert (
        "mtp"
        in specgen.load(str(folder / "t"), device="cpu", dtype="float32", find=True).parts.beside
    )
    shown = invoke(["inspect", "-t", str(folder / "t"), "-d", str(folder / "a"), "--json"])
    assert json.loads(shown.stdout)["methods"]["mtp"]["ready"]
    with pytest.raises(SpecgenError, match="native backend"):
        specgen.load(
            str(folder / "t"), str(folder / "a"), backend="transformers", device="cpu"
        ).generate([4, 5], "mtp")


def test_the_exported_lines_for_transformers_run(
    models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, folder = models(0, ordered=False)
    pair = specgen.load(str(folder / "t"), str(folder / "a"), device="cpu", dtype="float32")
    exported = exported_models(pair, "transformers", ["mtp"], SamplingParams(), None)
    assert exported.heads["mtp"].drafter == "assistant"
    text, _ = export("transformers", {"mtp": Candidate("mtp", {"k": 3}, 9.0)}, "mtp", exported)
    passes = list[None]()
    original: Callable[..., Any] = Gemma4AssistantForCausalLM.forward

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        passes.append(None)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Gemma4AssistantForCausalLM, "forward", counted)
    exec(text, {})
    assert len(passes) > 3
    prompt = "def fibonacci(n):"
    assert pair.generate(prompt, "ar", max_new_tokens=64).text in capsys.readouterr().out


BAD: list[tuple[str, dict[str, Any], dict[str, torch.Tensor | None]]] = [
    ("text_config = 5", {"text_config": 5}, {}),
    ("centroid_intermediate_top_k = 13", {"centroid_intermediate_top_k": 13}, {}),
    ("a hidden size of 31", {}, {"post_projection.weight": torch.zeros(31, WIDTH)}),
    ("a vocabulary of 95", {}, {"model.embed_tokens.weight": torch.zeros(95, WIDTH)}),
    ("lacks 1 of its tensors", {}, {"model.norm.weight": None}),
    ("1 tensors that such a part does not have", {}, {"surprise": torch.zeros(3)}),
    (
        "the id of each token once",
        {},
        {"masked_embedding.token_ordering": torch.zeros(96, dtype=torch.int64)},
    ),
    ("NaN or infinities", {}, {"model.norm.weight": torch.full((WIDTH,), torch.nan)}),
]


def test_damaged_files_are_refused_in_one_line(models: Any) -> None:
    *_, folder = models(0, ordered=True)
    files = [(folder / "a" / name) for name in ("config.json", "model.safetensors")]
    config = json.loads(files[0].read_text())
    tensors = load_file(files[1])
    inner = {"global_head_dim": 12, "per_layer_config": None}
    cases = [
        *BAD,
        ("do not fit to the keys and values", {"text_config": config["text_config"] | inner}, {}),
    ]
    for words, changes, weights in cases:
        files[0].write_text(json.dumps(config | changes))
        save_file(
            {name: weight for name, weight in (tensors | weights).items() if weight is not None},
            files[1],
        )
        shown = invoke(
            ["generate", "-t", str(folder / "t"), "-d", str(folder / "a"), "-n", "2", "ab"]
        )
        assert shown.exit_code == 2, words
        assert words in " ".join(shown.stderr.split())
