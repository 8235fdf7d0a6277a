"""Data sets of texts and captions: columns by name and kind, samples, known data sets, and what cannot be used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hf_bico.data import loading as data_files
from hf_bico.data import remote_parquet
from hf_bico.data.augmentation import AugmentedSamples
from hf_bico.data.columns import format_text_columns, known_task
from hf_bico.data.dataset import DataSet
from hf_bico.data.draw import (
    CalibrationDraw,
    calibration_samples,
    draw,
    evaluation_samples,
    evaluation_split,
    open_data,
)
from hf_bico.errors import (
    ClassNamesError,
    ColumnError,
    DataNotFoundError,
    SampleCountError,
    UnreadableSampleError,
    UsageError,
)
from hf_bico.porting.prepare import training_samples
from hf_bico.porting.recording import drawn_record
from hf_bico.porting.rerun import _sampling
from hf_bico.settings import Settings
from hf_bico.utils.samples import TEXTS, Answered, Captioned, Chat, Text
from support.hub import Hub

pytestmark = pytest.mark.quick

ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
INSIDE_OUT = {"from": ["human", "gpt"], "value": ["q", "a"]}
CHAT = Chat(tuple(ASKED))


def opened(rows: Any, **options: Any) -> DataSet:
    return open_data(rows, Settings(**options), reads=TEXTS)


def first_item(data: DataSet, split: str = "train") -> Any:
    return next(data.samples(split, [0], labelled=False).batches(1))[0][0]


def picture(value: int = 0) -> Image.Image:
    return Image.fromarray(np.full((4, 4, 3), value, dtype=np.uint8))


@pytest.mark.parametrize(
    ("row", "item"),
    [
        ({"text": "t"}, Text("t", None, ("text",))),
        ({"url": "u", "text": "t", "id": 3}, Text("t", None, ("text",))),
        ({"words": "t", "id": 3}, Text("t", None, ("words",))),
        ({"hypothesis": "h", "premise": "p"}, Text("p", "h", ("premise", "hypothesis"))),
        ({"question": "q", "sentence": "s", "idx": 1}, Text("q", "s", ("question", "sentence"))),
        ({"text": "t", "text_pair": "p"}, Text("t", "p", ("text", "text_pair"))),
        ({"prompt": "p", "completion": "c", "text": "t"}, Answered("p", "c")),
        ({"prompt": "p ", "response": "r"}, Answered("p ", "r")),
        ({"instruction": "i", "input": "x", "output": "o", "text": "t"}, Answered("i\n\nx\n", "o")),
        ({"instruction": "i", "input": "", "output": "o"}, Answered("i\n", "o")),
        ({"instruction": "i", "context": "x", "response": "o", "category": "c"}, Answered("i\n\nx\n", "o")),
        ({"question": "q", "answer": "a"}, Answered("q\n", "a")),
        ({"messages": ASKED, "prompt": "p", "completion": "c"}, CHAT),
        ({"conversations": SHARED}, CHAT),
        ({"conversation": INSIDE_OUT}, CHAT),
    ],
)
@pytest.mark.parametrize("kind", ["list", "datasets", "parquet"])
def test_texts_are_found_by_names_and_kinds(row: dict[str, Any], item: Any, kind: str, tmp_path: Path) -> None:
    rows: Any = [row, row]
    if kind != "list":
        rows = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        rows.to_parquet(tmp_path / "train.parquet")
        rows = tmp_path
    data = opened(rows)
    assert data.columns.label is None
    assert first_item(data) == item


@pytest.mark.parametrize(
    ("given", "item"),
    [
        ("a", Text("1", None, ("a",))),
        ("a,b", Text("1", "2", ("a", "b"))),
        ("b, a", Text("2", "1", ("b", "a"))),
        ("a,b,c", Answered("1\n\n2\n", "3")),
        ("prompt=a,completion=b", Answered("1\n", "2")),
        ("question,answer", Answered("4\n", "5")),
        ("talk", CHAT),
        ("text=a,text_pair=b", Text("1", "2", ("a", "b"))),
        ("d,e", Text("6", None, ("d,e",))),
    ],
)
def test_columns_that_are_named(given: str, item: Any) -> None:
    row = {"a": "1", "b": "2", "c": "3", "question": "4", "answer": "5", "d,e": "6", "talk": ASKED}
    data = opened([row], text_column=given)
    assert first_item(data) == item
    again = opened([row], text_column=format_text_columns(data.columns.parts))
    assert again.columns == data.columns


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ("nope", "there is no column 'nope'"),
        ("a,nope", "there is no column 'nope'"),
        ("n", "the column 'n' holds integer, not texts"),
        ("messages=a", "the column 'a' holds string, not messages"),
        ("prompt=a", "--text-column is 'prompt=a'"),
        ("a,b,a,b", "--text-column is 'a,b,a,b'"),
        ("prompt=a,b", "--text-column is|there is no column 'prompt=a'"),
    ],
)
def test_columns_that_are_named_wrongly(given: str, cause: str) -> None:
    with pytest.raises(ColumnError, match=cause):
        opened([{"a": "1", "b": "2", "n": 3}], text_column=given)


def test_what_cannot_be_guessed_is_asked_for() -> None:
    with pytest.raises(ColumnError, match="several columns could be the text column") as caught:
        opened([{"one": "1", "two": "2", "id": 3}])
    assert "one (string), two (string), id (integer)" in caught.value.cause
    assert caught.value.remedy.startswith("name it with --text-column")
    with pytest.raises(ColumnError, match="no column looks like the text column"):
        opened([{"id": 3}])
    with pytest.raises(UsageError, match="--image-column is 'x', and the models read texts"):
        opened([{"text": "t"}], image_column="x")
    with pytest.raises(UsageError, match="--text-column is 'x', and the models read images"):
        open_data([{"image": picture(), "label": "a"}], Settings(text_column="x"))


def test_labels_beside_texts() -> None:
    declared = datasets.Features({"text": datasets.Value("string"), "kind": datasets.ClassLabel(names=["bad", "good"])})
    data = opened(datasets.Dataset.from_list([{"text": "t", "kind": 1}, {"text": "u", "kind": -1}], features=declared))
    assert (data.columns.label, data.class_names, data.labels("train")) == ("kind", ("bad", "good"), {0: 1})
    rows = [{"text": str(number), "label": number % 3, "id": number} for number in range(9)]
    assert opened(rows).class_names == ("0", "1", "2"), "no prompt needs a name"
    assert opened(rows, label_column="id").class_names == tuple("012345678")
    with pytest.raises(ClassNamesError, match="numbers without names"):
        opened(rows, objective="text-to-text")
    words = [{"text": "t", "label": label} for label in ("pos", "neg", None)]
    assert opened(words).labels("train") == {0: 1, 1: 0}
    assert opened([{"text": "t", "stars": 3}]).columns.label is None, "a number may be anything"
    with pytest.raises(ColumnError, match="no column looks like the label column"):
        opened([{"text": "t", "stars": 3}], labels="dataset")
    assert opened([{"prompt": "p", "completion": "c", "label": 1}]).columns.label is None


def test_texts_without_labels_are_drawn_and_held_out() -> None:
    rows = [{"text": f"text {number}"} for number in range(30)]
    drawn = draw(rows, Settings(n=10), reads=TEXTS)
    assert set(drawn.samples.labels) == {-1}
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert (split, len(held_out)) == ("train", 20)
    assert not set(held_out.indices) & set(drawn.samples.indices)
    tested = draw({"train": rows, "test": rows[:5]}, Settings(n=10), reads=TEXTS)
    split, held_out = evaluation_samples(tested.data, tested.samples, tested.split, 0)
    assert (split, sorted(held_out.indices)) == ("test", [0, 1, 2, 3, 4])
    measured = open_data(rows, Settings(), measure=True, reads=TEXTS)
    assert sorted(measured.order(evaluation_split(measured, None), 0)) == list(range(30))
    with pytest.raises(UsageError, match="-k needs labels"):
        draw(rows, Settings(per_class=2), reads=TEXTS)


@pytest.mark.parametrize("as_table", [False, True])
def test_empty_lines_are_passed_over(as_table: bool) -> None:
    rows: Any = [{"text": f"line {number}" if number % 3 else " \n"} for number in range(30)]
    rows = datasets.Dataset.from_list(rows) if as_table else rows
    drawn = draw(rows, Settings(n=15), reads=TEXTS)
    assert len(drawn.samples) == 15
    assert all(item.first.startswith("line") for items, _ in drawn.samples.batches(4) for item in items)
    _, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert len(held_out) == 5
    with pytest.raises(SampleCountError, match="has 20 with a text"):
        draw(rows, Settings(n=21), reads=TEXTS)


@pytest.mark.parametrize("as_table", [False, True])
@pytest.mark.parametrize(
    ("good", "empty"),
    [
        ({"messages": ASKED}, {"messages": ASKED[:1]}),
        ({"messages": ASKED}, {"messages": [ASKED[0], {"role": "assistant", "content": " "}]}),
        ({"conversations": SHARED}, {"conversations": SHARED[:1]}),
        ({"prompt": "p", "completion": "c"}, {"prompt": "p", "completion": "\n"}),
        ({"text": "t", "label": "x"}, {"text": "", "label": "x"}),
    ],
)
def test_rows_with_nothing_to_learn_are_passed_over(
    good: dict[str, Any], empty: dict[str, Any], as_table: bool
) -> None:
    rows: Any = [good if number % 3 else empty for number in range(30)]
    rows = datasets.Dataset.from_list(rows) if as_table else rows
    drawn = draw(rows, Settings(n=15), reads=TEXTS)
    _, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert (len(drawn.samples), len(held_out)) == (15, 5)
    assert all(index % 3 for index in (*drawn.samples.indices, *held_out.indices))
    assert all(index % 3 for index in training_samples(drawn, "train", held_out).indices)
    with pytest.raises(SampleCountError, match="has 20"):
        draw(rows, Settings(n=21), reads=TEXTS)


def test_a_pair_with_an_empty_half_is_a_sample() -> None:
    rows = [{"premise": "p", "hypothesis": "", "label": "x"}] * 4
    assert len(draw(rows, Settings(n=4), reads=TEXTS).samples) == 4


@pytest.mark.parametrize(
    ("good", "broken", "cause"),
    [
        ({"text": "t"}, {"text": None}, "row 1 has no text in column 'text'"),
        ({"text": "t"}, {"text": 3}, "row 1 has a int, not a text in column 'text'"),
        ({"premise": "t", "hypothesis": "u"}, {"premise": "t", "hypothesis": None}, "no text in column 'hypothesis'"),
        ({"question": "q", "answer": "a"}, {"question": "q", "answer": None}, "no text in column 'answer'"),
        ({"messages": ASKED}, {"messages": []}, "row 1 has no messages in column 'messages'"),
        ({"messages": ASKED}, {"messages": None}, "row 1 has no messages"),
        ({"messages": ASKED}, {"messages": [{"role": "user", "content": None}]}, "row 1 has a message without"),
        ({"messages": ASKED}, {"messages": ["hi"]}, "row 1 has no messages"),
    ],
)
def test_broken_rows_are_named(good: dict[str, Any], broken: dict[str, Any], cause: str) -> None:
    data = opened([good, broken])
    with pytest.raises(UnreadableSampleError, match=cause):
        list(data.samples("train", [0, 1]).batches(2))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_files_of_texts(ending: str, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"sentence": f"it is {number}", "label": number % 2} for number in range(6)])
    folder = tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "test"):
        file = folder / f"{split}.{ending}"
        if ending == "json":
            file.write_text(json.dumps(list(rows)))
        else:
            {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[ending](file)
    data = opened(folder)
    assert (set(data.splits), data.columns.label) == ({"train", "test"}, "label")
    assert first_item(data) == Text("it is 0", None, ("sentence",))
    alone = opened(folder / f"train.{ending}")
    assert len(alone.splits["train"]) == 6


def test_lines_of_a_file_are_texts(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one\n\ntwo\n")
    drawn = draw(tmp_path / "book.txt", Settings(n=2), reads=TEXTS)
    assert {item.first for items, _ in drawn.samples.batches(2) for item in items} == {"one", "two"}
    (tmp_path / "book.doc").write_text("one")
    with pytest.raises(DataNotFoundError, match=r"'book.doc' is a file, and none of: .parquet, .json"):
        opened(tmp_path / "book.doc")


# -- known data sets

INFERENCE = ("entailment", "neutral", "contradiction")


def pairs(first: str, second: str, labels: Sequence[int], names: Sequence[str] | None = None) -> datasets.Dataset:
    label = datasets.Value("int64") if names is None else datasets.ClassLabel(names=list(names))
    rows = [{first: f"p{n}", second: f"h{n}", "label": label, "idx": n} for n, label in enumerate(labels)]
    types = {first: datasets.Value("string"), second: datasets.Value("string"), "label": label}
    return datasets.Dataset.from_list(rows, features=datasets.Features({**types, "idx": datasets.Value("int32")}))


@pytest.mark.parametrize(
    ("name", "config", "columns", "task", "split"),
    [
        ("nyu-mll/glue", "mnli", "premise hypothesis", "mnli", "validation_matched"),
        ("glue", "qnli", "question sentence", "qnli", "validation"),
        ("nyu-mll/glue", "rte", "sentence1 sentence2", "rte", "validation"),
        ("nyu-mll/glue", "qqp", "question1 question2", "qqp", "validation"),
        ("stanfordnlp/snli", None, "premise hypothesis", "snli", "test"),
        ("snli", "plain_text", "premise hypothesis", "snli", "test"),
        ("copies/rte", None, "sentence1 sentence2", "rte", "validation"),
        ("copy", "qqp", "question1 question2", "qqp", "validation"),
    ],
)
def test_known_data_sets(name: str, config: str | None, columns: str, task: str, split: str) -> None:
    found = known_task(name, config, [*columns.split(), "label", "idx"])
    assert found is not None
    assert (found.name, " ".join(found.columns), found.measured_on) == (task, columns, split)
    assert known_task(name, config, ["text", "label"]) is None


def test_a_known_data_set_has_its_task_its_words_and_its_split(tmp_path: Path) -> None:
    entries = "".join(
        f"  - split: {name}\n    path: {name}.parquet\n" for name in ("train", "test", "validation_matched")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: mnli\n  data_files:\n{entries}---\n")
    for name, labels in (("train", [0, 1, 2, -1]), ("test", [-1] * 3), ("validation_matched", [2, 0])):
        pairs("premise", "hypothesis", labels).to_parquet(tmp_path / f"{name}.parquet")
    data = opened(tmp_path, config="mnli")
    assert data.class_names == INFERENCE, "the numbers have no names of their own"
    assert first_item(data) == Text("p0", "h0", ("premise", "hypothesis"), "mnli")
    assert data.labels("train") == {0: 0, 1: 1, 2: 2}
    assert evaluation_split(data, None) == "validation_matched"
    assert evaluation_split(data, "train") == "train"
    samples = calibration_samples(data, "train", Settings(n=3))
    assert evaluation_samples(data, samples, "train", 0)[0] == "validation_matched"
    other = opened(tmp_path, config="mnli", text_column="hypothesis", class_names=["yes", "maybe", "no"])
    assert first_item(other) == Text("h0", None, ("hypothesis",)), "what is named wins"
    assert other.class_names == ("yes", "maybe", "no")


def test_rows_that_were_loaded_know_what_they_are() -> None:
    rows = pairs("sentence1", "sentence2", [0, 1], ("entailment", "not_entailment"))
    rows.info.dataset_name, rows.info.config_name = "glue", "rte"
    assert first_item(opened({"train": rows})).task == "rte"
    rows.info.config_name = "mrpc"
    assert first_item(opened({"train": rows})).task is None


def test_a_known_data_set_is_measured_where_others_measure_it() -> None:
    rows = pairs("premise", "hypothesis", [0, 1], INFERENCE)
    rows.info.config_name = "mnli"
    splits = dict.fromkeys(("train", "validation", "validation_matched"), rows)
    assert evaluation_split(opened(splits), None) == "validation_matched"
    assert evaluation_split(opened(splits, text_column="premise"), None) == "validation"


def test_splits_without_labels_are_not_measured_on() -> None:
    splits = {"train": [1, 0], "test": [-1, -1], "validation": [0, 1]}
    data = opened({name: pairs("a", "b", labels, ("x", "y")) for name, labels in splits.items()}, text_column="a,b")
    assert evaluation_split(data, None) == "validation"


def test_a_split_without_the_texts_is_named() -> None:
    data = opened({"train": [{"text": "t"}], "other": [{"words": "t"}]})
    with pytest.raises(ColumnError, match="split 'other' has no column 'text'"):
        calibration_samples(data, "other", Settings(n=1))


def test_for_a_text_no_image_beside_it_is_opened(tmp_path: Path) -> None:
    kinds = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    rows = [{"text": "t", "image": {"path": str(tmp_path / "nowhere.png"), "bytes": None}}]
    assert first_item(opened(datasets.Dataset.from_list(rows, features=kinds))) == Text("t", None, ("text",))


@pytest.mark.parametrize("length", [0, -1, "many"])
def test_a_length_is_a_whole_number(length: Any) -> None:
    with pytest.raises(UsageError, match="--max-length is"):
        Settings(max_length=length)


# -- captions


def test_captions_are_found_where_nothing_is_a_label() -> None:
    rows = [{"image": picture(), "caption": ["a cat", "a dog"], "id": number} for number in range(3)]
    data = open_data(rows)
    assert (data.columns.by_role, data.class_names) == ({"image": "image", "caption": "caption"}, ())
    item = first_item(data)
    assert isinstance(item, Captioned)
    assert item.caption == "a cat"
    drawn = draw(rows, Settings(n=2))
    assert len(evaluation_samples(drawn.data, drawn.samples, "train", 0)[1]) == 1, "captions need no label"
    declared = datasets.Dataset.from_list(
        [{"image": picture(), "text": "a cat", "kind": 0}],
        features=datasets.Features(
            {"image": datasets.Image(), "text": datasets.Value("string"), "kind": datasets.ClassLabel(names=["pet"])}
        ),
    )
    assert open_data(declared).columns.by_role == {"image": "image", "label": "kind"}
    both = open_data(declared, Settings(caption_column="text"))
    assert both.columns.by_role == {"image": "image", "caption": "text", "label": "kind"}
    assert first_item(both).caption == "a cat"
    named = open_data([{"image": picture(), "text": "cat"}], Settings(label_column="text"))
    assert named.columns.by_role == {"image": "image", "label": "text"}
    with pytest.raises(ColumnError, match="the column 'n' holds integer, not captions"):
        open_data([{"image": picture(), "n": 1}], Settings(caption_column="n"))


def test_copies_of_captioned_images_keep_the_caption_and_texts_have_none() -> None:
    rows = [{"image": picture(100), "caption": "a cat"}]
    items = [
        item for some, _ in AugmentedSamples(open_data(rows).samples("train", [0]), 2, 0).batches(2) for item in some
    ]
    assert [item.caption for item in items] == ["a cat"] * 3
    assert np.asarray(items[1].image).tolist() != np.asarray(items[0].image).tolist()
    with pytest.raises(UsageError, match="altered copies are of images"):
        list(AugmentedSamples(opened([{"text": "t"}]).samples("train", [0]), 1, 0).batches(1))


# -- the record


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        (
            {"premise": "p", "hypothesis": "h", "label": "x"},
            {"text": "premise", "text_pair": "hypothesis", "label": "label"},
        ),
        (
            {"instruction": "i", "input": "x", "output": "o"},
            {"prompt": "instruction", "input": "input", "completion": "output"},
        ),
        ({"messages": ASKED}, {"messages": "messages"}),
    ],
)
def test_the_record_names_the_columns_and_finds_them_again(row: dict[str, Any], roles: dict[str, str]) -> None:
    rows = [row] * 4
    settings = Settings(n=3, max_length=128, evaluate=False)
    drawn = draw(rows, settings, reads=TEXTS)
    record = drawn_record(drawn, settings)
    assert (record.columns, record.max_length) == (roles, 128)
    again = Settings(**_sampling(record))
    assert again.max_length == 128
    repeated = draw(rows, again, reads=TEXTS)
    assert repeated.data.columns == drawn.data.columns
    assert list(repeated.samples.batches(3)) == list(drawn.samples.batches(3))


# -- large data sets of the Hub


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data set counts as large, and a few row groups as many."""
    monkeypatch.setattr(data_files, "SMALL_REPO", 0)
    monkeypatch.setattr(remote_parquet, "MIN_BUDGET", 4_000)


