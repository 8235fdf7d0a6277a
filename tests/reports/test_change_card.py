"""The card of an extracted or applied change: what it says, what it never says, and that it runs as it stands."""

from __future__ import annotations

import ast
import shlex
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_bico.porting.task_arithmetic import apply, extract
from hf_bico.reports.model_cards import render_card, write_card
from hf_bico.reports.record import (
    ArithmeticRecord,
    ChangeRecord,
    LayerRecord,
    LeftRecord,
    ModelRecord,
    OutputRecord,
    Summand,
)
from support.hub import Hub
from support.loopback import validates_cards
from support.records import (
    BENIGN,
    HOSTILE,
    INSTALL,
    WEIGHTS,
    fences,
    headings,
    inlines,
    metadata,
    python_without_texts,
    shape,
    skeleton,
    snippet,
    text_of,
)
from support.toys import WRITERS, Toy, random_state

pytestmark = pytest.mark.quick

SOURCE, OTHER, BASE, REPO = "alice/vit-b16-eurosat", "bob/cars-lora", "laion/CLIP-ViT-B-16", "alice/eurosat-lora"
COMMITS = {SOURCE: "a1" * 20, OTHER: "d4" * 20, BASE: "b2" * 20}
RUN = ArithmeticRecord("2026-01-01T00:00:00+00:00", 2.5, {"torch": "2.15.0", "peft": "0.21.2"})


def a_model(name: str, **more: Any) -> ModelRecord:
    digest = {SOURCE: "e6", OTHER: "c5", BASE: "f7"}[name] * 32
    return ModelRecord(name, COMMITS[name], {WEIGHTS: digest}, **{"license": "mit", **more})


def some_layers(blocks: int = 12) -> list[LayerRecord]:
    """As an adapter over open_clip has them: attention and projection exact, the rest by factors."""
    block = [
        LayerRecord(f"visual.transformer.resblocks.{i}.{name}", 0.9 / (6 * blocks), 0.8 if rank else 1.0, rank)
        for i in range(blocks)
        for name, rank in (
            *(("mlp.c_fc.weight", 4 + i % 3), ("mlp.c_fc.bias", None), ("mlp.c_proj.weight", 4)),
            *(("attn.in_proj_weight", None), ("attn.in_proj_bias", None), ("attn.out_proj.weight", None)),
        )
    ]
    return [*block, LayerRecord("visual.proj", 0.05, 1.0)]


def an_extract(**changes: Any) -> ChangeRecord:
    """With all that a record can hold."""
    base = a_model(BASE, family="open_clip ViT", language=["en"])
    made = ChangeRecord(
        hf_bico="0.3.0",
        job="extract",
        parts=[Summand(a_model(SOURCE, family="open_clip ViT", kind="full", base=base))],
        target=base,
        alpha=1.0,
        output=OutputRecord("adapter", {"adapter_model.safetensors": "b9" * 32}, None, REPO, None, 4, 0.9321),
        run=RUN,
        command=f"hf-bico extract {SOURCE} --base {BASE} --rank 4",
        layers=some_layers(),
        left=[LeftRecord("visual.conv1.weight", "no linear layer", 0.03), LeftRecord("x", "no linear layer", 0.02)],
        notices=["Tensors of the base that the fine-tuned model lacks, taken as unchanged: 1 (x)."],
    )
    return replace(made, **changes)


def an_apply(format: str = "full", **changes: Any) -> ChangeRecord:
    lora = a_model(OTHER, kind="adapter", peft_type="LORA")
    made = replace(
        an_extract(),
        job="apply",
        parts=[Summand(lora, 0.7), Summand(a_model(SOURCE, kind="delta"), 0.3)],
        alpha=0.5,
        output=OutputRecord(format, {WEIGHTS: "b9" * 32}, 0.01, REPO),
        command=f"hf-bico apply {OTHER} {SOURCE} --to {BASE} --weights 0.7,0.3 --alpha 0.5",
        layers=some_layers() if format == "adapter" else [],
        left=[],
    )
    return replace(made, **changes)


