"""Open zipped images as if the archives were folders of their names: labels and splits by folders, or by a table.

Nothing is unpacked: images are read from the archives into the rows. Knows archives and names of files; no repo.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

_SPLIT = re.compile(r"(?i)train(?:ing)?|valid(?:ation)?|val|dev|test(?:ing)?|eval(?:uation)?|data|images?")
"""Names of folders that are no classes."""
_COUNTERS = re.compile(r"[\W\d_]+|(?:part|shard|batch|chunk)(?=[\W\d_]|$)", re.IGNORECASE)

Origin = tuple[str, str | None]
"""The file that an image is in and, if that is an archive, the name of its member."""


def has_images(file: Path) -> bool:
    """Return whether an archive holds images."""
    return any(_is_image(member) for member in _members(file))


def open_zipped(
    splits: Mapping[str, Sequence[Path]], root: Path, declared: bool, options: Mapping[str, Any], cache: str | None
) -> Any:
    """Return the rows of each split of a data set of which some images are in archives below `root`.

    Splits that nobody has `declared` are found anew, as there may be folders for them inside of the archives. The rows
    are kept in `cache`, or where `datasets` keeps its own.
    """
    import datasets

    with tempfile.TemporaryDirectory(prefix="hf-bico-") as scratch:
        folder, own = Path(scratch).resolve() / "files", str(Path(scratch) / "cache")
        origins: dict[str, Origin] = {}
        data_files: dict[str, Any] = {}
        for number, (split, files) in enumerate(splits.items()):
            placed = _placed(files, root)
            base = folder / str(number) if declared else folder
            for place, origin in placed.items():
                _write(base / place, origin)
            origins.update({str(base / place): origin for place, origin in placed.items()})
            paths = [str(base / place) for place in sorted(placed)]
            data_files[split] = datasets.data_files.DataFilesList(paths, [()] * len(paths))
        if declared:
            builder = datasets.load_dataset_builder("imagefolder", data_files=data_files, cache_dir=own, **options)
        else:
            builder = datasets.load_dataset_builder(str(folder), cache_dir=own, **options)
        builder.download_and_prepare()
        found = builder.as_dataset(in_memory=True)
        return datasets.DatasetDict({split: _with_bytes(rows, origins, cache) for split, rows in found.items()})


def _placed(files: Sequence[Path], root: Path) -> dict[str, Origin]:
    """Return where each image and table would be if the archives were folders; the place is relative to `root`."""
    archives = {file: _members(file) for file in files if file.suffix.lower() == ".zip"}
    folder_of = _archive_folders(archives, root)
    placed: dict[str, Origin] = {}
    for number, file in enumerate(files):
        if file not in archives:
            placed[_relative(file, root).as_posix()] = (str(file), None)
        for member in archives.get(file, ()):
            path = PurePosixPath(member)
            place = folder_of[file] / path
            if place.as_posix() in placed:  # the same name in two archives
                place = place.with_name(f"{path.stem}_{number}{path.suffix}")
            placed[place.as_posix()] = (str(file), member)
    return placed


def _archive_folders(archives: Mapping[Path, Sequence[str]], root: Path) -> dict[Path, PurePosixPath]:
    """Return the folder that each archive stands for.

    That is one of its own name, unless the archive has folders for splits inside. If images lie loose in several
    archives, their names are classes only where they are not counted through and lie in one folder.
    """
    parents = {file: _relative(file, root).parent for file in archives}
    own = {file: parents[file] / file.stem for file in archives}
    loose = [file for file, members in archives.items() if any("/" not in name for name in filter(_is_image, members))]
    loose = [file for file in loose if not any(_is_table(name) for name in archives[file])]
    classes = {tuple(part for part in parents[file].parts if not _SPLIT.fullmatch(part)) for file in loose}
    stems = {_COUNTERS.sub("", file.stem) for file in loose}
    counted = len(stems) < len({file.stem for file in loose}) or "" in stems
    for file, members in archives.items():
        has_splits = any(_SPLIT.fullmatch(part) for name in members for part in PurePosixPath(name).parts[:-1])
        if has_splits or (file in loose and len(loose) > 1 and (len(classes) > 1 or counted)):
            own[file] = parents[file]
    return own


def _relative(file: Path, root: Path) -> PurePosixPath:
    return PurePosixPath(file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name)


def _members(file: Path) -> list[str]:
    """Return the names of an archive's images and tables of metadata, without hidden ones."""
    with zipfile.ZipFile(file) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
    plain = (name for name in names if not name.startswith("/") and "\\" not in name)
    visible = [name for name in plain if not any(part.startswith((".", "__")) for part in name.split("/"))]
    return [name for name in visible if _is_image(name) or _is_table(name)]


def _is_image(name: str) -> bool:
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    return PurePosixPath(name).suffix.lower() in ImageFolder.EXTENSIONS


def _is_table(name: str) -> bool:
    return PurePosixPath(name).name in ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def _write(place: Path, origin: Origin) -> None:
    """Make an empty file in the place of an image, and a copy of a table."""
    place.parent.mkdir(parents=True, exist_ok=True)
    file, member = origin
    if not _is_table(place.name):
        place.touch()
    elif member is None:
        shutil.copyfile(file, place)
    else:
        with zipfile.ZipFile(file) as archive, archive.open(member) as source, place.open("wb") as target:
            shutil.copyfileobj(source, target)


def _with_bytes(rows: Any, origins: Mapping[str, Origin], cache: str | None) -> Any:
    """Return the rows with images in the place of empty files."""
    import datasets

    columns = [name for name, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    stored = rows
    for name in columns:
        stored = stored.cast_column(name, datasets.Image(decode=False))
    table = {name: list(stored[name]) for name in stored.column_names}
    for name in columns:
        table[name] = [None if image is None else _origin(image["path"], origins) for image in table[name]]
    files = sorted({origin[0] for name in columns for origin in table[name] if origin is not None})
    stamps = tuple((file, Path(file).stat().st_mtime_ns) for file in files)  # other files are other rows
    return datasets.Dataset.from_generator(
        _rows,
        features=rows.features,
        gen_kwargs={"table": table, "images": tuple(columns), "stamps": stamps},  # `datasets` would divide lists
        split=rows.split,
        cache_dir=cache,
    )


def _origin(path: str, origins: Mapping[str, Origin]) -> Origin:
    """Return where an image comes from; a table beside archives may name their images as if they lay beside it."""
    if path in origins:
        return origins[path]
    name = PurePosixPath(path).name
    found = [origin for place, origin in origins.items() if PurePosixPath(place).name == name]
    if len(found) != 1:
        raise FileNotFoundError(f"metadata name an image '{name}', and {len(found) or 'no'} files are called so")
    return found[0]


def _rows(table: Mapping[str, Sequence[Any]], images: Sequence[str], stamps: Sequence[Any]) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        archives = {
            file: stack.enter_context(zipfile.ZipFile(file)) for file, _ in stamps if file.lower().endswith(".zip")
        }
        for values in zip(*table.values(), strict=True):
            row = dict(zip(table, values, strict=True))
            yield row | {name: _image(row[name], archives) for name in images}


def _image(origin: Origin | None, archives: Mapping[str, zipfile.ZipFile]) -> dict[str, Any] | None:
    if origin is None:
        return None
    file, member = origin
    return {"path": file, "bytes": None} if member is None else {"path": member, "bytes": archives[file].read(member)}