def parquet(columns: dict[str, Any], path: Path) -> Path:
    """Rows in groups of 10, each with 5,000 bytes beside it that nobody needs."""
    count = len(next(iter(columns.values())))
    beside = [np.random.default_rng(row).bytes(5000) for row in range(count)]
    pq.write_table(pa.table({"beside": beside, **columns}), path, row_group_size=10, use_dictionary=False)
    return path


def items_of(drawn: CalibrationDraw) -> list[Any]:
    return [item for items, _ in drawn.samples.batches(7) for item in items]


def test_a_large_data_set_of_texts_is_read_in_part(hub: Hub, in_parts: None, tmp_path: Path) -> None:
    texts = {split: [f"{split} {row}" for row in range(400)] for split in ("train", "test")}
    names = {f"data/{split}-00000-of-00001.parquet": split for split in texts}
    files = {name: parquet({"text": texts[split]}, tmp_path / f"{split}.parquet") for name, split in names.items()}
    hub.create("user/book", type="dataset").commit(files)
    drawn = draw("user/book", Settings(n=20), reads=TEXTS)
    assert 10 * hub.bytes_sent() < sum(path.stat().st_size for path in files.values())
    assert drawn.data.splits["train"].column_names == ["text"]
    assert {item.first.split()[0] for item in items_of(drawn)} == {"train"}
    split, held_out = evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)
    assert split == "test"
    assert len(held_out) >= 10
    measured = open_data("user/book", Settings(n=20), measure=True, reads=TEXTS)
    assert evaluation_split(measured, None) == "test"


