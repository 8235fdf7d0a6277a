"""Where a fine-tune comes from: by its own files, and from there by the repos of the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import hf_bico
from hf_bico.errors import (
    BaseMismatchError,
    BaseUnknownError,
    DataUnknownError,
    SeveralBasesError,
    SeveralDataSetsError,
    UnsupportedModelError,
)
from hf_bico.hub.repo_metadata import base_of, data_of, read_metadata
from hf_bico.porting.lineage import resolve
from support.cards import PEFT_CARD, TRAINER_CARD
from support.hub import Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish, upload
from support.paper import PAPER

pytestmark = pytest.mark.quick


def write(folder: Path, **files: Any) -> Path:
    """A repo folder; names are given with _ for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("_json", ".json").replace("README", "README.md")).write_text(text)
    return folder


def test_a_trainer_made_card_names_the_base_and_no_data_set(tmp_path: Path) -> None:
    origin = read_metadata(write(tmp_path, README=TRAINER_CARD))
    assert (origin.bases, origin.license, origin.adapter) == (("openai/clip-vit-base-patch32",), "apache-2.0", False)
    error = data_of(origin, "user/x")
    assert isinstance(error, DataUnknownError)
    assert "'imagefolder'" in error.cause
    assert "--data" in error.remedy


def test_an_adapters_own_configuration_comes_before_its_card(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "org/real-base", "peft_type": "LORA"}
    origin = read_metadata(write(tmp_path, README=PEFT_CARD, adapter_config_json=config))
    assert origin.adapter
    assert base_of(origin, "x") == "org/real-base"
    assert origin.bases_from == "adapter_config.json"


