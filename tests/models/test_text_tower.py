"""CLIP's text tower as sites, and the contrastive loss that calibrates both towers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_bico
from hf_bico.alignment.calibration_pass import Side, collect
from hf_bico.alignment.matching import pair_sites
from hf_bico.alignment.methods.base import MethodInputs, Pretrained
from hf_bico.alignment.methods.transfusion import TransFusion
from hf_bico.alignment.objectives.clip import PairGradients, contrastive_losses
from hf_bico.alignment.statistics import Kind
from hf_bico.errors import EmptyTaskVectorError, UnsuitableMethodError
from hf_bico.experiments.demo.digits import CONTEXT_LENGTH, build_tokenizer
from hf_bico.models.families.live import ClipModel
from hf_bico.models.families.open_clip import OpenClip, OpenClipModel
from hf_bico.models.hooks import Losses, Pass, TextRows
from hf_bico.models.model import Model
from hf_bico.porting.planner import UNMATCHED, with_blocks
from hf_bico.reports.pictures import record_picture
from hf_bico.settings import Settings
from support.toys import WRITERS, Toy, fingerprint, open_clip_config, random_state

pytestmark = pytest.mark.quick

TOY = Toy(width=16, blocks=3, text_blocks=2)
CAPTIONS = ["a photo of a zero", "the digit seven", "dark on light", "a blurry one from a form", "the digit seven"]
CPU = torch.device("cpu")


def load(library: str, folder: Path, toy: Toy = TOY) -> ClipModel:
    path = WRITERS[library](folder / library, toy, random_state(toy, 0))
    live = Model.open(path, "a toy").load(CPU, torch.float32)
    assert isinstance(live, ClipModel)
    return live


def text_sites(live: ClipModel) -> list:
    return [site for site in live.layout.sites if site.tower]


class Words:
    """open_clip's way to call a tokenizer, over the toys' own."""

    def __init__(self, **options: str) -> None:
        self.tokenizer = build_tokenizer()
        for name, value in options.items():
            setattr(self.tokenizer, name, value)

    def __call__(self, texts: list[str]) -> Tensor:
        padded = {"padding": "max_length", "max_length": CONTEXT_LENGTH, "truncation": True}
        return self.tokenizer(texts, return_tensors="pt", **padded).input_ids


def custom_text_model(**text: object) -> OpenClipModel:
    """open_clip's CLIP whose text tower is a module of its own."""
    import open_clip

    config = open_clip_config(TOY)
    config["text_cfg"] |= text
    torch.manual_seed(0)
    live = OpenClip().wrap(open_clip.CustomTextCLIP(**config).eval())
    assert isinstance(live, OpenClipModel)
    live.tokenizer = Words()
    return live


def root_text_model(**text: object) -> OpenClipModel:
    import open_clip

    config = open_clip_config(TOY)
    config["text_cfg"] |= text
    torch.manual_seed(0)
    live = OpenClip().wrap(open_clip.CLIP(**config).eval())
    assert isinstance(live, OpenClipModel)
    live.tokenizer = Words()
    return live


def test_both_libraries_name_the_same_sites(tmp_path: Path) -> None:
    ours, theirs = (load(library, tmp_path) for library in WRITERS)
    assert [(site.name, site.role, site.block, site.input, site.shape) for site in text_sites(ours)] == [
        (site.name, site.role, site.block, site.input, site.shape) for site in text_sites(theirs)
    ]
    names = [site.name for site in text_sites(ours)]
    assert len(names) == 6 * TOY.text_blocks + 1
    assert {"text.blocks.0.attn.q", "text.blocks.1.mlp.down", "text.proj"} <= set(names)
    for live in (ours, theirs):
        assert live.layout.text_blocks == TOY.text_blocks
        assert live.layout.blocks == TOY.blocks
        assert all(site.text and site.tower == "text" for site in text_sites(live))
        assert live.layout.site("proj").tower == ""
        taken = {slot.tensor for slot in live.layout.slots()}
        assert taken.isdisjoint(live.layout.others)
        assert taken | set(live.layout.others) == set(live.module.state_dict())
    left = [name for name, reason in ours.layout.others.items() if reason == "text tower"]
    assert {"token_embedding.weight", "positional_embedding", "logit_scale", "ln_final.weight"} <= set(left)