def test_large_chats_are_read_in_part(hub: Hub, in_parts: None, tmp_path: Path) -> None:
    file = parquet({"messages": [ASKED] * 100}, tmp_path / "train.parquet")
    hub.create("user/chats", type="dataset").commit({"data/train-00000-of-00001.parquet": file})
    drawn = draw("user/chats", Settings(n=12), reads=TEXTS)
    assert items_of(drawn) == [CHAT] * 12


def test_of_a_large_known_data_set_the_labelled_split_is_measured_on(hub: Hub, in_parts: None, tmp_path: Path) -> None:
    splits = {"train": 60, "test": 30, "validation_matched": 30}
    entries = "".join(f"  - split: {name}\n    path: mnli/{name}-*\n" for name in splits)
    files: dict[str, Any] = {"README.md": f"---\nconfigs:\n- config_name: mnli\n  data_files:\n{entries}---\n"}
    for name, count in splits.items():
        labels = [-1 if name == "test" else row % 3 for row in range(count)]
        columns = {"premise": [f"p{row}" for row in range(count)], "hypothesis": ["h"] * count, "label": labels}
        files[f"mnli/{name}-00000-of-00001.parquet"] = parquet(columns, tmp_path / f"{name}.parquet")
    hub.create("nyu-mll/glue", type="dataset").commit(files)
    drawn = draw("nyu-mll/glue", Settings(n=12, config="mnli"), reads=TEXTS)
    assert drawn.data.class_names == INFERENCE
    assert all(item.task == "mnli" and item.second == "h" for item in items_of(drawn))
    assert evaluation_samples(drawn.data, drawn.samples, drawn.split, 0)[0] == "validation_matched"
    for n in (12, None):
        measured = open_data("nyu-mll/glue", Settings(n=n, config="mnli"), measure=True, reads=TEXTS)
        assert evaluation_split(measured, None) == "validation_matched"
    hub.create("user/contest", type="dataset").commit(
        {name.replace("mnli/", "data/").replace("_matched", ""): file for name, file in files.items() if "mnli" in name}
    )
    for n in (12, None):
        unknown = open_data("user/contest", Settings(n=n), measure=True, reads=TEXTS)
        assert (unknown.columns.task, evaluation_split(unknown, None)) == (None, "validation")
