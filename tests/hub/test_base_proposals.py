"""LoRAs as they are found on the Hub: whose base is a path, a 4-bit copy, gone, gated or not named at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from hf_bico.cli.main import main
from hf_bico.porting.base_proposals import KNOWN, Sizes, config_sizes
from support.hub import Hub
from support.hub_scenes import upload
from support.language_toys import write_decoder

OWN, LORA, TARGET = "Qwen/Qwen2.5-Tiny", "user/my-lora", "org/target"
SIZES = Sizes(width=16, blocks=2, mlp=32, queries=16, keys=8)
FOUR_BIT = json.dumps({"quantization_config": {"load_in_4bit": True}, "architectures": ["LlamaForCausalLM"]})


def write_lora(folder: Path, base: str, sizes: Sizes = SIZES) -> Path:
    """What peft saves of a LoRA of q, v and up, over a base that is called so."""
    folder.mkdir()
    wide, queries, keys, mlp = sizes.width or 0, sizes.queries or 0, sizes.keys or 0, sizes.mlp or 0
    tensors = {}
    for block in range(sizes.blocks or 0):
        for place, written in (("self_attn.q", queries), ("self_attn.v", keys), ("mlp.up", mlp)):
            name = f"base_model.model.model.layers.{block}.{place}_proj"
            tensors[f"{name}.lora_A.weight"] = 0.1 * torch.randn(1, wide)
            tensors[f"{name}.lora_B.weight"] = 0.1 * torch.randn(written, 1)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj", "v_proj", "up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return folder


@pytest.fixture
def scene(hub: Hub, tmp_path: Path) -> Hub:
    """A base of the same sizes, one of the same name with others, and a target."""
    upload(hub, OWN, write_decoder(tmp_path / "own"))
    upload(hub, "unsloth/Qwen2.5-Tiny", write_decoder(tmp_path / "wider", width=24))
    upload(hub, TARGET, write_decoder(tmp_path / "target", width=24, blocks=3))
    return hub


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


@pytest.mark.parametrize(
    ("named", "cause"),
    [
        (
            "/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-Tiny/snapshots/060db6499f32faf8b98477b0a26969ef7d8b9987",
            "a folder where it was trained",
        ),
        ("/workspace/models/Qwen2.5-Tiny", "a folder where it was trained"),
        ("C:\\Users\\me\\Qwen2.5-Tiny", "a folder where it was trained"),
        ("somebody/Qwen2.5-Tiny", "is not on the Hub"),
        ("somebody/Qwen2.5-Tiny-bnb-4bit", "is not on the Hub"),
    ],
)
def test_a_base_that_cannot_be_had_is_proposed_by_its_name(named: str, cause: str, scene: Hub, tmp_path: Path) -> None:
    upload(scene, LORA, write_lora(tmp_path / "lora", named))
    done = plan(LORA, "--to", TARGET)
    assert done.exit_code == 1
    error, remedy, following = done.stderr.splitlines()
    assert cause in error
    assert named in error
    assert remedy.endswith(
        f"name the model that was fine-tuned with --base; by its name and the sizes of its layers it may be {OWN}"
    )
    assert following.strip() == f"Next: hf-bico plan {LORA} --to {TARGET} --base {OWN}"
    assert plan(*following.split()[3:]).exit_code == 0, "the line is ready to be run"


def test_a_base_in_four_bits_is_proposed_whole(scene: Hub, tmp_path: Path) -> None:
    upload(scene, LORA, write_lora(tmp_path / "lora", "unsloth/Qwen2.5-Tiny-bnb-4bit"))
    scene.create("unsloth/Qwen2.5-Tiny-bnb-4bit").commit({"config.json": FOUR_BIT})
    done = plan(LORA, "--to", TARGET)
    assert "the base 'unsloth/Qwen2.5-Tiny-bnb-4bit' is quantised" in done.stderr
    assert "by its name it may be unsloth/Qwen2.5-Tiny or Qwen/Qwen2.5-Tiny" in done.stderr


def test_a_base_that_is_not_named_is_proposed_by_the_adapters_sizes(scene: Hub, tmp_path: Path) -> None:
    sizes = KNOWN["HuggingFaceTB/SmolLM2-135M"]
    upload(scene, LORA, write_lora(tmp_path / "lora", "", sizes))
    scene.create("HuggingFaceTB/SmolLM2-135M").commit(
        {"config.json": json.dumps({"hidden_size": 576, "num_hidden_layers": 30})}
    )
    done = plan(LORA, "--to", TARGET)
    assert "does not say which model it was fine-tuned from" in done.stderr
    assert done.stderr.rstrip().endswith("--base HuggingFaceTB/SmolLM2-135M")


def test_of_a_gated_base_an_open_copy_is_named(scene: Hub, tmp_path: Path) -> None:
    scene.repo(OWN).gated = "manual"
    upload(scene, LORA, write_lora(tmp_path / "lora", OWN))
    done = plan(LORA, "--to", TARGET)
    assert "gated" in done.stderr
    assert "or name a copy of it with --base, such as unsloth/Qwen2.5-Tiny" in done.stderr


def test_nothing_is_proposed_where_nothing_fits(scene: Hub, tmp_path: Path) -> None:
    upload(scene, LORA, write_lora(tmp_path / "lora", "/models/Qwen2.5-Tiny", Sizes(20, 2, 32, 16, 8)))
    done = plan(LORA, "--to", TARGET)
    assert done.stderr.rstrip().endswith("name the model that was fine-tuned with --base")
    assert "Next:" not in done.stderr


def test_a_full_fine_tune_without_a_card_gets_proposals_too(scene: Hub, tmp_path: Path) -> None:
    folder = write_decoder(tmp_path / "tuned")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "/models/Qwen2.5-Tiny"}))
    upload(scene, "user/tuned", folder)
    assert f"it may be {OWN}" in plan("user/tuned", "--to", TARGET).stderr


def test_sizes_of_known_bases_are_those_of_their_configurations() -> None:
    """As transformers' own classes have them by default, where they are a model of the list."""
    from transformers import LlamaConfig, MistralConfig

    for config, name in ((LlamaConfig(), "meta-llama/Llama-2-7b-hf"), (MistralConfig(), "mistralai/Mistral-7B-v0.3")):
        assert config_sizes(config.to_dict()) == KNOWN[name]
