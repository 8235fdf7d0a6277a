"""Adapters of the Hub: a LoRA repo as the source of a port, and adapters pushed, read back by peft and repeated."""

from __future__ import annotations

import json
import os
from pathlib import Path

import peft
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import CLIPModel

import hf_bico
from hf_bico.cli.main import main
from hf_bico.models.model import Model
from support import forks
from support.hub import Hub
from support.hub_scenes import BASE, DATA, TARGET, publish
from support.paper import PAPER, PAPER_WORDS
from support.scenes import Scene

LORA, PUSHED = "user/eurosat-lora", "user/eurosat-lora-plus"
TRANSFORMERS = ("transformers", "transformers")
CARD = f"---\nbase_model: {BASE}\nlibrary_name: peft\ndatasets:\n- {DATA}\nlicense: mit\n---\n# A LoRA\n"


def publish_lora(hub: Hub, folder: Path) -> Scene:
    """The scene's repos, and a LoRA of its base, pushed by peft itself."""
    scene = publish(hub, folder / "scene", TRANSFORMERS)
    model = CLIPModel.from_pretrained(BASE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    adapted.push_to_hub(LORA)
    hub.repo(LORA).commit({"README.md": CARD})
    return scene


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_lora_repo_is_ported_pushed_and_repeated(hub: Hub, tmp_path: Path) -> None:
    publish_lora(hub, tmp_path)
    out = str(tmp_path / "out")
    result = run("port", LORA, "--to", TARGET, "-n", "24", *PAPER_WORDS, "--push-to", PUSHED, "-o", out, "--force")
    assert result.exit_code == 0, result.output
    assert f"Pushed to {hub.url}/{PUSHED} (public)" in result.stdout
    files = hub.repo(PUSHED).files()
    assert {"adapter_config.json", "adapter_model.safetensors", "bico.json", "README.md"} <= set(files)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    record = json.loads((tmp_path / "out" / "bico.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (TARGET, record["target"]["commit"])
    assert (record["source"]["kind"], record["source"]["peft_type"]) == ("adapter", "LORA")
    assert record["source"]["base"]["id"] == BASE
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "base_model_relation: adapter" in card
    again = run("rerun", PUSHED)
    assert again.exit_code == 0, again.output
    assert "Same: adapter_model.safetensors, adapter_config.json (same SHA-256 as recorded)." in again.stdout
    measured = run("eval", PUSHED, "--json")
    assert measured.exit_code == 0, measured.output
    values = {entry["model"]: entry["value"] for entry in record["evaluation"]}
    assert json.loads(measured.stdout)["value"] == values["ported"]


def test_pushed_adapter_is_read_by_peft_in_another_process(hub: Hub, tmp_path: Path) -> None:
    publish_lora(hub, tmp_path)
    ported = hf_bico.port(LORA, TARGET, n=24, evaluate=False, **PAPER)
    ported.push_to_hub(PUSHED)
    pixels = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    torch.save(pixels, tmp_path / "pixels.pt")
    code = (
        "import sys, torch\nfrom peft import AutoPeftModel, PeftModel\nfrom transformers import CLIPModel\n"
        f"model = PeftModel.from_pretrained(CLIPModel.from_pretrained({TARGET!r}), {PUSHED!r}).eval()\n"
        f"pixels = torch.load({str(tmp_path / 'pixels.pt')!r})\n"
        "vision = model.base_model.model.vision_model(pixel_values=pixels).pooler_output\n"
        f"torch.save(model.base_model.model.visual_projection(vision).detach(), {str(tmp_path / 'features.pt')!r})\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "other-home"), "HF_ENDPOINT": hub.url}
    forks.run(code=code, env=environment, check=True)
    with torch.no_grad():
        live = Model.open(TARGET, "the target").fetched().family.wrap(ported.model().eval())
        ours = live.image_features(pixels)
    assert torch.allclose(ours, torch.load(tmp_path / "features.pt"), atol=1e-5)


def test_plan_of_a_lora_repo_fetches_no_weight(hub: Hub, tmp_path: Path) -> None:
    publish_lora(hub, tmp_path)
    planned = hf_bico.plan(LORA, TARGET)
    assert planned.format == "adapter"
    assert set(planned.ranks.values()) == {2}
    assert len(planned.main_pairs) == 6, "q, v and fc1 of two blocks"
    source = planned.lineage.source
    assert source.place is not None
    assert not (source.place.folder / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("restricted", [LORA, BASE])
def test_extracted_and_applied_repos_inherit_privacy(hub: Hub, tmp_path: Path, restricted: str) -> None:
    publish_lora(hub, tmp_path)
    assert hf_bico.extract(LORA, rank=1).push_to_hub("user/smaller").private is False
    hub.repo(restricted).private = True
    made = hf_bico.apply(LORA, alpha=0.5)
    assert made.target.name == BASE
    pushed = made.push_to_hub("user/half")
    assert pushed.private
    model = CLIPModel.from_pretrained("user/half", token=os.environ["HF_TOKEN"])
    assert isinstance(model, CLIPModel)


def test_task_vector_of_a_lora_repo_needs_no_more_than_its_id(hub: Hub, tmp_path: Path) -> None:
    publish_lora(hub, tmp_path)
    tau = hf_bico.TaskVector.from_adapter(LORA)
    assert tau.about["base"] == BASE
    assert ["model", LORA] in tau.about["made_from"]
    fitted = (0.5 * tau + tau).save_adapter(tmp_path / "sum", rank=2)
    assert fitted.energy_kept > 1 - 1e-6, "one and a half times a rank-2 change is of rank 2"
    tau.push_to_hub("user/eurosat-vector")
    again = hf_bico.TaskVector.load("user/eurosat-vector")
    assert all(torch.equal(again[name], tau[name]) for name in tau)
    again.save_adapter(tmp_path / "again")
    assert (tmp_path / "again" / "adapter_model.safetensors").is_file()
