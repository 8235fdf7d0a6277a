"""Take what Python callers pass as data as splits of rows: `datasets` objects, DataFrames, torch data sets, lists.

Imports no library for what was not given; knows neither files nor columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_bico.data.columns import RowSequence
from hf_bico.errors import ColumnError, DataNotFoundError, UnreadableSampleError

IMAGE, LABEL = "image", "label"
"""The columns of rows that were given as pairs."""
_INSPECTED = 8
"""Tensors that are looked at, to tell pictures of 0 to 1 from tensors that are prepared already."""


def given_splits(data: Any) -> Mapping[str, RowSequence]:
    """Return the splits of a data set that was passed; one without splits is `train`."""
    if isinstance(data, Mapping) and data:  # datasets.DatasetDict is a dict
        return {str(split): given_rows(rows) for split, rows in data.items()}
    return {str(getattr(data, "split", None) or "train"): given_rows(data)}


def given_rows(data: Any) -> RowSequence:
    """Return rows by number; (image, label) pairs get the columns `image` and `label`.

    >>> rows = given_rows([("a picture", 1)])
    >>> rows[0], rows["label"]
    ({'image': 'a picture', 'label': 1}, [1])
    """
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(data).__mro__}
    called = f"a data set of type {type(data).__name__}"
    if "torch.IterableDataset" in kinds or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__")):
        raise DataNotFoundError(
            f"{called} is a stream, of which no sample can be drawn by its number",
            "take some of it as a list: data=list(itertools.islice(stream, 1000))",
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        raise DataNotFoundError(f"{called} has no rows", "pass a data set with rows")
    if "pandas.DataFrame" in kinds:
        return _rows_of_frame(data)
    if hasattr(data, "features"):  # of `datasets`
        return data
    if "torch.Dataset" in kinds or isinstance(data[0], tuple | list):
        return _rows_of_items(data, called)
    return data


def _rows_of_frame(frame: Any) -> RowSequence:
    """Return the rows of a DataFrame: as a `datasets` object, but for pictures that are objects of Python."""
    import datasets

    from hf_bico.data.loading import with_images

    frame = frame.rename(columns=str).reset_index(drop=True)
    classes = {name: list(map(str, kind.categories)) for name, kind in frame.dtypes.items() if hasattr(kind, "ordered")}
    frame = frame.astype(dict.fromkeys(classes, object))
    firsts = [next(iter(frame[name].dropna()), None) for name in frame.columns]
    if any(hasattr(value, "convert") or getattr(value, "ndim", 0) > 1 for value in firsts):
        return frame.astype(object).where(frame.notna(), None).to_dict("records")
    rows = datasets.Dataset.from_pandas(frame, preserve_index=False)
    for name, names in classes.items():
        rows = rows.cast_column(name, datasets.ClassLabel(names=names))
    return with_images(rows)


def _rows_of_items(data: Any, called: str) -> RowSequence:
    first = data[0]
    if isinstance(first, Mapping):
        return _Items(data)
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise ColumnError(
            f"the items of {called} are of type {type(first).__name__}, and no (image, label) pairs",
            "give items as pairs, or as dictionaries: {'image': ..., 'label': ...}",
        )
    return _Pairs(data)


class _Items(Sequence[Any]):
    """The items of a data set that is read by number, one after the other."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))  # a torch data set need not raise IndexError

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class _Pairs(_Items):
    """(image, label) pairs as rows, with the names of the classes where the data set has some.

    An image is a PIL image; an array of bytes, or a tensor (channels, height, width) of bytes or of numbers from 0 to
    1, which becomes one; or any other tensor of floats, which is taken as prepared for the model.
    """

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self._labels: list[Any] | None = None
        images = (items[index][0] for index in range(min(len(items), _INSPECTED)))
        floats = [image for image in images if _is_float(image)]
        self._shares = bool(floats) and all(float(image.min()) >= 0 and float(image.max()) <= 1 for image in floats)

    @property
    def features(self) -> dict[str, Any]:
        """The types of the two columns, as a `datasets` object declares them."""
        import datasets

        names, label = _classes(self.items), self.items[0][1]
        if names is not None:
            kind: Any = datasets.ClassLabel(names=names)
        else:
            kind = datasets.Value("string" if isinstance(label, str) else "int64")
        return {IMAGE: datasets.Image(), LABEL: kind}

    def __getitem__(self, index: Any) -> Any:
        if index == LABEL:
            if self._labels is None:
                self._labels = _known_labels(self.items) or [_plain(self.items[row][1]) for row in range(len(self))]
            return self._labels
        image, label = self.items[index]
        return {IMAGE: self._picture(image, index), LABEL: _plain(label)}

    def _picture(self, image: Any, index: int) -> Any:
        """Return an image as PIL's where its numbers are those of a picture."""
        if not hasattr(image, "ndim"):
            return image
        if _is_float(image):
            if not self._shares:
                return image
            if not (float(image.min()) >= 0 and float(image.max()) <= 1):
                raise UnreadableSampleError(
                    f"the image of row {index} is not between 0 and 1, as the first ones are",
                    "give pictures from 0 to 1, or tensors that are all prepared for the model",
                )
            image = (image * 255).round()
        from PIL import Image

        array = image.detach().cpu().numpy() if hasattr(image, "detach") else image
        if hasattr(image, "detach") and array.ndim == 3:
            array = array.transpose(1, 2, 0)  # of a tensor, channels come first
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[:, :, 0]
        try:
            return Image.fromarray(array.astype("uint8"))
        except (TypeError, ValueError) as error:
            raise UnreadableSampleError(
                f"the image of row {index}, of shape {tuple(image.shape)}, is no picture",
                "give PIL images, or tensors of 1 or 3 channels, height and width",
            ) from error


def _is_float(image: Any) -> bool:
    return hasattr(image, "ndim") and "float" in str(image.dtype)


def _plain(label: Any) -> Any:
    """Return a label that may be a number of torch's or numpy's as one of Python's."""
    return label.item() if hasattr(label, "item") else label


def _classes(items: Any) -> list[str] | None:
    """Return the names of the classes that a torch data set, or the one that it is a part of, has."""
    if hasattr(items, "indices") and hasattr(items, "dataset"):  # torch.utils.data.Subset
        return _classes(items.dataset)
    names = getattr(items, "classes", None)
    return list(map(str, names)) if names and getattr(items, "target_transform", None) is None else None


def _known_labels(items: Any) -> list[Any] | None:
    """Return all labels without reading an image, where a torch data set lists them; None if it does not."""
    if hasattr(items, "indices") and hasattr(items, "dataset"):
        whole = _known_labels(items.dataset)
        return None if whole is None else [whole[index] for index in items.indices]
    targets = getattr(items, "targets", None)
    if targets is None or len(targets) != len(items) or getattr(items, "target_transform", None) is not None:
        return None
    labels = [_plain(label) for label in targets]
    return labels if labels[0] == _plain(items[0][1]) else None