MODELS = {
    "tensor": custom_text_model,
    "module": lambda: custom_text_model(proj_bias=True),
    "root, with a bias": lambda: root_text_model(proj_bias=True),
    "custom blocks": lambda: root_text_model(block_type="custom", qk_norm=True),
    "no causal mask": lambda: custom_text_model(no_causal_mask=True, pool_type="last"),
    "no projection": lambda: custom_text_model(proj_type="none", width=TOY.embedding),
}


@pytest.mark.parametrize("kind", [*WRITERS, *MODELS])
def test_watching_the_text_tower_changes_nothing_and_shows_plain_linear_maps(kind: str, tmp_path: Path) -> None:
    live = load(kind, tmp_path) if kind in WRITERS else MODELS[kind]()
    sites, state = text_sites(live), live.module.state_dict()
    assert len(sites) == 6 * TOY.text_blocks + (kind != "no projection")
    with torch.no_grad():
        plain = live.text_features(CAPTIONS)
    before = fingerprint(live.module)
    with live.observed(sites) as trace:
        watched = live.text_features(CAPTIONS)
    assert fingerprint(live.module) == before
    assert torch.allclose(watched, plain, atol=1e-5)
    assert list(trace.outputs) == [site.name for site in sites]
    for site in sites:
        y = trace.inputs[site.input] @ site.weight.view(state[site.weight.tensor]).T
        if site.bias is not None:
            y = y + site.bias.view(state[site.bias.tensor])
        assert torch.allclose(trace.outputs[site.name], y, atol=1e-5), site.name
    with torch.no_grad():
        assert torch.equal(live.text_features(CAPTIONS), plain)


def test_both_libraries_show_the_same_rows_and_gradients(tmp_path: Path) -> None:
    shown = []
    for library in WRITERS:
        live = load(library, tmp_path)
        ids, mask = live.text_tokens(CAPTIONS)
        with live.observed(text_sites(live)) as trace:
            loss = live.text_features(CAPTIONS).square().sum()
            found = torch.autograd.grad(loss, list(trace.outputs.values()))
        gradients = dict(zip(trace.outputs, found, strict=True))
        rows = {name: x[mask] if x.ndim == 3 else x for name, x in trace.inputs.items()}
        shown.append((ids, mask, rows, {name: g[mask] if g.ndim == 3 else g for name, g in gradients.items()}))
        padded = [g[~mask] for g in gradients.values() if g.ndim == 3]
        assert all(bool((rest == 0).all()) for rest in padded), "a causal mask keeps padding out of the loss"
    (ids, mask, rows, gradients), (their_ids, their_mask, their_rows, their_gradients) = shown
    assert torch.equal(ids, their_ids)
    assert torch.equal(mask, their_mask)
    for ours, theirs in ((rows, their_rows), (gradients, their_gradients)):
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


def test_real_tokens_end_with_the_end_of_the_text(tmp_path: Path) -> None:
    lengths = [1 + len(build_tokenizer().tokenize(caption)) + 1 for caption in CAPTIONS]
    for library in WRITERS:
        _, mask = load(library, tmp_path).text_tokens(CAPTIONS)
        assert mask.dtype == torch.bool
        assert mask.tolist() == [[place < length for place in range(CONTEXT_LENGTH)] for length in lengths]
    live = root_text_model()
    live.tokenizer = Words(pad_token="<end>")  # as OpenAI's own CLIPs pad
    assert live.text_tokens(CAPTIONS)[1].sum(1).tolist() == lengths


def test_real_tokens_of_open_clips_own_tokenizer() -> None:
    import open_clip

    live = root_text_model(context_length=12, vocab_size=49408)
    live.tokenizer = open_clip.SimpleTokenizer(context_length=12)
    ids, mask = live.text_tokens(["a photo", "one two three four five six seven eight nine ten eleven", "!a"])
    assert mask.sum(1).tolist() == [4, 12, 1 + len(live.tokenizer.encode("!a")) + 1]
    assert bool((ids[mask] != 0).any())
    assert bool((ids[0, 4:] == 0).all())


def test_row_that_is_pooled_counts_as_real() -> None:
    live = custom_text_model(no_causal_mask=True, pool_type="last")
    _, mask = live.text_tokens(CAPTIONS)
    assert bool(mask[:, -1].all())
    assert not bool(mask[:, -2].any())
    assert bool(custom_text_model(pool_type="first").text_tokens(CAPTIONS)[1][:, 0].all())


