"""Reads a small local folder of parquet files as `datasets` wrote it, without `datasets`, which takes long to import.

Only what needs no guess is read here: splits by their file names, columns by the types that `datasets` stored with
them. Everything else is left to `datasets`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_SPLITS = ("train", "validation", "test")
"""In the order of `datasets`."""
_FILE = re.compile(r"data/(?P<split>train|validation|test)-\d{5}-of-\d{5}\.parquet")
_MOST_BYTES = 64_000_000
"""Larger folders are mapped into memory by `datasets`; here they are read whole."""


@dataclass(frozen=True)
class StoredType:
    """The declared type of a column: what it holds, as `columns` names it, and the names of its classes."""

    kind: str
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, declared: Any) -> StoredType:
        """Read a type as `datasets` describes it; raise ValueError for those that are left to it."""
        kind, dtype = declared["_type"], str(declared.get("dtype"))
        if kind == "ClassLabel":
            return cls("class", tuple(map(str, declared["names"])))
        if kind == "Image" and set(declared) == {"_type"}:
            return cls("image")
        if kind == "Value" and (dtype == "string" or re.fullmatch(r"u?int\d+", dtype)):
            return cls("string" if dtype == "string" else "integer")
        raise ValueError(f"a column of type {kind} {dtype}")


@dataclass(frozen=True)
class SmallParquet:
    """The rows of one split: `rows[3]` is a row with its image decoded, `rows["label"]` is a column."""

    table: Any
    features: Mapping[str, StoredType]
    as_stored: bool = False
    """True if images are given as they are stored: their bytes and their path."""

    def select_columns(self, names: Sequence[str]) -> SmallParquet:
        features = {name: self.features[name] for name in names}
        return replace(self, table=self.table.select(names), features=features)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.table[key].to_pylist()
        row = {name: self.table[name][key].as_py() for name in self.features}
        images = [] if self.as_stored else [name for name, stored in self.features.items() if stored.kind == "image"]
        return row | {name: _decoded(row[name]) for name in images}

    @property
    def is_complete(self) -> bool:
        """True if every image is in the table: it may also be missing, or the name of a file."""
        images = [self.table[name] for name, stored in self.features.items() if stored.kind == "image"]
        chunks = [chunk for image in images for chunk in image.chunks]
        return not any(chunk.null_count or chunk.field("bytes").null_count for chunk in chunks)


def _decoded(value: Any) -> Any:
    """Decode an image as `datasets` does: loaded, and turned upright as its EXIF block says."""
    from PIL import ExifTags, Image, ImageOps

    image: Any = Image.open(io.BytesIO(value["bytes"]))
    image.load()
    upright = image.getexif().get(ExifTags.Base.Orientation) is None
    return image if upright else ImageOps.exif_transpose(image)


def open_small(folder: Path) -> dict[str, SmallParquet] | None:
    """Open a folder that holds nothing but parquet files of usual splits and types; return None for any other."""
    from pyarrow import ArrowException, concat_tables
    from pyarrow.parquet import ParquetFile, read_schema

    found = sorted(file for file in folder.rglob("*") if not file.is_dir())
    splits: dict[str, list[Path]] = {split: [] for split in _SPLITS}
    try:
        for file in found:
            splits[_FILE.fullmatch(file.relative_to(folder).as_posix())["split"]].append(file)  # type: ignore[index]
        schemas = [read_schema(file) for file in found]
        declared = json.loads(schemas[0].metadata[b"huggingface"])["info"]["features"]
        features = {name: StoredType.of(declared[name]) for name in schemas[0].names}
        whole = all(len(files) in (0, *_shards(files)) for files in splits.values())
        alike = all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
        if not whole or not alike or sum(file.stat().st_size for file in found) > _MOST_BYTES:
            return None
        tables = {
            split: concat_tables(ParquetFile(file).read() for file in files) for split, files in splits.items() if files
        }
        rows = {split: SmallParquet(table, features) for split, table in tables.items()}
        return rows if all(one.is_complete for one in rows.values()) else None
    except (ArrowException, OSError, IndexError, KeyError, TypeError, ValueError):
        return None  # `datasets` may know more of it, or says what is wrong


def _shards(files: Sequence[Path]) -> set[int]:
    """Return the number of files that each of these names says there are."""
    return {int(file.stem.rpartition("-")[2]) for file in files}