def test_an_adapter_without_a_base_in_its_configuration_falls_back_on_the_card(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": None, "peft_type": "LORA"}
    origin = read_metadata(write(tmp_path, README=PEFT_CARD, adapter_config_json=config))
    assert base_of(origin, "x") == "unsloth/llama-3-8b-bnb-4bit"


def test_an_old_configuration_names_the_base_where_the_card_does_not(tmp_path: Path) -> None:
    config = {"_name_or_path": "openai/clip-vit-base-patch16", "id2label": {"1": "sea", "0": "wood"}}
    origin = read_metadata(write(tmp_path, README="# by hand\n", config_json=config))
    assert base_of(origin, "x") == "openai/clip-vit-base-patch16"
    assert origin.class_names == ("wood", "sea")


@pytest.mark.parametrize(
    "name", ["/home/somebody/checkpoints/run-3", "./out", "C:\\models\\x", "user/own-name", "", None, {}, 7]
)
def test_a_path_of_another_machine_or_the_repo_itself_is_no_base(tmp_path: Path, name: object) -> None:
    origin = read_metadata(write(tmp_path, config_json={"_name_or_path": name}), "user/own-name")
    assert origin.bases == ()
    with pytest.raises(BaseUnknownError, match="--base"):
        base_of(origin, "user/own-name")


@pytest.mark.parametrize(
    "labels",
    [{"0": "LABEL_0", "1": "LABEL_1"}, {"0": "0", "1": "1"}, {"a": "x"}, {"0": "x", "2": "y"}, {"0": 3}, ["x"], {}],
)
def test_labels_that_only_count_are_no_class_names(tmp_path: Path, labels: object) -> None:
    assert read_metadata(write(tmp_path, config_json={"id2label": labels})).class_names == ()


@pytest.mark.parametrize(
    "card",
    [
        "---\nbase_model: [a/b\ndatasets: x\n---\n",  # broken YAML
        "---\n- a\n- list\n---\n",
        "---\nbase_model: {a: 1}\nlicense: [1, 2]\nlanguage: {en: 1}\ndatasets: 5\n---\n",  # wrong types
        "---\n!!python/object/apply:os.system ['echo']\n---\n",
        "no metadata at all",
        "",
        "\x00\ufeff---",
    ],
)
def test_a_broken_card_says_nothing_and_breaks_nothing(tmp_path: Path, card: str) -> None:
    origin = read_metadata(write(tmp_path, README=card))
    assert (origin.bases, origin.license, origin.data_sets, origin.language) == ((), None, (), ())
    with pytest.raises(BaseUnknownError):
        base_of(origin, "user/x")


def test_a_broken_card_is_named_as_the_reason(tmp_path: Path) -> None:
    origin = read_metadata(write(tmp_path, README="---\nbase_model: [a/b\n---\n"))
    with pytest.raises(BaseUnknownError, match="not YAML"):
        base_of(origin, "user/x")


def test_several_bases_or_data_sets_are_listed_with_the_option(tmp_path: Path) -> None:
    card = "---\nbase_model:\n- a/one\n- b/two\ndatasets:\n- c/three\n- generator\n- d/four\n---\n"
    origin = read_metadata(write(tmp_path, README=card))
    with pytest.raises(SeveralBasesError, match="a/one, b/two(.|\n)*--base"):
        base_of(origin, "user/x")
    error = data_of(origin, "user/x")
    assert isinstance(error, SeveralDataSetsError)
    assert "c/three, d/four" in error.cause
    assert "--data" in error.remedy


def test_loaders_of_training_scripts_are_no_data_sets(tmp_path: Path) -> None:
    card = "---\ndatasets: [generator, imagefolder, json, csv, real/one]\n---\n"
    assert data_of(read_metadata(write(tmp_path, README=card)), "x") == "real/one"


# on the Hub


def test_from_the_source_alone_everything_is_found_and_pinned(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    found = resolve(SOURCE, TARGET)
    assert [model.name for model in found.models] == [SOURCE, BASE, TARGET]
    assert [model.commit for model in found.models] == [hub.repo(name).head() for name in (SOURCE, BASE, TARGET)]
    assert found.data_repo is not None
    assert (found.data_repo.id, found.data_repo.commit) == (DATA, hub.repo(DATA, "dataset").head())
    assert found.source.origin.license == "mit"
    assert found.source.origin.pipeline == "zero-shot-image-classification"
    assert found.notices == ()


def test_what_is_named_comes_before_what_the_card_says(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path)
    upload(hub, "user/another", scene.base)
    upload(hub, "user/pictures", scene.data, type="dataset")
    found = resolve(SOURCE, TARGET, base="user/another", data="user/pictures")
    assert found.base.name == "user/another"
    assert found.data_repo is not None
    assert found.data_repo.id == "user/pictures"


def test_a_revision_is_pinned_to_its_commit(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    old = hub.repo(BASE).head()
    hub.repo(BASE).tag("v1")
    hub.repo(BASE).commit({"notes.txt": "newer"})
    assert resolve(SOURCE, TARGET, base=f"{BASE}@v1").base.commit == old
    assert resolve(SOURCE, TARGET, base=f"{BASE}@{old}").base.commit == old
    assert resolve(SOURCE, TARGET).base.commit == hub.repo(BASE).head() != old


def test_a_quantised_base_gives_its_parent_and_says_so(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.create("user/base-bnb-4bit").commit(
        {
            "README.md": f"---\nbase_model: {BASE}\nbase_model_relation: quantized\n---\n",
            "config.json": '{"quantization_config": {"load_in_4bit": true}}',
        }
    )
    found = resolve(SOURCE, TARGET, base="user/base-bnb-4bit")
    assert found.base.name == BASE
    assert any("quantised" in notice and BASE in notice for notice in found.notices)


@pytest.mark.parametrize("card", ["# nothing", "---\nbase_model: [a/b, c/d]\n---\n"])
def test_a_quantised_base_without_one_parent_is_refused(hub: Hub, tmp_path: Path, card: str) -> None:
    publish(hub, tmp_path)
    config = '{"quantization_config": {"load_in_4bit": true}}'
    hub.create("user/base-awq").commit({"README.md": card, "config.json": config})
    with pytest.raises(UnsupportedModelError, match="quantised(.|\n)*--base"):
        resolve(SOURCE, TARGET, base="user/base-awq")


def test_quantised_repos_that_name_each_other_end(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    for one, other in (("user/q1", "user/q2"), ("user/q2", "user/q1")):
        card = f"---\nbase_model: {other}\nbase_model_relation: quantized\n---\n"
        hub.create(one).commit({"README.md": card})
    with pytest.raises(UnsupportedModelError):
        resolve(SOURCE, TARGET, base="user/q1")


def test_a_fine_tune_of_a_fine_tune_carries_the_last_step_and_says_so(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(BASE).commit({"README.md": "---\nbase_model: org/root\n---\n"})
    found = resolve(SOURCE, TARGET)
    assert found.base.name == BASE
    assert any("org/root" in notice for notice in found.notices)


def test_a_renamed_repo_is_followed_and_said(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.move(BASE, "laion/vit-b16-renamed")
    found = resolve(SOURCE, TARGET)
    assert found.base.name == "laion/vit-b16-renamed"
    assert f"'{BASE}' is now 'laion/vit-b16-renamed'." in found.notices


def test_a_base_that_is_gone_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.delete(BASE)
    with pytest.raises(BaseUnknownError, match="not on the Hub(.|\n)*--base"):
        resolve(SOURCE, TARGET)


def test_a_data_set_that_is_gone_is_asked_for_only_when_it_is_needed(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.delete(DATA, "dataset")
    found = resolve(SOURCE, TARGET)
    assert found.data is None
    assert isinstance(found.no_data, DataUnknownError)
    assert "--data" in found.no_data.remedy


def test_private_and_gated_repos_are_known_as_restricted(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(SOURCE).private = True
    hub.repo(DATA, "dataset").gated = "auto"
    assert resolve(SOURCE, TARGET).restricted == [SOURCE, DATA]


def test_what_a_card_names_is_never_a_folder_here(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = publish(hub, tmp_path / "scene")
    monkeypatch.chdir(tmp_path)
    for name, folder in ((BASE, scene.target), (DATA, scene.data)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copytree(folder, tmp_path / name)
    found = resolve(SOURCE, TARGET)
    assert found.base.commit == hub.repo(BASE).head()
    ported = hf_bico.port(SOURCE, TARGET, n=9, evaluate=False, device="cpu", **PAPER)
    assert ported.record.data is not None
    assert ported.record.data.commit == hub.repo(DATA, "dataset").head()


@pytest.mark.parametrize("name", [f"https://huggingface.co/{BASE}", f"{BASE}@main"])
def test_addresses_and_revisions_in_cards_are_understood(hub: Hub, tmp_path: Path, name: str) -> None:
    publish(hub, tmp_path)
    hub.repo(SOURCE).commit({"README.md": f"---\nbase_model: {name}\ndatasets: {DATA}\n---\n"})
    assert resolve(SOURCE, TARGET).base.name == BASE


def test_a_card_that_names_a_model_as_its_data_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path)
    hub.repo(SOURCE).commit({"README.md": f"---\nbase_model: {BASE}\ndatasets: {TARGET}\n---\n"})
    found = resolve(SOURCE, TARGET)
    assert found.no_data is not None
    assert "--data" in found.no_data.remedy


def test_the_name_that_a_folder_was_loaded_from_is_no_fine_tuning(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    config = json.loads((scene.base / "config.json").read_text())
    (scene.base / "config.json").write_text(json.dumps({**config, "_name_or_path": "org/base"}))
    assert resolve(SOURCE, TARGET, base=scene.base).notices == ()


def test_a_plan_tells_what_a_port_would_refuse_without_force(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    config = json.loads((scene.tuned / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "relu"
    (scene.tuned / "config.json").write_text(json.dumps(config))
    upload(hub, "user/other", scene.tuned, f"---\nbase_model: {BASE}\n---\n")
    planned = hf_bico.plan("user/other", TARGET, base=BASE)
    told = "user/other is configured with vision_config.hidden_act relu and its base with gelu, which is used for both."
    assert told in planned.lineage.notices
    assert dict(planned.rows())["refused"].startswith("without --force: 'user/other' is configured with")
    where: dict[str, Any] = {"base": BASE, "data": DATA, "n": 8, "evaluate": False}
    with pytest.raises(BaseMismatchError, match="they compute different things"):
        hf_bico.port("user/other", TARGET, **where, **PAPER)
    assert told in hf_bico.port("user/other", TARGET, **where, **PAPER, force=True).record.notices
    assert told in hf_bico.extract("user/other", BASE, rank=2).record.notices


def test_the_preprocessing_of_a_fine_tune_on_the_hub_is_read(hub: Hub, tmp_path: Path) -> None:
    scene = publish(hub, tmp_path, ("transformers", "transformers"))
    file = scene.tuned / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "resample": 0, "crop_size": scene_size(file)}))
    upload(hub, "user/other", scene.tuned, f"---\nbase_model: {BASE}\n---\n")
    ported = hf_bico.port("user/other", TARGET, base=BASE, data=DATA, n=8, evaluate=False, **PAPER)
    notices = [notice for notice in ported.record.notices if "prepares images" in notice]
    assert notices == ["user/other prepares images with resample 0 and its base with 3, which is used for both."]


def scene_size(file: Path) -> int:
    """The side of the images, as older releases wrote it: one number."""
    return int(json.loads(file.read_text())["crop_size"]["height"])