def test_towers_that_are_no_row_of_tokens_have_no_text_sites() -> None:
    """A class embedding is a row beside the tokens; a text tower of another library has blocks of another kind."""
    live = custom_text_model(embed_cls=True)
    assert text_sites(live) == []
    assert live.layout.text_blocks == 0
    assert live.layout.others["text.transformer.resblocks.0.mlp.c_fc.weight"] == "text tower"
    shapes = {name: tuple(tensor.shape) for name, tensor in random_state(TOY, 0).items() if name.startswith("visual.")}
    bert = {"text.transformer.encoder.layer.0.attention.self.query.weight": (4, 4)}
    layout = OpenClip().layout({**shapes, **bert}, {})
    assert not any(site.tower for site in layout.sites)
    assert layout.others[next(iter(bert))] == "text tower"


def test_text_blocks_are_matched_by_index_whatever_the_main_towers_are(tmp_path: Path) -> None:
    source = load("open_clip", tmp_path).layout
    deep = TOY.but(blocks=2, text_blocks=3, text_width=24)
    target = load("transformers", tmp_path, deep).layout
    pairs = {pair.target.name: pair.source.name for pair in pair_sites(source, target, [2, 2])}
    assert pairs["blocks.0.attn.q"] == "blocks.2.attn.q"
    assert [pairs[f"text.blocks.{block}.mlp.up"] for block in range(3)] == [
        f"text.blocks.{block}.mlp.up" for block in (0, 1, 1)
    ]
    assert (pairs["proj"], pairs["text.proj"]) == ("proj", "text.proj")
    assert len(pairs) == len(target.sites)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and target, and fine-tunes of the base: of both towers, and its vision tower alone."""
    folder = tmp_path_factory.mktemp("towers")
    state = random_state(TOY, 0)
    generator = torch.Generator().manual_seed(5)
    tuned = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    write = WRITERS["open_clip"]
    made = {
        "base": write(folder / "base", TOY, state),
        "both": write(folder / "both", TOY, tuned),
        "target": write(folder / "target", TOY.but(text_blocks=3), random_state(TOY.but(text_blocks=3), 1)),
        "vision": folder / "vision",
    }
    shutil.copytree(made["both"], made["vision"])
    file = made["vision"] / "open_clip_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name.startswith("visual.")}, file)
    return made


def test_plan_says_which_sites_of_the_text_tower_may_be_carried(folders: dict[str, Path]) -> None:
    planned = hf_bico.plan(folders["both"], to=folders["target"], base=folders["base"])
    assert planned.towers == ("", "text")
    raw = json.loads(json.dumps(planned.as_dict()))
    assert (len(raw["sites"]), len(raw["text_sites"])) == (6 * 3 + 1, 6 * 3 + 1)
    assert raw["text_sites"][-1]["name"] == "text.proj"
    rows = dict(planned.rows())
    assert rows["carried"].startswith("19 sites: attn.q x3")
    assert rows["text"].startswith("19 sites: attn.q x3")
    assert rows["text"].endswith("if the source changed them")
    assert planned.left["token_embedding.weight"] == "text tower"
    assert "text_projection" not in planned.left


def test_blocks_of_a_deeper_text_tower_have_no_counterpart(folders: dict[str, Path]) -> None:
    planned = hf_bico.plan(folders["target"], to=folders["both"], base=folders["target"])
    assert planned.left["transformer.resblocks.1.mlp.c_fc.weight"] == UNMATCHED
    assert planned.of_towers([""]).left["transformer.resblocks.1.mlp.c_fc.weight"] == "text tower"


def test_source_of_a_vision_tower_has_no_text_sites(folders: dict[str, Path]) -> None:
    planned = hf_bico.plan(folders["vision"], to=folders["target"], base=folders["base"])
    assert planned.towers == ("",)
    assert planned.left["transformer.resblocks.0.mlp.c_fc.weight"] == planned.left["text_projection"] == "text tower"
    assert "text" not in dict(planned.rows())


def test_plan_of_some_towers_leaves_the_others_behind(folders: dict[str, Path]) -> None:
    planned = hf_bico.plan(folders["both"], to=folders["target"], base=folders["base"])
    vision, text = planned.of_towers([""]), planned.of_towers(["text"])
    assert [pair.target.name for pair in vision.pairs + text.pairs] == [pair.target.name for pair in planned.pairs]
    assert vision.left["text_projection"] == "text tower"
    assert text.left["visual.proj"] == "vision tower"
    assert list(vision.left) == [name for name in planned.lineage.base.checkpoint.shapes if name in vision.left]
    assert with_blocks(vision, [0, 0, 2]).towers == ("",)
    assert with_blocks(text, [0, 0, 2]).pairs == text.pairs
    with pytest.raises(EmptyTaskVectorError, match="text tower"):
        vision.of_towers(["text"])


def test_transfusion_looks_at_one_tower_and_refuses_two(folders: dict[str, Path]) -> None:
    planned = hf_bico.plan(folders["both"], to=folders["target"], base=folders["base"])
    source, target = planned.lineage.base, planned.lineage.target
    method = TransFusion(Settings(method="transfusion"))
    method.require(source.layout, target.layout, planned.pairs)  # the text towers differ in depth
    seen = MethodInputs(Pretrained(source.layout, source.checkpoint), Pretrained(target.layout, target.checkpoint))
    with pytest.raises(UnsuitableMethodError, match="a text tower is to be carried too"):
        method.prepare(planned.pairs, seen)
    method.prepare(planned.of_towers([""]).pairs, seen)
    assert not any(group.startswith("text") for group in method.permutations)


def test_tables_and_pictures_keep_the_towers_apart() -> None:
    from hf_bico.reports.pictures import HeatMap
    from hf_bico.reports.results import Report
    from support.records import a_record, some_sites

    alone = a_record(2)
    texts = [
        replace(site, name=f"text.{site.name}", role=f"text.{site.role}", score_in=0.125) for site in some_sites(3)
    ]
    both = replace(alone, sites=[*alone.sites, *texts])
    main_map, both_map = (HeatMap(tuple(record.sites), 2) for record in (alone, both))
    roles = list(main_map.rows)
    assert list(both_map.rows) == [*roles, *(f"text.{role}" for role in roles)]
    assert both_map.columns == [0, 1, 2, None], "the text tower is the deeper one"
    main, values = (heat_map.values("score_in") for heat_map in (main_map, both_map))
    assert (values[: len(roles), [0, 1, 3]] == main).all()
    assert np.isinf(values[: len(roles), 2]).all(), "the main tower has no third block"
    rest = values[len(roles) :]
    assert (rest[:-1, :3] == 0.125).all()
    assert rest[-1, 3] == 0.125
    assert np.isinf(rest[:-1, 3]).all()
    assert record_picture(both) not in (None, record_picture(alone))
    table = {row[0]: row for row in Report(tuple(both.sites), ()).rows()}
    assert (table["attn.q"][1], table["text.attn.q"][1], table["text.proj"][1]) == ("2", "3", "1")


def features_of_all(live: ClipModel, pixels: Tensor) -> tuple[Tensor, Tensor]:
    return live.image_features(pixels), live.text_features(CAPTIONS)


@pytest.mark.parametrize("bias", [None, torch.tensor(-2.0)], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("library", WRITERS)
def test_batches_have_the_gradients_of_the_whole_loss(library: str, bias: Tensor | None, tmp_path: Path) -> None:
    live = load(library, tmp_path)
    live.module.double()
    pixels = torch.randn(len(CAPTIONS), 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scale, _ = live.logit_scale_and_bias()
    sites = live.layout.sites

    with live.observed(sites) as trace:
        images, texts = features_of_all(live, pixels)
        whole = contrastive_losses(images, texts, scale, bias, CAPTIONS).sum()
        expected = torch.autograd.grad(whole, list(trace.outputs.values()))
    found = PairGradients.of(images, texts, scale, bias, CAPTIONS)
    assert found.images.dtype == torch.float64
    for size in (2, 5):
        parts: list[list[Tensor]] = [[] for _ in expected]
        for first in range(0, len(CAPTIONS), size):
            some = slice(first, first + size)
            with live.observed(sites) as seen:
                batch = (live.image_features(pixels[some]), live.text_features(CAPTIONS[some]))
                loss = found.surrogate(*batch, range(len(CAPTIONS))[some])
                gradients = torch.autograd.grad(loss, list(seen.outputs.values()))
            assert list(seen.outputs) == list(trace.outputs)
            for part, gradient in zip(parts, gradients, strict=True):
                part.append(gradient)
        for name, part, wanted in zip(trace.outputs, parts, expected, strict=True):
            assert torch.allclose(torch.cat(part), wanted, atol=1e-9), name
            assert bool(wanted.abs().max() > 1e-6), name


def test_statistics_of_both_towers_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    """Each text site's sums are those of its real tokens, all pairs at once."""
    wide = TOY.but(width=24, heads=3, blocks=2, text_width=24, text_blocks=3)
    models = [load("open_clip", tmp_path), load("transformers", tmp_path, wide)]
    for live in models:
        live.module.double()
    pixels = torch.randn(len(CAPTIONS), 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = pair_sites(models[0].layout, models[1].layout, [0, 2])
    cached = []
    for live in models:
        with torch.no_grad():
            images, texts = features_of_all(live, pixels)
        cached.append(PairGradients.of(images, texts, *live.logit_scale_and_bias(), CAPTIONS))

    def batches(size: int) -> Iterator[tuple[Pass, Pass]]:
        for first in range(0, len(CAPTIONS), size):
            some = slice(first, first + size)

            def run(side: int, some: slice = some) -> Losses:
                live, captions = models[side], CAPTIONS[some]
                features = (live.image_features(pixels[some]), live.text_features(captions))
                loss = cached[side].surrogate(*features, range(len(CAPTIONS))[some])
                return Losses(loss, text=TextRows(*live.text_tokens(captions)))

            yield partial(run, 0), partial(run, 1)

    kinds = {Kind.INPUTS, Kind.GRADIENTS}
    sides = [Side(live, live.layout.tokens) for live in models]
    two, five = (collect(pairs, *sides, batches(size), kinds) for size in (2, 5))
    for kind in kinds:
        for pair in pairs:
            ours, all_at_once = (found.of(kind, pair).total for found in (two, five))
            assert torch.allclose(ours, all_at_once, rtol=1e-9, atol=1e-12), (kind, pair.target.name)
            assert bool(all_at_once.abs().max() > 0), (kind, pair.target.name)

    rows = []
    for live in models:
        with torch.no_grad(), live.observed(text_sites(live)) as trace:
            live.text_features(CAPTIONS)
        rows.append([trace.inputs["text.blocks.0.attn.in"][live.text_tokens(CAPTIONS)[1]], trace.inputs["text.proj"]])
    for name, (ours, theirs) in zip(("text.blocks.0.attn.q", "text.proj"), zip(*rows, strict=True), strict=True):
        pair = next(pair for pair in pairs if pair.target.name == name)
        assert torch.allclose(five.of(Kind.INPUTS, pair).total, ours.T @ theirs, atol=1e-9), name


def literal_losses(images: Tensor, texts: Tensor, scale: float, bias: float | None, captions: list[str]) -> list[float]:
    from math import exp, log

    def unit(row: Tensor) -> Tensor:
        return row / row.norm()

    count = len(captions)
    logits = [[scale * float(unit(x) @ unit(y)) + (bias or 0.0) for y in texts] for x in images]
    losses = []
    for i in range(count):
        if bias is not None:
            signs = [1 if captions[i] == other else -1 for other in captions]
            losses.append(sum(log(1 + exp(-sign * logits[i][j])) for j, sign in enumerate(signs)))
            continue
        right = [j for j in range(count) if captions[j] == captions[i]]
        over_texts = log(sum(exp(logits[i][j]) for j in range(count)))
        over_images = log(sum(exp(logits[j][i]) for j in range(count)))
        losses.append(sum((over_texts - logits[i][j] + over_images - logits[j][i]) / 2 for j in right))
        losses[-1] /= len(right)
    return losses


@pytest.mark.parametrize("bias", [None, -2.0], ids=["softmax", "sigmoid"])
def test_losses_are_those_of_the_formula(bias: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    images, texts = torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)
    given = None if bias is None else torch.tensor(bias)
    found = contrastive_losses(images, texts, torch.tensor(3.0), given, CAPTIONS)
    literal = literal_losses(images.double(), texts.double(), 3.0, bias, CAPTIONS)
    assert found.tolist() == pytest.approx(literal, rel=1e-9)


def test_equal_captions_are_right_for_each_other() -> None:
    eye = torch.eye(4)
    captions = ["one", "two", "one", "three"]
    same = eye[[0, 1, 0, 3]]
    alike = contrastive_losses(same, same, torch.tensor(50.0), None, captions)
    assert alike[0] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-6), "between two equal ones, a coin's throw"
    gradients = PairGradients.of(same, same, torch.tensor(50.0), None, captions)
    assert float(gradients.images.abs().max()) < 1e-9, "nothing pulls equal captions apart"