def test_extract_card_has_what_is_known() -> None:
    record = an_extract()
    card = render_card(replace(record, output=replace(record.output, replaced=["visual.proj"])))
    assert headings(card) == [
        f"{SOURCE} as an adapter of {BASE}",
        *("Lineage", "Use", "How it was made", "What it holds", "Limits and risks", "Licences", "Versions"),
    ]
    links = {token.attrs["href"] for token in inlines(card) if token.type == "link_open"}
    assert links == {
        f"https://huggingface.co/{REPO}",
        *(f"https://huggingface.co/{name}" for name in (SOURCE, BASE)),
        *(f"https://huggingface.co/{name}/tree/{COMMITS[name]}" for name in (SOURCE, BASE)),
        "https://github.com/hf-bico/hf-bico",
    }
    read = text_of(card)
    for said in (
        f"This is a PEFT adapter for {BASE}. It holds the change that separates {SOURCE} from it",
        "Note: Tensors of the base that the fine-tuned model lacks",
        "source, fine-tuned",
        "e6" * 8,
        "The adapter holds 93.2% of the change's energy. Linear layers are stored as factors of rank 4",
        "attention modules are stored in full",
        "visual.proj replaces the base's own tensor when the adapter is loaded.",
        "No training and no data were used, and nothing was measured. It took 2.5 seconds.",
        "only as far as it holds its change",
        "torch 2.15.0",
    ):
        assert said in read
    assert "| no linear layer | 2 | 5.0% |" in card
    assert {token.info: token.content for token in fences(card)}["sh"] == f"{INSTALL}{an_extract().command}\n"


