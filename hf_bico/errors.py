"""Define every error of the package in one hierarchy: each has a cause and a remedy.

The cause quotes what the user gave, the remedy says what to do next. Errors are raised where the fault is detected and
printed once, by the command line. Imports no other module.
"""

from __future__ import annotations

from collections.abc import Callable

_MAX_CAUSE = 2_000


class BicoError(Exception):
    """A failure with a cause and a remedy, each one line.

    >>> raise BicoError("there is no folder 'x'", "check the path")
    Traceback (most recent call last):
    hf_bico.errors.BicoError: there is no folder 'x'
    Remedy: check the path
    """

    def __init__(self, cause: str, remedy: str, add: str = "") -> None:
        # a cause may quote a library's message of many lines, or text of any length from a downloaded file
        line = " ".join(part.strip() for part in cause.splitlines() if part.strip())
        self.cause = line if len(line) <= _MAX_CAUSE else f"{line[:_MAX_CAUSE]} ..."
        self.remedy = remedy
        self.add = add
        """What to add to the command line, if that is known."""
        super().__init__(f"{self.cause}\nRemedy: {remedy}")

    def reword(self, worded: Callable[[str], str]) -> None:
        """Put its cause and its remedy into other words."""
        self.cause, self.remedy = worded(self.cause), worded(self.remedy)
        self.args = (f"{self.cause}\nRemedy: {self.remedy}",)

    def __reduce__(self) -> tuple[type[BicoError], tuple[str, str, str]]:
        return type(self), (self.cause, self.remedy, self.add)  # a process pool hands it to the process that waits


class UsageError(BicoError):
    """Options contradict each other or cannot be parsed, whatever the models are."""


class RankError(UsageError):
    """The adapter rank, or share of energy, is out of range."""


class RepoError(BicoError):
    """A model or dataset repo cannot be found or opened."""


class RepoNotFoundError(RepoError):
    """There is no such folder or repo."""


class RevisionNotFoundError(RepoError):
    """The repo has no such branch, tag or commit."""


class WrongRepoTypeError(RepoError):
    """A dataset was given where a model was expected, or the other way round."""


class EmptyRepoError(RepoError):
    """The repo has no files."""


class AccessError(RepoError):
    """The repo is gated or private, and this account has no access."""


class TokenError(RepoError):
    """The token is missing, unknown to the Hub, or lacks a permission."""


class NotCachedError(RepoError):
    """Offline mode is on and the cache lacks a file."""


class HubUnavailableError(RepoError):
    """The Hub cannot be reached, or answers with an error."""


class LineageError(BicoError):
    """The base or dataset of a fine-tuned model cannot be determined."""


class BaseUnknownError(LineageError):
    """The base of the fine-tuned model is unknown."""


class SeveralBasesError(LineageError):
    """The card names several bases."""


class DataUnknownError(LineageError):
    """No calibration data was given and the card names none."""


class SeveralDataSetsError(LineageError):
    """The card names several data sets."""


class WeightsError(BicoError):
    """Weight files cannot be used."""


class WeightsNotFoundError(WeightsError):
    """The folder has no weights."""


class PickledWeightsError(WeightsError):
    """The weights are pickled: loading them could run code."""


class BrokenWeightsError(WeightsError):
    """A weight file is truncated or contradicts its index."""


class NonFiniteWeightsError(WeightsError):
    """Weights, or values computed from them, contain NaN or infinity."""


class ModelError(BicoError):
    """The models cannot be ported between."""


class UnknownFamilyError(ModelError):
    """No family recognises the model."""


class UnsuitableMethodError(ModelError):
    """The method does not work for these two models, or for the given inputs."""


class UnsupportedModelError(ModelError):
    """The family is known, but this variant cannot be handled exactly."""


class MissingTextTowerError(ModelError):
    """The objective needs a text tower and the model has none."""


class MissingProcessorError(ModelError):
    """The model folder has no tokenizer or image processor."""


class TaskVectorError(BicoError):
    """The difference between fine-tuned and base model cannot be used."""


class BaseMismatchError(TaskVectorError):
    """The fine-tuned model does not fit the base that was named."""


class EmptyTaskVectorError(TaskVectorError):
    """Fine-tuned and base model are equal, or differ only in weights that cannot be ported."""


class ImplausibleTaskVectorError(TaskVectorError):
    """The weight change is as large as the weights: probably the wrong base."""


class AdapterError(BicoError):
    """A PEFT adapter cannot be read or written."""


class UnsupportedAdapterError(AdapterError):
    """The adapter does not add to weights, or is of an unknown type."""


class DataError(BicoError):
    """Calibration or evaluation data cannot be used."""


class DataNotFoundError(DataError):
    """There is no such dataset or split."""


class ColumnError(DataError):
    """A column is missing or cannot be guessed."""


class ClassNamesError(DataError):
    """The class names are unknown or do not match the labels."""


class SampleCountError(DataError):
    """More samples were requested than the dataset has."""


class DownloadTooLargeError(DataError):
    """The samples need a larger download than `--max-download` allows."""


class UnreadableSampleError(DataError):
    """An image cannot be decoded, or a text sample is not text."""


class TokenizersDifferError(DataError):
    """The tokenizers of the two models split the texts into different tokens."""


class ObjectiveError(BicoError):
    """A user-defined objective does not return a loss."""


class DeviceError(BicoError):
    """The requested device is not available, or the machine gives no second process."""


class ProcessLostError(BicoError):
    """Another process of the same job has ended."""


class OutputError(BicoError):
    """The result cannot be written."""


class OutputExistsError(OutputError):
    """The output folder already exists."""


class HeldBackError(BicoError):
    """The calibration samples speak against a port: there is nothing to save or push."""


class PushError(BicoError):
    """The result cannot be pushed; the repo is unchanged."""


class PushRefusedError(PushError):
    """The result is worse than the target, or would be more public than the repos behind it."""


class RemoteExistsError(PushError):
    """The Hub repo already exists."""


class MemoryExhaustedError(BicoError):
    """The device has too little memory, even for one sample at a time."""


class RecordError(BicoError):
    """A `bico.json` or task vector file cannot be read."""


class UnforeseenError(BicoError):
    """An unexpected error, most likely a bug. The cause contains a short id for the report."""
