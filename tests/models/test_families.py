"""Watching a model changes nothing: same outputs, and the model is left as it was found. A family of one's own is one
class and one call."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

import hf_bico
from hf_bico.errors import (
    BicoError,
    BrokenWeightsError,
    ClassNamesError,
    MissingProcessorError,
    UnreadableSampleError,
    UnsupportedModelError,
    UsageError,
)
from hf_bico.models import families
from hf_bico.models.families.base import Family
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.open_clip import OpenClip
from hf_bico.models.model import Model
from support import ROOT
from support.hub.hub import Hub
from support.hub_scenes import upload
from support.page_text import read_blocks
from support.paper import PAPER
from support.records import metadata, snippet
from support.toys import WRITERS, Toy, fingerprint, random_state

pytestmark = pytest.mark.quick

TOY = Toy(width=16, blocks=2)


def load(library: str, folder: Path) -> LiveModel:
    path = WRITERS[library](folder / library, TOY, random_state(TOY, 0))
    return Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)


def custom_block_model(**vision: object) -> torch.nn.Module:
    """open_clip's own attention class, which later releases use throughout."""
    import open_clip

    from support.toys import open_clip_config

    config = open_clip_config(TOY)
    config["vision_cfg"] |= {"block_type": "custom", **vision}
    torch.manual_seed(0)
    return open_clip.CLIP(**config).eval()


def assert_watching_changes_nothing(live: LiveModel) -> None:
    pixels = torch.randn(3, 3, TOY.image_size, TOY.image_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = live.image_features(pixels)
    before = fingerprint(live.module)
    with live.observed(live.layout.main_sites) as trace:
        watched = live.image_features(pixels)
    assert fingerprint(live.module) == before
    assert torch.allclose(watched, plain, atol=1e-5)
    assert sorted(trace.outputs) == sorted(site.name for site in live.layout.main_sites)
    for site in live.layout.main_sites:
        assert trace.inputs[site.input].shape[-1] == site.shape[1]
        assert trace.outputs[site.name].shape[-1] == site.shape[0]
    with torch.no_grad():
        assert torch.equal(live.image_features(pixels), plain)


@pytest.mark.parametrize("library", WRITERS)
def test_watching_changes_nothing(library: str, tmp_path: Path) -> None:
    live = load(library, tmp_path)
    live.module.train()
    live.module.get_submodule("visual" if library == "open_clip" else "vision_model").eval()
    assert_watching_changes_nothing(live)


@pytest.mark.parametrize("vision", [{}, {"qk_norm": True}, {"scale_heads": True}, {"scale_attn_inner": True}])
def test_attention_is_recognised_by_its_parameters(vision: dict[str, object]) -> None:
    live = OpenClip().wrap(custom_block_model(**vision))
    assert type(live.module.visual.transformer.resblocks[0].attn).__name__ == "Attention"
    assert_watching_changes_nothing(live)


def test_scaled_cosine_attention_is_refused_by_name() -> None:
    live = OpenClip().wrap(custom_block_model(scaled_cosine_attn=True))
    with pytest.raises(UnsupportedModelError, match="scaled cosine"), live.observed(live.layout.main_sites):
        pass


def test_a_failure_while_watching_still_restores_the_model(tmp_path: Path) -> None:
    live = load("open_clip", tmp_path)
    before = fingerprint(live.module)
    with pytest.raises(RuntimeError, match="stop"), live.observed(live.layout.main_sites):
        raise RuntimeError("stop")
    assert fingerprint(live.module) == before


@pytest.mark.parametrize("library", WRITERS)
def test_site_weights_are_what_the_site_multiplies_by(library: str, tmp_path: Path) -> None:
    """y = x W^T + b with W and b read through the site's slots, packed, transposed or plain."""
    live = load(library, tmp_path)
    state = live.module.state_dict()
    with live.observed(live.layout.main_sites) as trace:
        live.image_features(torch.randn(2, 3, TOY.image_size, TOY.image_size))
    for site in live.layout.main_sites:
        y = trace.inputs[site.input] @ site.weight.view(state[site.weight.tensor]).T
        if site.bias is not None:
            y = y + site.bias.view(state[site.bias.tensor])
        assert torch.allclose(trace.outputs[site.name], y, atol=1e-5), site.name


def test_zero_shot_logits_agree_between_libraries(tmp_path: Path) -> None:
    from hf_bico.alignment.objectives.clip import zero_shot_head
    from support.toys import CLASS_NAMES

    noise = torch.randint(0, 256, (TOY.image_size, TOY.image_size, 3), dtype=torch.uint8)
    picture = Image.fromarray(noise.numpy())
    images = [picture, *(picture.convert(mode) for mode in ("L", "RGBA", "P", "LA"))]
    logits = []
    for library in WRITERS:
        live = load(library, tmp_path)
        head = zero_shot_head(live, CLASS_NAMES, ("a photo of a {}.", "the digit {}"))
        with torch.no_grad():
            logits.append(head.logits(live.image_features(live.pixels(images))))
    assert torch.allclose(*logits, atol=1e-4)


def test_grey_images_run_through_a_processor_that_does_not_convert(tmp_path: Path) -> None:
    path = WRITERS["transformers"](tmp_path / "model", TOY, random_state(TOY, 0))
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_convert_rgb": False}))
    live = Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)
    assert live.pixels([Image.new("L", (16, 16))]).shape == (1, 3, 16, 16)


