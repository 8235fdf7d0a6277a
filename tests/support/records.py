"""Records as ports of many kinds leave them, and what stands in their cards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import yaml
from huggingface_hub import ModelCard
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from hf_bico.models.layout import ROLES
from hf_bico.reports.record import (
    CandidateRecord,
    CurveRecord,
    DataRecord,
    EvaluationRecord,
    GainRecord,
    LeftRecord,
    MethodRecord,
    ModelRecord,
    ObjectiveRecord,
    OutlookRecord,
    OutputRecord,
    ReadoutRecord,
    Record,
    RunRecord,
    SiteRecord,
    SourceLeadRecord,
    TrainingRecord,
)
from hf_bico.utils.samples import FilePart

SOURCE, BASE, TARGET = "alice/vit-b16-eurosat", "laion/CLIP-ViT-B-16-laion2B", "laion/CLIP-ViT-B-16-plus"


DATA, REPO = "alice/eurosat", "alice/eurosat-on-plus"


COMMITS = {SOURCE: "a1" * 20, BASE: "b2" * 20, TARGET: "c3" * 20, DATA: "d5" * 20}


WEIGHTS = "open_clip_model.safetensors"


COMMAND = f"hf-bico port {SOURCE} --base {BASE} --to {TARGET} --data {DATA} --split train -n 100 --seed 0"


CLIP_ROLES = [role for role in ROLES if role not in ("mlp.gate", "pooler", "proj")]


def a_model(name: str, **more: Any) -> ModelRecord:
    digest = {SOURCE: "e6", BASE: "f7", TARGET: "a8"}[name] * 32
    return ModelRecord(name, COMMITS[name], {WEIGHTS: digest}, family="open_clip ViT", license="mit", **more)


def some_sites(blocks: int) -> list[SiteRecord]:
    """Every role of every block, with scores that differ, and the projection."""
    places = [(f"blocks.{block}.{role}", role) for block in range(blocks) for role in CLIP_ROLES]
    return [
        SiteRecord(name, role, name, (8, 8), (12, 12), 0.9 / (6 * blocks), 8, 7, 0.5 + i % 5 / 10, 0.3, 0.02)
        for i, (name, role) in enumerate(places)
    ] + [SiteRecord("proj", "proj", "proj", (8, 8), (8, 12), 0.05, 8, 6, 0.9, 0.5, 0.1)]


def a_record(blocks: int = 2, **changes: Any) -> Record:
    """A full port between repos of the Hub, with all that a record can hold."""
    full = Record(
        hf_bico="0.2.0",
        command=COMMAND,
        source=a_model(SOURCE, kind="full", base=a_model(BASE)),
        target=a_model(TARGET, language=["en"]),
        data=DataRecord(
            id=DATA,
            split="train",
            n=100,
            sampling="random",
            seed=0,
            indices=[3, 1, 2],
            columns={"image": "img", "label": "class"},
            labels="dataset",
            class_names=["annual crop", "forest", "highway", "river", "lake", "pasture"],
            commit=COMMITS[DATA],
            config="rgb",
            parts=[FilePart("data/train-00000-of-00002.parquet", [0, 3], 2000)],
        ),
        objective=ObjectiveRecord("zero-shot", ["a satellite photo of {}."]),
        method=MethodRecord("bico", 1.0, list(range(blocks)), "drop"),
        sites=some_sites(blocks),
        left=[
            LeftRecord("visual.conv1.weight", "patch stem", 0.03),
            LeftRecord("visual.ln_pre.bias", "LayerNorm", 0.02),
        ],
        evaluation=[
            EvaluationRecord(model, DATA, "test", 1000, "accuracy", value)
            for model, value in (("target", 0.5), ("ported", 0.6), ("source", 0.9))
        ],
        notices=["The base was taken from the card."],
        run=RunRecord(
            started="2026-01-01T00:00:00+00:00",
            seconds={"plan": 1.0, "calibrate": 2.5, "evaluate": 3.0},
            peak_memory=2_000_000_000,
            device="NVIDIA H200",
            dtype="float32",
            batch_size=32,
            processes=1,
            versions={"Python": "3.11.4", "torch": "2.15.0", "open_clip_torch": "3.3.0"},
        ),
        output=OutputRecord("full", {WEIGHTS: "b9" * 32}, rounding_lost=0.01, repo=REPO),
    )
    return replace(full, **changes)


def an_adapter_record(family: str = "open_clip ViT", rank: int | float | None = 4, **changes: Any) -> Record:
    """The same port as an adapter: attention and projection exact, as open_clip needs it, and the rest by factors."""
    full = a_record()
    sites = [
        replace(site, kept=1.0) if site.role[:4] in ("attn", "proj") else replace(site, rank=4 + i % 2, kept=0.9)
        for i, site in enumerate(full.sites)
    ]
    output = OutputRecord("adapter", {"adapter_model.safetensors": "b9" * 32}, None, REPO, None, rank, 0.9321)
    record = replace(full, target=replace(full.target, family=family), sites=sites, output=output)
    return replace(record, **changes)


def measured(**values: float) -> list[EvaluationRecord]:
    """Accuracies by the names of the models, with _ for what a name cannot hold; "probe_" before one measured by it."""
    found = []
    for name, value in values.items():
        model = {"target_readout": "target, readout", "unread": "ported, no readout"}.get(
            name.removeprefix("probe_"), name.removeprefix("probe_")
        )
        how: dict[str, Any] = {"protocol": "probe", "trained_on": 100} if name.startswith("probe_") else {}
        found.append(EvaluationRecord(model, DATA, "test", 1000, "accuracy", value, **how))
    return found


def a_path_record(**changes: Any) -> Record:
    """A port along a path, with a readout and a control."""
    method = MethodRecord(
        *("bico-path", 1.0, [0, 0], "drop", "similarity"), steps=2, copies=7, readout=ReadoutRecord(True, 3.4, 1.2, 0.1)
    )
    values = measured(target=0.5, ported=0.7, source=0.9, unread=0.6, target_readout=0.55, control=0.56)
    return replace(a_record(), method=method, evaluation=values, **changes)


ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0)


def a_curve(step: int | None = None, predicts: bool = True) -> list[CurveRecord]:
    """The samples' losses by alpha, smallest at 0.5, with the accuracy to expect where classes are predicted."""
    means, accuracies = (2.0, 1.4, 1.2, 1.5, 4.0), (0.5, 0.55, 0.58, 0.56, 0.4)
    return [
        CurveRecord(alpha, mean, 0.1 * abs(mean - 1.2), accuracy if predicts else None, step)
        for alpha, mean, accuracy in zip(ALPHAS, means, accuracies, strict=True)
    ]


