"""A data set that is open: its splits, labels and samples. Knows rows and columns; neither files nor how to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL.Image import DecompressionBombError

from hf_bico.data.columns import Columns, Rows, column, column_kinds, undecoded
from hf_bico.data.files import own_image
from hf_bico.data.row_groups import UNLABELLED
from hf_bico.data.sampling import draw_order
from hf_bico.errors import ClassNamesError, ColumnError, UnreadableSampleError
from hf_bico.hub.client import HubRepo
from hf_bico.record import PartRecord


@dataclass(frozen=True)
class DataSet:
    """The splits of a data set, and what its columns and classes are."""

    name: str
    splits: Mapping[str, Rows]
    columns: Columns
    class_names: tuple[str, ...]
    named: bool = False
    """Whether it was opened by a name, and not passed as rows."""
    repo: HubRepo | None = None
    config: str | None = None
    parts: Mapping[str, list[PartRecord]] = field(default_factory=dict)
    """The row groups that the rows of a split are, where it was not read whole."""
    _labels: dict[str, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def labelled(self) -> bool:
        """Whether it has a label column."""
        return self.columns.label is not None

    def labels(self, split: str) -> dict[int, int]:
        """The class of each labelled row of a split; rows without a label (none, or -1) are left out."""
        if split not in self._labels:
            self._labels[split] = self._read_labels(split)
        return self._labels[split]

    def _read_labels(self, split: str) -> dict[int, int]:
        if self.columns.label is None:
            return {}
        if self.columns.label not in column_kinds(self.splits[split]):
            raise ColumnError(f"split '{split}' has no column '{self.columns.label}'", "choose another with --split")
        index_of = {name: index for index, name in enumerate(self.class_names)}
        labels = {}
        for row, value in enumerate(column(self.splits[split], self.columns.label)):
            if value is None or value == UNLABELLED:
                continue
            label = index_of.get(value, UNLABELLED) if isinstance(value, str) else int(value)
            if not 0 <= label < len(self.class_names):
                raise ClassNamesError(
                    f"row {row} of split '{split}' has the label {value!r}, outside of the "
                    f"{len(self.class_names)} classes",
                    "give the names of all classes with --class-names",
                )
            labels[row] = label
        return labels

    def can_measure_on(self, split: str) -> bool:
        """Whether a split is there, with images and labels."""
        if split not in self.splits:
            return False
        kinds = column_kinds(self.splits[split])
        return self.columns.image in kinds and self.columns.label in kinds and bool(self.labels(split))

    def order(self, split: str, seed: int) -> list[int]:
        """The labelled rows of a split in the order in which the seed draws them."""
        labels = self.labels(split)
        return [index for index in draw_order(len(self.splits[split]), seed) if index in labels]

    def samples(self, split: str, indices: Sequence[int], *, labelled: bool = True) -> Samples:
        """These rows of a split, with their labels unless these are not to be known."""
        labels = self.labels(split) if labelled and indices else dict.fromkeys(indices, UNLABELLED)
        chosen = tuple(labels[index] for index in indices)
        rows, decode = self.splits[split], None
        if self.repo is not None:  # a stranger's rows: what they point at is looked at before it is opened
            folder = self.repo.hub.snapshot(self.repo.id, self.repo.type, self.repo.commit)
            rows, decode = undecoded(rows, self.columns.image), lambda value: own_image(value, folder)
        return Samples(rows, self.columns.image, tuple(indices), chosen, decode)


@dataclass(frozen=True)
class Samples:
    """Chosen rows of one split: images are decoded when a batch is taken."""

    rows: Rows
    image_column: str
    indices: tuple[int, ...]
    labels: tuple[int, ...]
    decode: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, size: int) -> Iterator[tuple[list[Any], list[int]]]:
        """(images, labels), `size` at a time."""
        for start in range(0, len(self.indices), size):
            chosen = self.indices[start : start + size]
            images = [self._image(index) for index in chosen]
            yield images, list(self.labels[start : start + size])

    def first(self, count: int) -> Samples:
        return replace(self, indices=self.indices[:count], labels=self.labels[:count])

    def rotated(self, turn: int) -> Samples:
        """The same samples in the same order, but from another one on."""
        return replace(
            self,
            indices=self.indices[turn:] + self.indices[:turn],
            labels=self.labels[turn:] + self.labels[:turn],
        )

    def _image(self, index: int) -> Any:
        try:
            image = self.rows[index][self.image_column]
            image = image if self.decode is None or image is None else self.decode(image)
            if image is None:
                raise ValueError("there is none")
            if hasattr(image, "load"):
                image.load()  # PIL decodes when it must: do it here, where the row is known
        except (OSError, SyntaxError, ValueError, DecompressionBombError) as error:
            raise UnreadableSampleError(
                f"the image of row {index} cannot be decoded: {error}", "remove or replace the broken image"
            ) from error
        return image
