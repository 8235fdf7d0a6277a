"""Everything that can go wrong, as one hierarchy: each error names the thing and the way out.

An error carries a cause (what was found, quoting what the user gave) and a remedy (what to do next). It is
raised where it is found and turned into text once, at the edge. This module knows nothing of the others.
"""

from __future__ import annotations

_LONGEST = 2_000


class BicoError(Exception):
    """A failure with a cause and a remedy, each one line.

    >>> raise BicoError("there is no folder 'x'", "check the path")
    Traceback (most recent call last):
    hf_bico.errors.BicoError: there is no folder 'x'
    Remedy: check the path
    """

    def __init__(self, cause: str, remedy: str) -> None:
        # libraries' own messages, quoted in a cause, may have many lines, and what strangers' files say has no end
        told = " ".join(line.strip() for line in cause.splitlines() if line.strip())
        self.cause = told if len(told) <= _LONGEST else f"{told[:_LONGEST]} ..."
        self.remedy = remedy
        super().__init__(f"{self.cause}\nRemedy: {remedy}")


class UsageError(BicoError):
    """Options that contradict each other or cannot be read, whatever the models are."""


class RankError(UsageError):
    """A rank, or a share of energy, that an adapter cannot have."""


class RepoError(BicoError):
    """A model or data repo that cannot be found or opened."""


class RepoNotFoundError(RepoError):
    """There is no such folder or repo."""


class RevisionNotFoundError(RepoError):
    """The repo has no such branch, tag or commit."""


class WrongRepoTypeError(RepoError):
    """A data set where a model was expected, or the other way round."""


class EmptyRepoError(RepoError):
    """The repo holds no files."""


class AccessError(RepoError):
    """The repo is gated or private, and this account may not read it."""


class TokenError(RepoError):
    """There is no token, or the Hub does not know it, or it may not do this."""


class NotCachedError(RepoError):
    """Offline, and the cache does not hold what is needed."""


class HubUnavailableError(RepoError):
    """The Hub cannot be reached, or fails."""


class LineageError(BicoError):
    """Where a fine-tuned model comes from cannot be found out."""


class BaseUnknownError(LineageError):
    """The base of the fine-tuned model is not known."""


class SeveralBasesError(LineageError):
    """The card names several bases."""


class DataUnknownError(LineageError):
    """No calibration data was given and the card names none."""


class SeveralDataSetsError(LineageError):
    """The card names several data sets."""


class WeightsError(BicoError):
    """Weight files that cannot be used."""


class WeightsNotFoundError(WeightsError):
    """The folder holds no weights."""


class PickledWeightsError(WeightsError):
    """The weights are pickled: loading them could run code."""


class BrokenWeightsError(WeightsError):
    """A weight file is truncated or is not what its index says."""


class NonFiniteWeightsError(WeightsError):
    """Weights or what follows from them hold NaN or infinite values."""


class ModelError(BicoError):
    """Models that this tool cannot carry between."""


class UnknownFamilyError(ModelError):
    """No family recognises the model."""


class UnsuitableMethodError(ModelError):
    """A method that cannot carry between these two models, or from what is given."""


class UnsupportedModelError(ModelError):
    """The family is known, but this variant of it cannot be handled exactly."""


class MissingTextTowerError(ModelError):
    """The objective needs a text tower and the model has none."""


class MissingProcessorError(ModelError):
    """The model folder has no tokenizer or image processor."""


class TaskVectorError(BicoError):
    """The difference between fine-tuned and base model cannot be used."""


class BaseMismatchError(TaskVectorError):
    """The fine-tuned model does not fit the base that was named."""


class EmptyTaskVectorError(TaskVectorError):
    """Fine-tuned and base model are equal, or differ only where nothing can be carried."""


class ImplausibleTaskVectorError(TaskVectorError):
    """The change is as large as the weights: probably the wrong base."""


class AdapterError(BicoError):
    """A PEFT adapter that cannot be read or written."""


class UnsupportedAdapterError(AdapterError):
    """An adapter whose meaning is no sum of weights, or is not known here."""


class DataError(BicoError):
    """Calibration or evaluation data that cannot be used."""


class DataNotFoundError(DataError):
    """There is no such data set or split."""


class ColumnError(DataError):
    """A column is missing or cannot be guessed."""


class ClassNamesError(DataError):
    """The names of the classes are unknown or do not fit the labels."""


class SampleCountError(DataError):
    """More samples were asked for than there are."""


class DownloadTooLargeError(DataError):
    """The samples cannot be had without downloading more than was allowed."""


class UnreadableSampleError(DataError):
    """An image that cannot be decoded, or a text that is none."""


class TokenizersDifferError(DataError):
    """Two models whose tokenizers cut the texts into different tokens."""


class ObjectiveError(BicoError):
    """An objective of the caller's own that does not give a loss."""


class DeviceError(BicoError):
    """The device that was asked for is not there."""


class ProcessLostError(BicoError):
    """A process that the others of the same job need has ended."""


class OutputError(BicoError):
    """The result cannot be written."""


class OutputExistsError(OutputError):
    """The output folder is there already."""


class PushError(BicoError):
    """The result cannot be pushed; the repo is as it was."""


class PushRefusedError(PushError):
    """The result should not be pushed as it is: worse than the target, or more public than what it was made from."""


class RemoteExistsError(PushError):
    """The Hub repo is there already."""


class MemoryExhaustedError(BicoError):
    """The device has too little memory, even for one sample at a time."""


class RecordError(BicoError):
    """A `bico.json` or task vector file that cannot be read."""


class UnforeseenError(BicoError):
    """What nobody foresaw: a fault of this program, most likely. The cause holds a short id to report it by."""