def a_scaled_record(**changes: Any) -> Record:
    """A port whose alpha the samples chose."""
    method = MethodRecord("bico", 0.5, [0, 1], "drop", curve=a_curve(), veto=GainRecord(0.08, 0.02))
    lead = SourceLeadRecord(0.9, 0.5, 0.05)
    full = replace(a_record(), method=method, outlook=OutlookRecord(0.08, "accuracy", 0.02), source_lead=lead)
    return replace(full, **changes)


def a_walk_record(**changes: Any) -> Record:
    """A walk of two steps for "auto", chosen before a copy; the two bases have equal shapes."""
    candidates = [CandidateRecord("bico-path", [0.5, 0.25], 0.08, False), CandidateRecord("naive", 0.25, 0.01, True)]
    method = MethodRecord(
        *("bico-path", [0.5, 0.25], [0, 1], "drop"),
        steps=2,
        asked="auto",
        curve=[*a_curve(1), *a_curve(2), *a_curve()],
        veto=GainRecord(0.06, 0.02),
        candidates=candidates,
    )
    sites = [replace(site, shape_target=site.shape_source, distance=0.125, cosine=0.99) for site in some_sites(2)]
    full = a_scaled_record(method=method, sites=sites, settings={"n": 100, "seed": 0})
    return replace(full, **changes)


def a_trained_record(name: str = "finetune", **changes: Any) -> Record:
    """The target trained, for comparison."""
    training = TrainingRecord(1e-3, 0.1, 30, 900, 128, 3, 0.81)
    if name == "fewshot":
        training = TrainingRecord(1e-3, 0.1, 1, 100)
    elif name != "finetune":
        left_out = {"most": 60, "left_out": 40, "before": 1.4, "after": 0.9}
        toward = "source" if name == "distill" else "labels"
        training = TrainingRecord(1e-4, 0.1, 12, 100, 128, validation=0.7, toward=toward, **left_out)
    method = MethodRecord(name, 1.0, [0, 1], training=training)
    return replace(a_record(), sites=[], left=[], method=method, **changes)