def test_layers_are_told_by_kind_and_not_by_block() -> None:
    card = render_card(an_extract())
    rows = card.partition("| layer | layers | energy | rank | kept |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [row.replace("`", "") for row in rows] == [
        "| visual.transformer.resblocks.*.mlp.c_fc | 12 | 30.0% | 4 to 6 | 90.0% |",
        "| visual.transformer.resblocks.*.mlp.c_proj | 12 | 15.0% | 4 | 80.0% |",
        "| visual.transformer.resblocks.*.attn.in_proj_weight | 12 | 15.0% | exact | 100.0% |",
        "| visual.transformer.resblocks.*.attn.in_proj_bias | 12 | 15.0% | exact | 100.0% |",
        "| visual.transformer.resblocks.*.attn.out_proj | 12 | 15.0% | exact | 100.0% |",
        "| visual.proj | 1 | 5.0% | exact | 100.0% |",
    ]


def test_many_kinds_of_layers_fit_a_table() -> None:
    names = [f"{'m' * i}.{j}.weight" for i in range(1, 60) for j in range(20)]
    card = render_card(
        an_extract(layers=[LayerRecord(name, 1 / len(names), 0.5, 2 + i % 2) for i, name in enumerate(names)])
    )
    assert card.count("| 50.0% |") == 24
    assert "| other layers | 720 | 61.0% | 2 to 3 | 50.0% |" in card


def test_metadata_of_an_extracted_adapter() -> None:
    assert metadata(render_card(an_extract())) == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "zero-shot-image-classification",
        "license": "mit",
        "language": ["en"],
        "tags": ["hf-bico", "task-vector", "training-free", f"base_model:adapter:{BASE}", "lora", "clip"],
    }


@pytest.mark.parametrize(
    ("format", "base", "relation", "library"),
    [
        ("full", [BASE, OTHER, SOURCE], "merge", "open_clip"),
        ("adapter", BASE, "adapter", "peft"),
        ("delta", BASE, "adapter", "hf-bico"),
    ],
)
def test_apply_card_says_what_was_added(format: str, base: Any, relation: str, library: str) -> None:
    card = render_card(an_apply(format))
    found = metadata(card)
    assert (found["base_model"], found["base_model_relation"], found["library_name"]) == (base, relation, library)
    assert ("pipeline_tag" in found) == (format != "delta")
    assert headings(card)[0] == f"{BASE} with {OTHER} and {SOURCE}"
    assert ("What it holds" in headings(card)) == (format == "adapter")
    read = text_of(card)
    for said in (
        "the sum of 2 changes, times 0.5",
        f"What was added: 0.7 times {OTHER}, 0.3 times {SOURCE}; the sum is multiplied by alpha, 0.5.",
        "adapter (LORA), times 0.7",
        "task vector, times 0.3",
        "may interfere with each other",
        "lost 1.0% of the change",
    ):
        assert said in read
    ast.parse(snippet(card))


def test_one_adapter_merged_is_a_finetune() -> None:
    made = an_apply(alpha=1.0)
    card = render_card(replace(made, parts=[replace(made.parts[0], weight=1.0)]))
    assert metadata(card)["base_model_relation"] == "finetune"
    assert headings(card)[0] == f"{BASE} with {OTHER}"
    assert f"This is {BASE} with {OTHER}, merged into its weights. hf-bico made" in text_of(card)
    assert "times" not in text_of(card)


def test_a_long_sum_is_cut_in_the_title() -> None:
    made = an_apply()
    assert headings(render_card(replace(made, parts=made.parts * 3)))[0].endswith(f"{OTHER} and 3 more")


def test_licences_of_all_parts_count() -> None:
    made = an_apply()
    parts = [replace(made.parts[0], model=replace(made.parts[0].model, license="cc-by-4.0")), made.parts[1]]
    card = render_card(replace(made, parts=parts))
    found = metadata(card)
    assert (found["license"], found["license_name"]) == ("other", "cc-by-4.0-and-mit")
    assert found["license_link"].endswith("#licences")
    assert "These licences differ" in card


def local(made: ChangeRecord, names: dict[str, str]) -> ChangeRecord:
    def hidden(model: ModelRecord) -> ModelRecord:
        base = None if model.base is None else hidden(model.base)
        return replace(model, id=names[model.id], commit=None, license=None, base=base)

    command = made.command or ""
    for repo, name in names.items():
        command = command.replace(repo, name)
    return replace(
        made,
        parts=[replace(part, model=hidden(part.model)) for part in made.parts],
        target=hidden(made.target),
        output=replace(made.output, repo=None),
        command=command,
    )


@pytest.mark.parametrize(
    ("made", "title", "command"),
    [
        (
            an_extract(),
            "my-tune as an adapter of my-base",
            "hf-bico extract my-tune --base my-base --rank 4",
        ),
        (
            an_apply(),
            "my-base with my-lora and my-tune",
            "hf-bico apply my-lora my-tune --to my-base --weights 0.7,0.3 --alpha 0.5",
        ),
    ],
)
def test_local_folders_are_named_without_links(made: ChangeRecord, title: str, command: str) -> None:
    names = {SOURCE: "my-tune", OTHER: "my-lora", BASE: "my-base"}
    card = render_card(local(made, {model.id: names[model.id] for model in made.models}))
    assert headings(card)[0] == title
    assert {token.info: token.content for token in fences(card)}["sh"] == f"{INSTALL}{command}\n"
    assert not metadata(card).keys() & {"base_model", "base_model_relation", "license"}
    links = {token.attrs["href"] for token in inlines(card) if token.type == "link_open"}
    assert links == {"https://github.com/hf-bico/hf-bico"}


@pytest.mark.parametrize(
    "command",
    [
        *(f"hf-bico extract {SOURCE} 'x", "hf-bico port secret", "hf-bico extract", None),
        *(
            f"hf-bico extract {SOURCE} {more}"
            for more in ("| secret", "--push-to secret", "--rank secret", "--alpha 1")
        ),
    ],
)
def test_command_that_cannot_be_read_is_left_out(command: str | None) -> None:
    card = render_card(an_extract(command=command))
    assert [token.info for token in fences(card)] == ["python"]
    assert "secret" not in card


def test_unknown_things_leave_no_empty_section() -> None:
    bare = ChangeRecord(
        "0.3.0", "apply", [Summand(ModelRecord("x"))], ModelRecord("y"), 1.0, OutputRecord("full", {}), RUN
    )
    card = render_card(bare)
    assert headings(card)[1:] == ["Lineage", "How it was made", "Limits and risks", "Versions"]
    assert metadata(card) == {"library_name": "hf-bico", "tags": ["hf-bico", "task-vector", "training-free"]}
    for empty in ("None", "[]", "()", ": .", " ,", "\n\n\n"):
        assert empty not in card
    assert "\n\n\n" not in render_card(an_extract())
    assert "nothing" in render_card(replace(bare, parts=[]))


def test_there_is_no_picture(tmp_path: Path) -> None:
    write_card(an_extract(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


@validates_cards
@pytest.mark.parametrize("made", [an_extract(), *(an_apply(format) for format in ("full", "adapter", "delta"))])
def test_card_passes_the_hubs_own_validation(made: ChangeRecord, hub: Hub) -> None:
    ModelCard(render_card(made)).validate()
    assert [entry.path for entry in hub.log if "validate-yaml" in entry.path]


# Hostile texts


def _models(made: ChangeRecord, **changes: Any) -> ChangeRecord:
    parts = [replace(part, model=replace(part.model, **changes)) for part in made.parts]
    return replace(made, parts=parts, target=replace(made.target, **changes))


def _output(made: ChangeRecord, **changes: Any) -> ChangeRecord:
    return replace(made, output=replace(made.output, **changes))


FIELDS: dict[str, Callable[[ChangeRecord, str], ChangeRecord]] = {
    "version": lambda made, text: replace(made, hf_bico=text),
    "model id": lambda made, text: _models(made, id=text),
    "model commit": lambda made, text: _models(made, commit=text),
    "model files": lambda made, text: _models(made, sha256={text: "ab" * 32}),
    "model digest": lambda made, text: _models(made, sha256={WEIGHTS: text}),
    "kind": lambda made, text: _models(made, kind=text),
    "peft type": lambda made, text: _models(made, kind="adapter", peft_type=text),
    "licence": lambda made, text: _models(made, license=text),
    "licence name": lambda made, text: _models(made, license="other", license_name=text),
    "language": lambda made, text: _models(made, language=[text]),
    "layer": lambda made, text: replace(made, layers=[*made.layers, LayerRecord(text, 0.1, 0.5, 2)]),
    "reason": lambda made, text: replace(made, left=[LeftRecord(text, text, 0.1)]),
    "repo": lambda made, text: _output(made, repo=text),
    "branch": lambda made, text: _output(made, revision=text),
    "files": lambda made, text: _output(made, files={text: "ab" * 32}),
    "notices": lambda made, text: replace(made, notices=[text, f"'{text}'"]),
    "command": lambda made, text: replace(made, command=f"{made.command} --x {shlex.quote(text)}"),
    "versions": lambda made, text: replace(made, run=replace(made.run, versions={text: text})),
    "title": lambda made, text: _output(made, title=text),
}


@settings(max_examples=100, deadline=None)
@given(
    fields=st.sets(st.sampled_from(sorted(FIELDS)), min_size=1),
    text=HOSTILE,
    made=st.sampled_from([an_extract(), *(an_apply(format) for format in ("full", "adapter", "delta"))]),
)
def test_no_text_breaks_the_card(fields: set[str], text: str, made: ChangeRecord) -> None:
    """A hostile record gives the same metadata, blocks, marks and links as a dull one; only words differ."""
    hostile = benign = made
    for field in sorted(fields):
        hostile, benign = FIELDS[field](hostile, text), FIELDS[field](benign, BENIGN)
    card, expected = render_card(hostile), render_card(benign)
    assert shape(metadata(card)) == shape(metadata(expected))
    assert skeleton(card) == skeleton(expected)
    assert headings(card)[1:] == headings(expected)[1:], "the first one names local models"
    for block, other in zip(fences(card), fences(expected), strict=True):
        if block.info == "python":
            assert python_without_texts(block.content) == python_without_texts(other.content)
        else:
            assert block.content.count("\n") == 2
    wrong = {letter for letter in card if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert not wrong
    assert len(card.encode()) < 60_000


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_no_text_is_run_as_a_template(field: str) -> None:
    for made in (an_extract(), an_apply("adapter")):
        assert "49" not in render_card(FIELDS[field](made, "{{ 7*7 }}{% if true %}${7*7}"))


# The snippet runs as it stands


def publish(hub: Hub, folder: Path, library: str) -> None:
    """A base and its fine-tune."""
    state, generator = random_state(Toy(), 0), torch.Generator().manual_seed(3)
    tuned = {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    for name, tensors in (("base", state), ("tuned", tuned)):
        written = WRITERS[library](folder / name, Toy(), tensors)
        hub.create(f"user/{name}").commit_folder(written)
        hub.repo(f"user/{name}").commit({"README.md": "---\nlicense: mit\nbase_model: user/base\n---\n"})


def logits(card: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(compile(snippet(card), "the snippet of the card", "exec"), found)
    computed: torch.Tensor = found["logits"]
    return computed


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_snippets_of_every_form_give_what_the_fine_tuned_model_gives(
    library: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub, tmp_path, library)
    extract("user/tuned", "user/base", everything=True, device="cpu").push_to_hub("user/lora")
    cards = [hub.repo("user/lora").read("README.md").decode()]
    for format in ("full", "delta"):
        apply("user/lora", "user/base", format=format, device="cpu").push_to_hub(f"user/{format}")
        cards.append(hub.repo(f"user/{format}").read("README.md").decode())
    family = {"open_clip": "open_clip ViT", "transformers": "transformers CLIP"}[library]
    whole = replace(an_apply(), target=a_model(BASE, family=family), output=OutputRecord("full", {}))
    expected = logits(render_card(whole), tmp_path / "tuned", monkeypatch)
    assert not torch.allclose(expected, logits(render_card(whole), tmp_path / "base", monkeypatch), atol=1e-2)
    for card in cards:
        torch.testing.assert_close(logits(card, tmp_path, monkeypatch), expected, rtol=1e-4, atol=1e-4)


def test_snippet_of_another_family_loads_the_class_that_the_model_names(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=40, max_position_embeddings=12, **sizes)).eval()
    tokens = torch.arange(8)[None]
    outputs = []
    for name in ("base", "tuned"):
        model.save_pretrained(tmp_path / name)
        hub.create(f"user/{name}").commit_folder(tmp_path / name)
        outputs.append(model(tokens).logits.detach())
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    extract("user/tuned", "user/base", everything=True, device="cpu").push_to_hub("user/lora")
    card = hub.repo("user/lora").read("README.md").decode()
    assert "pipeline_tag" not in metadata(card)
    found: dict[str, Any] = {}
    exec(compile(snippet(card), "the snippet of the card", "exec"), found)
    torch.testing.assert_close(found["model"](tokens).logits.detach(), outputs[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