MISCHIEF = "from pathlib import Path\nPath('{marker}').touch()\nclass Mine: pass\n"


@pytest.mark.parametrize("file", ["preprocessor_config.json", "tokenizer_config.json"])
def test_code_of_a_transformers_repo_is_never_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WRITERS["transformers"](tmp_path / "model", TOY, random_state(TOY, 0))
    plant_code(path, file, tmp_path / "marker")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    live = Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)
    with contextlib.suppress(BicoError):
        live.pixels([Image.new("RGB", (16, 16))])
        live.text_features(["a photo"])
    assert not (tmp_path / "marker").exists()


def test_code_of_an_open_clip_repo_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WRITERS["open_clip"](tmp_path / "model", TOY, random_state(TOY, 0))
    plant_code(path, "tokenizer_config.json", tmp_path / "marker")
    config = json.loads((path / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["tokenizer_kwargs"] = {"trust_remote_code": True}
    (path / "open_clip_config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(BicoError):
        Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)
    assert not (tmp_path / "marker").exists()


def plant_code(path: Path, file: str, marker: Path) -> None:
    """Make a configuration name a class of the repo's own."""
    (path / "mine.py").write_text(MISCHIEF.format(marker=marker))
    config = json.loads((path / file).read_text())
    names = {"AutoImageProcessor": "mine.Mine", "AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    config |= {"auto_map": names, "image_processor_type": "Mine", "tokenizer_class": "Mine"}
    (path / file).write_text(json.dumps(config))


def test_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    path = WRITERS["transformers"](tmp_path / "model", TOY, random_state(TOY, 0))
    other = WRITERS["transformers"](tmp_path / "other", TOY.but(grid=5), random_state(TOY.but(grid=5), 0))
    (path / "preprocessor_config.json").write_bytes((other / "preprocessor_config.json").read_bytes())
    live = Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"\(20, 20\) and the model takes \(16, 16\)"):
        live.pixels([Image.new("RGB", (30, 30))])


def test_arrays_are_no_images(tmp_path: Path) -> None:
    import numpy as np

    with pytest.raises(UnreadableSampleError, match="ndarray"):
        load("open_clip", tmp_path).pixels([np.zeros((16, 16, 3), dtype=np.uint8)])


def test_zero_shot_head_is_open_clips_own(tmp_path: Path) -> None:
    """Several templates, and the bias of SigLIP-like models, against the library's classifier."""
    import open_clip

    from hf_bico.alignment.objectives.clip import zero_shot_head
    from support.toys import CLASS_NAMES

    live = load("open_clip", tmp_path)
    model: Any = live.module
    model.logit_bias = torch.nn.Parameter(torch.tensor(-3.0))
    templates = ("a photo of a {}.", "the digit {}", "this says {}")
    head = zero_shot_head(live, CLASS_NAMES, templates)
    formats = [template.format for template in templates]
    expected = open_clip.build_zero_shot_classifier(model, live.tokenizer, CLASS_NAMES, formats)
    assert torch.allclose(head.classes, expected.T, atol=1e-6)
    features = torch.randn(5, TOY.embedding)
    logits = model.logit_scale.exp() * torch.nn.functional.normalize(features, dim=-1) @ expected - 3.0
    assert torch.allclose(head.logits(features), logits, atol=1e-4)


def test_only_safetensors_are_loaded(tmp_path: Path) -> None:
    """open_clip itself would prefer this pickle to a file of another name."""
    path = WRITERS["open_clip"](tmp_path / "model", TOY, random_state(TOY, 0))
    (path / "open_clip_model.safetensors").rename(path / "vit.safetensors")
    torch.save(random_state(TOY, 1), path / "open_clip_pytorch_model.bin")
    live = Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)
    assert torch.equal(live.module.state_dict()["visual.proj"], random_state(TOY, 0)["visual.proj"])


@pytest.mark.parametrize("library", WRITERS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_weights_that_do_not_fit_the_configuration(library: str, blocks: int, tmp_path: Path) -> None:
    path = WRITERS[library](tmp_path / "model", TOY, random_state(TOY, 0))
    other = WRITERS[library](tmp_path / "other", TOY.but(blocks=blocks), random_state(TOY.but(blocks=blocks), 0))
    config = "open_clip_config.json" if library == "open_clip" else "config.json"
    (path / config).write_bytes((other / config).read_bytes())
    with pytest.raises(BrokenWeightsError, match="configuration"):
        Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("library", WRITERS)
def test_weights_that_lack_a_tensor_are_not_completed_at_random(library: str, tmp_path: Path) -> None:
    path = WRITERS[library](tmp_path / "model", TOY, random_state(TOY, 0))
    file = next(path.glob("*.safetensors"))
    state = load_file(file)
    name = next(name for name in state if name.endswith(("ln_post.weight", "post_layernorm.weight")))
    del state[name]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(BrokenWeightsError, match=name.replace(".", r"\.")):
        Model.open(path, "a toy").load(torch.device("cpu"), torch.float32)


def test_tensor_missing_from_a_block_is_named(tmp_path: Path) -> None:
    from support.toys import write_open_clip

    state = random_state(TOY, 0)
    del state["visual.transformer.resblocks.1.mlp.c_fc.weight"]
    with pytest.raises(BrokenWeightsError, match=r"lacks the tensor .*resblocks\.1\.mlp\.c_fc\.weight"):
        Model.open(write_open_clip(tmp_path / "model", TOY, state), "the target")


def test_tokenizer_that_is_not_there_is_not_made_up(tmp_path: Path) -> None:
    live = load("transformers", tmp_path)
    for file in (tmp_path / "transformers").glob("*token*"):
        file.unlink()
    with pytest.raises(MissingProcessorError, match="no tokenizer"):
        live.text_features(["a photo"])


def test_names_that_the_tokenizer_cannot_tell_apart(tmp_path: Path) -> None:
    from hf_bico.alignment.objectives.clip import zero_shot_head

    with pytest.raises(ClassNamesError, match="cannot tell their names apart"):
        zero_shot_head(load("open_clip", tmp_path), ["xylophone", "zebra"], ["a photo of a {}."])


def test_tokens_beside_the_pooled_features_are_set_aside() -> None:
    import open_clip

    from support.toys import open_clip_config

    config = open_clip_config(TOY)
    config["vision_cfg"]["output_tokens"] = True
    live = OpenClip().wrap(open_clip.CLIP(**config).eval())
    assert_watching_changes_nothing(live)


def test_integer_tensors_are_no_prepared_images(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSampleError, match="integers"):
        load("open_clip", tmp_path).pixels([torch.zeros(3, 16, 16, dtype=torch.uint8)])


def test_heads_and_residual_stream_are_the_same_in_both_libraries(tmp_path: Path) -> None:
    toy = TOY.but(width=24, heads=3)
    known = {}
    for library, write in WRITERS.items():
        path = write(tmp_path / library, toy, random_state(toy, 0))
        opened = Model.open(path, "a toy")
        live = opened.load(torch.device("cpu"), torch.float32)
        for layout in (opened.layout, live.layout, Model.open(live.module, "the loaded toy").layout):
            assert (layout.heads, layout.residual) == (3, opened.layout.residual)
        for axis in opened.layout.residual:
            assert axis.tensor in opened.layout.others
            assert opened.checkpoint.tensor(axis.tensor).shape[axis.axis] == toy.width, axis
        known[library] = {
            axis.name: opened.checkpoint.tensor(axis.tensor).movedim(axis.axis, 0) for axis in opened.layout.residual
        }
    ours, theirs = known.values()
    assert list(ours) == list(theirs)
    assert len(ours) == 7 + 4 * toy.blocks
    assert {"class", "positions", "stem", "norm.pre.weight", "blocks.1.mlp.norm.bias"} <= set(ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_tensor_of_the_tower_is_a_site_or_runs_over_the_residual_stream(tmp_path: Path) -> None:
    for library, write in WRITERS.items():
        layout = Model.open(write(tmp_path / library, TOY, random_state(TOY, 0)), "a toy").layout
        rest = {name for name, reason in layout.others.items() if reason != "text tower"}
        assert rest == {axis.tensor for axis in layout.residual}


def test_heads_that_the_configuration_does_not_give_are_the_librarys_own() -> None:
    from hf_bico.models.families.transformers_clip import TransformersClip
    from support.toys import to_transformers

    toy = Toy(width=192, heads=3, blocks=1)
    state = random_state(toy, 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    open_clip = OpenClip()
    assert open_clip.layout(shapes, {"model_cfg": {"vision_cfg": {"width": 192}}}).heads == 192 // 64
    assert open_clip.layout(shapes, {"model_cfg": {"vision_cfg": {"head_width": 96}}}).heads == 2
    assert open_clip.layout(shapes, {"model_cfg": {"vision_cfg": {"head_width": "wide"}}}).heads is None
    assert open_clip.layout(shapes, {}).heads is None
    shapes = {name: tuple(tensor.shape) for name, tensor in to_transformers(state).items()}
    transformers = TransformersClip()
    assert transformers.layout(shapes, {"vision_config": {}}).heads == 12
    assert transformers.layout(shapes, {"vision_config": {"num_attention_heads": 6}}).heads == 6
    assert transformers.layout(shapes, {"vision_config": {"num_attention_heads": 7}}).heads is None


def test_layer_scale_runs_over_the_residual_stream() -> None:
    layout = OpenClip().wrap(custom_block_model(ls_init_value=0.1)).layout
    names = {axis.name: axis.tensor for axis in layout.residual}
    assert names["blocks.1.attn.scale"] == "visual.transformer.resblocks.1.ls_1.gamma"
    assert layout.heads == TOY.heads


def test_residual_stream_under_attentional_pooling_is_not_known() -> None:
    layout = OpenClip().wrap(custom_block_model(attentional_pool=True, attn_pooler_heads=2)).layout
    assert layout.residual == ()


# -- a family of one's own


@pytest.fixture
def siglip(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family of docs/adding-a-family.md, registered as the page does it."""
    monkeypatch.setattr(families, "_registered", {})
    blocks = [
        block for block in read_blocks((ROOT / "docs/adding-a-family.md").read_text()) if block.language == "python"
    ]
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks[:2]:
        exec(block.text, namespace)
    (family,) = families._registered.values()
    return family


def siglip_folder(folder: Path, width: int, patch: int, seed: int) -> Path:
    from transformers import SiglipConfig, SiglipForImageClassification, SiglipImageProcessor

    torch.manual_seed(seed)
    vision = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": patch,
        "vision_use_head": False,
    }
    no_text = {"bos_token_id": None, "eos_token_id": None}
    config = SiglipConfig(vision_config=vision, text_config=no_text, num_labels=3)
    SiglipForImageClassification(config).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


def task_loss(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch.pixels).logits, batch.labels, reduction="sum")


@pytest.mark.parametrize(
    ("place", "format"), [("folders", "full"), ("folders", "delta"), ("Hub", "full"), ("Hub", "adapter")]
)
def test_a_registered_family_is_ported(
    place: str, format: str, siglip: Family, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From folders and from the Hub, with a card that knows it, whose snippet runs."""
    sizes = {"base": (16, 4, 0), "tuned": (16, 4, 0), "target": (24, 2, 1)}
    folders = {name: siglip_folder(tmp_path / name, *size) for name, size in sizes.items()}
    weights = load_file(folders["tuned"] / "model.safetensors")
    changed = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(changed, folders["tuned"] / "model.safetensors", {"format": "pt"})
    names = {name: str(folder) for name, folder in folders.items()}
    if place == "Hub":
        names = {name: f"user/{name}" for name in folders}
        for name, folder in folders.items():
            upload(hub, names[name], folder)
    samples = [{"image": torch.randn(3, 8, 8), "label": number % 3} for number in range(12)]
    models: dict[str, Any] = {"base": names["base"], "to": names["target"]}
    how: dict[str, Any] = {"data": samples, "n": 12, "class_names": ["a", "b", "c"], "objective": task_loss}
    assert len(hf_bico.plan(names["tuned"], **models).pairs) == 13
    ported = hf_bico.port(names["tuned"], **models, **how, **PAPER)
    assert ported.record.target.family == siglip.name
    out = tmp_path / "out"
    ported.save(out, format=format)
    card = (out / "README.md").read_text()
    about = metadata(card)
    libraries = {"full": "transformers", "adapter": "peft", "delta": "hf-bico"}
    assert about["library_name"] == libraries[format]
    assert about.get("pipeline_tag") == (None if format == "delta" else "image-classification")
    code = snippet(card).replace("path/to/the/model", names["target"])
    assert ("AutoModelForImageClassification" in code) is (format != "delta")
    monkeypatch.chdir(out)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    pixels = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = ported.model()(pixels).logits
        assert torch.allclose(namespace["model"](pixels).logits, expected, atol=1e-4)


def test_a_family_registered_again_takes_the_place_of_the_first(siglip: Family) -> None:
    again = type(siglip)()
    hf_bico.register_family(again)
    assert families.family_named(siglip.name) is again
    assert [family.name for family in families.all_families()[-2:]] == [siglip.name, "generic"]


def test_a_family_with_the_name_of_a_built_in_one_is_refused(siglip: Family) -> None:
    class Vit(type(siglip)):  # type: ignore[misc]
        name = "ViT"

    with pytest.raises(UsageError, match="'ViT' is the name of a built-in family"):
        hf_bico.register_family(Vit())
    with pytest.raises(TypeError, match="an instance"):
        hf_bico.register_family(Vit)  # type: ignore[arg-type]