def a_language_record(family: str, objective: str, head: str | None = None, **changes: Any) -> Record:
    """A port of a model that reads texts, measured as the objective asks."""
    full = a_record()
    assert full.data is not None
    columns = {"prompt": "question", "completion": "answer"} if objective == "language-modelling" else {"text": "line"}
    data = replace(full.data, columns=columns, class_names=[], labels="none", max_length=512, config=None, parts=[])
    if objective != "language-modelling":
        data = replace(data, columns={**columns, "label": "mood"}, class_names=["sad", "glad"], labels="dataset")
    record = replace(
        full,
        source=replace(full.source, family=family),
        target=replace(full.target, family=family),
        data=data,
        objective=ObjectiveRecord(objective, head=head),
        evaluation=losses(target=3.0, ported=2.7, base=2.9, source=2.4) if head is None else full.evaluation,
    )
    return replace(record, **changes)


def losses(**values: float) -> list[EvaluationRecord]:
    return [EvaluationRecord(model, DATA, "test", 1000, "loss", value) for model, value in values.items()]


def a_decoder_record(**changes: Any) -> Record:
    return a_language_record("decoder", "language-modelling", **changes)


def a_classifier_record(**changes: Any) -> Record:
    return a_language_record("encoder", "classification", "carried", **changes)


def metadata(card: str) -> dict[str, Any]:
    """What a YAML reader makes of the front matter."""
    assert card.startswith("---\n")
    found = yaml.safe_load(card[4 : card.index("\n---\n")])
    assert isinstance(found, dict)
    return found


@lru_cache(maxsize=4)
def tokens(card: str) -> list[Token]:
    """What a CommonMark reader with tables makes of the body."""
    return MarkdownIt("commonmark").enable("table").parse(ModelCard(card).text)


def inlines(card: str) -> Iterator[Token]:
    return (child for token in tokens(card) for child in token.children or ())


def headings(card: str) -> list[str]:
    found = tokens(card)
    return [after.content for token, after in pairwise(found) if token.type == "heading_open"]


def fences(card: str) -> list[Token]:
    return [token for token in tokens(card) if token.type == "fence"]


INSTALL = "pip install git+https://github.com/hf-bico/hf-bico\n"
"""What stands before the command of a card."""


def snippet(card: str) -> str:
    return next(token.content for token in fences(card) if token.info == "python")


def text_of(card: str) -> str:
    """The body as a reader sees it, in one line."""
    return " ".join("".join(part.content or " " * (part.type == "softbreak") for part in inlines(card)).split())


BENIGN = "x y!"
"""No repo id, no word, no digest: it takes the same branches as a hostile text."""


ATTACKS = [
    "---\nlicense: evil\n---\n# Evil",
    "{{ 7*7 }}{% raw %}",
    "</script><script>alert(1)</script>",
    "x <b>y</b> <!-- z",
    "a | b | c\n|---|",
    "```\n# Evil\n```",
    "`` ` ```` x",
    "~~~\nx",
    "# Evil",
    "\n\n# Evil\n\n> x",
    "- x\n1. x",
    "x\n===",
    "![x](y)",
    "[x](javascript:alert)",
    "<https://evil.example>",
    "https://evil.example www.evil.example a@evil.example",
    "&lt;b&gt; &#35;",
    "x\\",
    "\\| x",
    "'''\nimport os\n\"\"\"",
    '"); import os #',
    "a\u202eb\u2066c\u200bd\ufeff",
    "\ud800x",
    "x\x00\x1b[31m",
    "\u05d0\u05d1\u05d2 x",
    "\U0001f600 x",
    "x" * 10_000,
    "`" * 10_000 + "x",
    "x \u2028 y\u2029 z\x85",
    "$$x$$",
    "*x* _y_ **z** ~~a~~",
]


HOSTILE = st.tuples(st.sampled_from(ATTACKS), st.text(st.characters(), max_size=40)).map("".join)


def shape(value: Any, key: str = "") -> Any:
    """Metadata with the places of free text blanked; the names of data and of models without a repo are free."""
    if isinstance(value, dict):
        named = {"name": "..."} if "split" in value or "results" in value else {}
        return {name: shape(item, name) for name, item in value.items()} | named
    if isinstance(value, list):
        return [shape(item) for item in value]
    return "..." if key in ("split", "config", "license_name") else value


def skeleton(card: str) -> list[tuple[str, str, str]]:
    """Every block of the body, every mark inside of one, and where links and pictures lead."""
    parts = []
    for token in tokens(card):
        parts.append((token.type, token.tag, token.info))
        for child in token.children or ():
            if child.type not in ("text", "code_inline", "softbreak"):
                parts.append((child.type, child.tag, str(child.attrs)))
    return parts


def python_without_texts(source: str) -> str:
    """The syntax tree with strings blanked, and lists of strings emptied."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.List):
            assert all(isinstance(item, ast.Constant) for item in node.elts)
            node.elts = []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)
