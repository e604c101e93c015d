"""Checkpoints with quantised weights: what is said before they are loaded, and that they decode as
plain decoding does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LETTERS, make_model, make_tokenizer, near_copy, save
from pair_helpers import draft_here
from training_helpers import invoke, refused, train_command
from transformers import AutoModelForCausalLM

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.engine.loaded_model import load_model
from specgen.engine.model_files import ModelFiles, ModelSource, find_model
from specgen.engine.precision import Precision, choose_precision
from specgen.engine.spread.placement import model_memory
from specgen.pair.pair import Pair

CPU = torch.device("cpu")
TORCHAO = {"quant_method": "torchao"}
PROMPT = [1, 5, 9, 30, 31, 5, 9, 30]
COUNT = 16
METHODS = ("sd", "pearl", "sd:width=2", "selfsd:skip=1")


def edited(folder: Path, out: Path, settings: Any) -> Path:
    """A copy of a model whose config.json has this `quantization_config`."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return out


@pytest.fixture(scope="module")
def plain_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target and its near copy, neither quantised."""
    folder = tmp_path_factory.mktemp("plain")
    target = make_model("llama")
    tokenizer = make_tokenizer(LETTERS)
    models = {"target": target, "draft": near_copy(target)}
    return {role: Path(save(model, folder / role, tokenizer)) for role, model in models.items()}


@pytest.fixture(scope="module")
def folders(
    plain_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The same in torchao's int8 format, of the weights alone."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    folder = tmp_path_factory.mktemp("torchao")
    config = TorchAoConfig(Int8WeightOnlyConfig())
    saved = {}
    for role, plain in plain_folders.items():
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=config, dtype=torch.float32
        )
        saved[role] = Path(save(model, folder / role, make_tokenizer(LETTERS)))
    return saved


@pytest.fixture(scope="module")
def int8(folders: dict[str, Path]) -> Iterator[Pair]:
    with specgen.load(
        str(folders["target"]), str(folders["draft"]), device="cpu", dtype="float32"
    ) as pair:
        draft_here(pair)  # PEARL's drafts in this process
        yield pair


def target_of(folder: Path, **changes: Any) -> ModelFiles:
    return find_model(ModelSource(str(folder), **changes), lambda _: None)


def test_the_native_backend_and_exact_refuse_it(
    plain_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(plain_folders["target"], tmp_path / "model", TORCHAO)
    with pytest.raises(
        SpecgenError,
        match=r"^the native backend does not run .*: its weights are quantised with torchao",
    ):
        target_of(folder, backend="native")
    with pytest.raises(
        SpecgenError,
        match=r"^--exact needs the native backend, .*: its weights are quantised with torchao",
    ):
        target_of(folder, exact=True)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_ids_are_those_of_plain_decoding(int8: Pair, method: str) -> None:
    name, *settings = method.split(":")
    given = dict(setting.split("=") for setting in settings)
    sampling = SamplingParams(max_new_tokens=COUNT, ignore_eos=True)
    result = int8.generate(PROMPT, name, sampling, **given)
    assert result.token_ids == expected(int8)
    assert result.token_ids == int8.generate(PROMPT, "ar", sampling).token_ids
    assert result.summary["drafted"]


def expected(pair: Pair) -> list[int]:
    """The output by transformers' own `generate`."""
    module: Any = pair.target.model.module  # type: ignore[attr-defined]
    with torch.no_grad():
        made = module.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=0,
        )
    ids: list[int] = made[0, len(PROMPT) :].tolist()
    return ids


def test_the_weights_stay_quantised(
    int8: Pair, folders: dict[str, Path], plain_folders: dict[str, Path]
) -> None:
    """The parameters are those of the model before, though its file is packed, and the bytes are
    those of the file."""
    module: Any = int8.target.model.module  # type: ignore[attr-defined]
    assert type(module.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    files = target_of(folders["target"])
    assert (
        choose_precision("auto", files, CPU).reason
        == "the dtype of its weights that are not quantised"
    )
    found = json.loads(
        invoke(["inspect", "-t", str(folders["target"]), "--device", "cpu", "--json"]).stdout
    )["target"]
    before = json.loads(
        invoke(["inspect", "-t", str(plain_folders["target"]), "--device", "cpu", "--json"]).stdout
    )["target"]
    assert found["parameters"] == before["parameters"]
    in_file = (folders["target"] / "model.safetensors").stat().st_size
    with (folders["target"] / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert found["weight_bytes"] == in_file - header < before["weight_bytes"]
    assert found["fallback"] == "its weights are quantised with torchao"


def test_an_exit_layer_is_trained_for_it_and_a_quantised_draft_is_not_trained(
    int8: Pair, folders: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    named = ["-t", str(folders["target"])]
    result = invoke(
        [*train_command("eesd", corpus, tmp_path, "--steps", "1", "--self-text", "0"), *named]
    )
    assert result.exit_code == 0, result.stderr
    with specgen.load(
        str(folders["target"]), device="cpu", dtype="float32", exit_layer=tmp_path
    ) as pair:
        made = pair.generate(PROMPT, "eesd", SamplingParams(max_new_tokens=COUNT, ignore_eos=True))
    assert made.token_ids == expected(int8)
    message = refused(
        [
            *train_command("sd", corpus, tmp_path, "--steps", "1"),
            *named,
            "-d",
            str(folders["draft"]),
        ]
    )
    assert "cannot be trained: its weights are quantised with torchao" in message


def block_fp8(folder: Path, out: Path, block: int = 16) -> Path:
    """A copy of a model in DeepSeek's FP8 format: `block` times `block` numbers share a scale, the
    rest bfloat16."""
    from safetensors.torch import load_file, save_file

    edited(
        folder,
        out,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
        },
    )
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = weight.to(torch.bfloat16)
            continue
        blocks = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_fp8_is_dequantised_on_a_cpu(plain_folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    files = target_of(block_fp8(plain_folders["target"], tmp_path / "fp8"))
    assert files.dequantises_on(CPU)
    assert choose_precision("auto", files, CPU).dtype == torch.float32
    planned = model_memory(files, CPU, choose_precision("float32", files, CPU), 100)
    model = load_model(files, Precision(torch.float32), [CPU], lambda _: None).model
    assert planned.weights == 4 * sum(files.parameters.values())
    assert {weight.dtype for weight in model.module.parameters()} == {torch.float32}  # type: ignore[attr-defined]
    reference = load_model(
        target_of(plain_folders["target"], backend="transformers"),
        Precision(torch.float32),
        [CPU],
        lambda _: None,
    ).model
    ours, own = (each.reference_logits(PROMPT) for each in (model, reference))
    assert float((ours - own).abs().max()) < 0.2 * float(own.abs().max())
