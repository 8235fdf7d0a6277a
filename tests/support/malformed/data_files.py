"""Data that is no data: images that do not decode, tables that break off, labels that are none."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from support.malformed.cards import LAUGHS, MERGES
from support.malformed.table import add, put, spoils


def _images(content: Callable[[bytes], bytes], scene: Path) -> None:
    """Every image of one class."""
    for file in (scene / "pictures").glob("*/one/*.png"):
        put(file, content(file.read_bytes()))


def png(width: int, height: int) -> bytes:
    """A small file that says it is an image of this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _drawn(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((height, width), dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()


for name, content in {
    "images_of_no_bytes": lambda whole: b"",
    "images_cut_short": lambda whole: whole[: len(whole) // 2],
    "images_cut_after_their_head": lambda whole: whole[:40],
    "images_that_are_texts": lambda whole: b"this is no image\n",
    "images_that_are_web_pages": lambda whole: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "images_with_bytes_changed": lambda whole: whole[:50] + b"\x00" * 20 + whole[70:],
    "images_of_a_million_by_a_million": lambda whole: png(10**6, 10**6),
    "images_of_20000_by_20000": lambda whole: png(20_000, 20_000),
    "images_of_12000_by_12000": lambda whole: png(12_000, 12_000),
    "images_of_no_pixels": lambda whole: png(0, 0),
    "images_of_one_line": lambda whole: _drawn(60_000, 1),
}.items():
    add(name, "port", "UnreadableSampleError", partial(_images, content))


@spoils("port", "DataNotFoundError")
def no_images_at_all(scene: Path) -> None:
    for file in (scene / "pictures").rglob("*.png"):
        file.unlink()


@spoils("port", "DataNotFoundError")
def images_that_are_links_to_nothing(scene: Path) -> None:
    for file in (scene / "pictures").rglob("*.png"):
        file.unlink()
        file.symlink_to("nowhere.png")


@spoils("port", "DataNotFoundError")
def images_that_are_pipes(scene: Path) -> None:
    for file in (scene / "pictures").rglob("*.png"):
        file.unlink()
        os.mkfifo(file)


def _data_card(head: str, scene: Path) -> None:
    put(scene / "pictures" / "README.md", f"---\n{head}\n---\n")


for name, head in {
    "that_is_no_yaml": "configs: [",
    "that_merges": "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60)),
    "that_laughs": LAUGHS,
    "that_contains_itself": "configs: &a [*a]",
    "that_numbers_classes_without_end": "dataset_info:\n  features:\n  - name: label\n    dtype:\n      class_label:\n"
    "        names:\n          '900000000': x",
    "nested_without_end": "configs: " + "[" * 50_000,
    "with_configs_in_a_text": "configs: all",
    "with_files_that_are_not_there": "configs:\n- config_name: default\n  data_files: nowhere/*.png",
    "with_features_of_no_type": "dataset_info:\n  features:\n  - name: image\n    dtype: magic",
}.items():
    add(f"data_card_{name}", "port", "DataNotFoundError", partial(_data_card, head))


def _standalone(content: str, scene: Path) -> None:
    put(scene / "pictures" / ".huggingface.yaml", content)


for name, content in {
    "that_merges": MERGES,
    "that_laughs": LAUGHS,
    "nested_without_end": "configs: " + "[" * 50_000,
    "of_megabytes": "a: b\n" * 1_000_000,
    "that_is_a_list": "- a\n- b\n",
    "of_other_bytes": "configs: \x00",
}.items():
    add(f"data_settings_{name}", "port", "DataNotFoundError", partial(_standalone, content))


def _lines(file: str, lines: list[Any], scene: Path) -> None:
    put(scene / "texts" / file, "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
ANSWER = {"prompt": "a?", "completion": " b"}
MIXED = ANSWER | {"of": [1, {"several": "types"}]}
"""A row that `datasets` writes anew, and all others with it: NaN as null."""
MARKED = ["\ufeffnull", ANSWER]
LISTED = [f"[null, {json.dumps(ANSWER)}]"]
for name, entry, file, error, lines in (
    ("rows_of_nothing", "evaluate_answers", "answers.jsonl", "DataNotFoundError", []),
    ("rows_that_are_null", "evaluate_answers", "answers.jsonl", "DataNotFoundError", ["null", "null"]),
    ("rows_that_begin_with_null", "evaluate_answers", "answers.jsonl", "DataNotFoundError", ["null", ANSWER]),
    ("rows_that_begin_with_a_mark_and_null", "evaluate_answers", "answers.jsonl", "DataNotFoundError", MARKED),
    ("rows_in_a_list_that_begins_with_null", "evaluate_answers", "answers.jsonl", "DataNotFoundError", LISTED),
    ("rows_that_begin_with_nan", "evaluate_answers", "answers.jsonl", "DataNotFoundError", ["NaN", MIXED]),
    ("rows_that_are_numbers", "evaluate_answers", "answers.jsonl", "DataNotFoundError", [1, 2, 3]),
    ("rows_that_are_texts", "evaluate_answers", "answers.jsonl", "DataNotFoundError", ["hello", "you"]),
    ("rows_cut_short", "evaluate_answers", "answers.jsonl", "DataNotFoundError", [ANSWER, '{"prompt": "a']),
    ("rows_nested_without_end", "evaluate_answers", "answers.jsonl", "DataNotFoundError", ['{"a":' * 100_000]),
    ("rows_in_lists_without_end", "evaluate_answers", "answers.jsonl", "DataNotFoundError", ["[" * 100_000]),
    ("rows_without_answers", "evaluate_answers", "answers.jsonl", "ColumnError", [{"a": 1}, {"a": 2}]),
    (
        "answers_that_are_null",
        "evaluate_answers",
        "answers.jsonl",
        "UnreadableSampleError",
        [ANSWER | {"completion": None}, ANSWER],
    ),
    (
        "answers_without_an_end",
        "evaluate_answers",
        "answers.jsonl",
        "UnreadableSampleError",
        [ANSWER | {"prompt": "a" * 11_000_000}],
    ),
    ("chats_that_are_empty", "evaluate_chats", "chats.jsonl", "ColumnError", [{"messages": []}] * 3),
    ("chats_without_roles", "evaluate_chats", "chats.jsonl", "ColumnError", [{"messages": [{"content": "a"}]}] * 3),
    (
        "chats_with_content_that_is_null",
        "evaluate_chats",
        "chats.jsonl",
        "UnreadableSampleError",
        [{"messages": [{"role": "assistant", "content": None}, *CHAT["messages"]]}] * 3,
    ),
    (
        "chats_without_the_assistant",
        "evaluate_chats",
        "chats.jsonl",
        "UnreadableSampleError",
        [{"messages": [{"role": "user", "content": "a"}]}] * 3,
    ),
    ("labels_that_are_null", "probe_labelled", "labelled.jsonl", "ColumnError", [{"text": "a", "label": None}] * 12),
    (
        "labels_that_are_broken_numbers",
        "probe_labelled",
        "labelled.jsonl",
        "ColumnError",
        [{"text": "a", "label": 0.5}] * 12,
    ),
    ("labels_that_are_lists", "probe_labelled", "labelled.jsonl", "ColumnError", [{"text": "a", "label": [1]}] * 12),
    ("labels_without_end", "probe_labelled", "labelled.jsonl", "ColumnError", [{"text": "a", "label": 10**15}] * 12),
    ("labels_below_zero", "probe_labelled", "labelled.jsonl", "ClassNamesError", [{"text": "a", "label": -7}] * 12),
    ("labels_of_one_row_each", "probe_labelled", "labelled.jsonl", "SampleCountError", [{"text": "a", "label": 1}] * 2),
):
    add(name, entry, error, partial(_lines, file, lines))


@spoils("evaluate_answers", "DataNotFoundError")
def rows_of_other_bytes(scene: Path) -> None:
    put(scene / "texts" / "answers.jsonl", bytes(range(128, 256)) * 10)


@spoils("evaluate_answers", "UnreadableSampleError")
def rows_with_other_bytes_in_a_text(scene: Path) -> None:
    put(scene / "texts" / "answers.jsonl", b'{"prompt": "a\xff\xfe", "completion": "b"}\n' * 4)


def _parquet(content: Callable[[bytes], bytes], table: Any, scene: Path) -> None:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream)
    folder = scene / "pictures"
    for file in folder.rglob("*.png"):
        file.unlink()
    put(folder / "train.parquet", content(stream.getvalue()))


PIXELS = _drawn(8, 8)
LABEL = datasets.ClassLabel(names=["zero", "one"])


def table(images: list[Any], labels: list[Any], declared: bool = True) -> Any:
    """Rows of images, whose labels are declared to be classes although they may be no such."""
    found = pa.table(
        {"image": pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()})), "label": labels}
    )
    features = datasets.Features({"image": datasets.Image(), "label": LABEL})
    about = {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
    return found.replace_schema_metadata(about) if declared else found


GOOD = [{"bytes": PIXELS, "path": None}] * 8
WHOLE = table(GOOD, [0, 1] * 4)
for name, error, content, rows in (
    ("parquet_of_no_bytes", "DataNotFoundError", lambda whole: b"", WHOLE),
    ("parquet_cut_short", "DataNotFoundError", lambda whole: whole[: len(whole) // 2], WHOLE),
    ("parquet_without_its_head", "DataNotFoundError", lambda whole: whole[9:], WHOLE),
    ("parquet_with_a_broken_foot", "DataNotFoundError", lambda whole: whole[:-40] + b"\xff" * 30 + whole[-10:], WHOLE),
    ("parquet_that_is_a_text", "DataNotFoundError", lambda whole: b"PAR1 and no more PAR1", WHOLE),
    ("parquet_of_no_rows", "DataNotFoundError", lambda whole: whole, table([], pa.array([], pa.int64()))),
    ("parquet_of_labels_out_of_range", "ClassNamesError", lambda whole: whole, table(GOOD, [0, 9] * 4)),
    ("parquet_of_labels_below_range", "ClassNamesError", lambda whole: whole, table(GOOD, [0, -9] * 4)),
    (
        "parquet_of_broken_images",
        "UnreadableSampleError",
        lambda whole: whole,
        table([{"bytes": b"no image", "path": None}] * 8, [0, 1] * 4),
    ),
    ("parquet_of_no_images", "UnreadableSampleError", lambda whole: whole, table([None] * 8, [0, 1] * 4)),
    (
        "parquet_of_images_elsewhere",
        "UnreadableSampleError",
        lambda whole: whole,
        table([{"bytes": None, "path": "/etc/passwd"}] * 8, [0, 1] * 4),
    ),
    (
        "parquet_of_images_on_the_net",
        "UnreadableSampleError",
        lambda whole: whole,
        table([{"bytes": None, "path": "http://127.0.0.1:9/x.png"}] * 8, [0, 1] * 4),
    ),
):
    add(name, "port", error, partial(_parquet, content, rows))
