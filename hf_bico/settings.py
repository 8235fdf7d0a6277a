"""Every option of a port and every method, each declared once. Knows no torch and no command line.

The field of an option in `Settings` is all there is to declare: its checks, its place on the command line, in the
recorded command and in the reference of commands, and whether it decides a measured number, are read from there.
`register_method` is the same for methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

from hf_bico.errors import RankError, UsageError
from hf_bico.utils.text import did_you_mean

AUTO = "auto"
"""The value of an option that is found out: the method by the models, alpha by the samples."""
AUTO_METHODS = ("bico-path", "bico")
"""What the method "auto" stands for: where the objective predicts classes, and elsewhere."""
TRIED_TOO = {"language-modelling": ("bico-last",)}
"""What "auto" tries beside it, by the objective; the samples choose."""
SAMPLINGS = ("random", "class-balanced", "centroid-near", "centroid-far", "half-class", "one-class")
PREDICTING = ("zero-shot", "classification")
"""The objectives that tell classes apart."""
LEARNABLE = (*PREDICTING, "language-modelling", "text-to-text")
"""The objectives in which the source predicts what a polish can learn."""
LAYERS = ("index", "similarity")
OBJECTIVES = ("auto", "zero-shot", "contrastive", "language-modelling", "text-to-text", "classification")
FORMATS = ("full", "adapter", "delta")
PROBE = "probe"
"""The protocol of a measurement by a linear classifier; without one it is zero-shot."""
DEFAULT_SAMPLES = 100
GENERATED = "generated"
"""The name of the data set that the fine-tuned source writes itself."""
DEFAULT_MEASURED = 1000
DEFAULT_UNLABELLED = 1000
DEFAULT_TEMPLATES = ("a photo of a {}.",)
DEFAULT_DOWNLOAD = 2_000_000_000
DEFAULT_RATE, FINETUNE_STEPS, BRIEF_STEPS, POLISH_STEPS = 1e-5, 2000, 60, 20
"""Of a training by default: the learning rate, and the steps of each kind."""
USUAL_BATCH = 32
FEW_SAMPLES = 50
"""Below so many samples, methods that ask for it get altered copies of each."""
VERY_FEW_SAMPLES = 20
"""Below so many samples, alpha is chosen more carefully."""
VETO = 0.5
"""How many standard errors above 0 the samples' mean gain has to be; else a port is held back, or called doubtful."""


def polish_veto(samples: int, bold: bool | None = None) -> float:
    """Return how many standard errors above 0 the gain of a polish has to be, by samples left out of so many.

    Of very few, the best of many rates and steps looks good by chance.
    """
    return 2.0 if samples < VERY_FEW_SAMPLES and not bold else VETO


def allowed_errors(samples: int, bold: bool | None = None) -> int:
    """Return how many standard errors above the smallest loss of so many samples a smaller alpha may be."""
    if bold:
        return 1
    return 3 if samples < VERY_FEW_SAMPLES else 2


@dataclass(frozen=True)
class MethodInfo:
    """Everything that is known of a method without loading it."""

    name: str
    implementation: str | type
    """The class, or "module:Class", which is imported when it is first used."""
    label: str
    """Its name in tables and pictures."""
    sentence: str | None = None
    """What it does, on model cards."""
    uses_samples: bool = True
    uses_loss: bool = True
    """Whether it reads gradients of the objective; a method without samples does not."""
    uses_labels: bool = True
    """Whether those gradients need labels; a method without gradients needs none."""
    turns: bool = True
    """Whether it turns the task vector by maps."""
    maps: str = "inputs (in) and output gradients (out)"
    """What the maps of the input side (in) and of the output side (out) line up."""
    trains_on: str | None = None
    """What the target is trained on instead: "samples", or all of the "split"."""
    options: tuple[str, ...] = ()
    """The options that it reads and not every method does, such as "completion"."""
    copies: int = 0
    """Altered copies of each sample where samples are few."""
    usual: bool = False
    """Whether a comparison measures it by default, as a port runs it."""
    usual_at_1: bool = False
    """Whether a comparison measures it at alpha 1 by default, as the paper does."""
    row: int = 1000
    """Its place in tables where none is given."""
    style: tuple[str, str] | None = None
    """Its colour and its marker in pictures."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "uses_loss", self.uses_loss and self.uses_samples)
        object.__setattr__(self, "uses_labels", self.uses_labels and self.uses_loss)


METHODS: dict[str, MethodInfo] = {}
"""Every method by its name, in the order in which help names them."""
_BUILT_IN: set[str] = set()


def register_method(name: str, implementation: str | type, *, label: str | None = None, **about: Any) -> None:
    """Make a method known to everything that takes one: `port`, `compare`, `diagnose`, tables, pictures and cards.

    `implementation` is a subclass of `hf_bico.alignment.methods.base.Method`, or "module:Class". `about` are the fields
    of `MethodInfo`, such as `sentence` for model cards and `options=("completion",)` for a method that reads that
    option. A method that was registered under the same name before is replaced, so that a notebook's cell can run
    again; the names of built-in methods are refused.

    >>> register_method("mine", "my_package.mine:Mine", label="My method")
    >>> Settings(method="mine").method
    'mine'
    >>> del METHODS["mine"]
    """
    if name in _BUILT_IN or name == AUTO:
        raise UsageError(f"'{name}' is the name of a built-in method", "give the new method a name of its own")
    if not re.fullmatch(r"[\w.+-]+", name):
        raise UsageError(f"'{name}' cannot be typed as a method", "use letters, digits, '-', '_', '.' and '+' alone")
    METHODS[name] = MethodInfo(name, implementation, label or name, **about)


def method_info(name: str) -> MethodInfo:
    """Return what is known of a method; of one that is not registered, no more than its name."""
    return METHODS.get(name) or MethodInfo(name, "", name)


def usual_methods() -> tuple[str, ...]:
    """Return the rows of a comparison by default, in their order: "bico@1" for bico at alpha 1."""
    rows = list[str]()
    for info in sorted(METHODS.values(), key=lambda info: info.row):
        rows += [f"{info.name}@1"] if info.usual_at_1 else []
        rows += [info.name] if info.usual else []
    return tuple(rows)


def option_methods(option: str) -> tuple[str, ...]:
    """Return the names of the methods that read an option: all of them, unless some claim it for themselves."""
    return tuple(info.name for info in METHODS.values() if option in info.options) or tuple(METHODS)


def _known(name: str, home: str, label: str, sentence: str, **about: Any) -> None:
    register_method(name, f"hf_bico.alignment.methods.{home}", label=label, sentence=sentence, **about)


# fmt: off
_MAPS = {"options": ("completion",)}
_WEIGHTED = {"maps": "inputs, weighted by gradients, (in) and output gradients (out)", "uses_labels": False}
_RECIPE = ("learning_rate", "weight_decay")
_BRIEFLY = (*_RECIPE, "train_steps", "train_batch", "checkpoint")
_known("bico", "aligned:Bico", "BiCo",
       "Two orthogonal maps per site transform the task vector: one aligns the two models' inputs of the layer, the "
       "other aligns the gradients of the loss at its outputs.",
       **_MAPS, usual=True, usual_at_1=True, row=10, style=("#D55E00", "o"))
_known("bico-fisher", "aligned:BicoFisher", "BiCo-Fisher",
       "Like bico, but without labels: the aligned gradients are those of every possible label, weighted by the "
       "probability that the fine-tuned source gives it, and each row of the inputs is weighted by the size of the "
       "layer's gradients there.",
       **_MAPS, **_WEIGHTED, row=11, style=("#E69F00", "D"))
_known("bico-path", "aligned:BicoPath", "BiCo-path",
       "Like bico-fisher, but in several steps from the base to the fine-tuned source, with new maps for each step.",
       **_WEIGHTED, options=("completion", "path_steps"), copies=7, usual=True, row=12, style=("#CC79A7", "h"))
_known("bico-last", "aligned:BicoLast", "BiCo, last block",
       "Like bico in the last block. In the other blocks, the output maps align the layers' outputs instead of their "
       "gradients.",
       **_MAPS, maps="inputs (in) and output gradients, before the last block outputs (out)", row=13,
       style=("#8C564B", "X"))
_known("input-only", "aligned:InputOnly", "input maps only",
       "Half of bico: one orthogonal map per site aligns the two models' inputs of the layer. The output side is "
       "padded with zeros or cropped.",
       **_MAPS, uses_loss=False, maps="inputs (in)", row=7, style=("#56B4E9", "<"))
_known("output-only", "aligned:OutputOnly", "output maps only",
       "Half of bico: one orthogonal map per site aligns the gradients of the loss at the layer's outputs. The input "
       "side is padded with zeros or cropped.",
       **_MAPS, maps="output gradients (out)", row=8, style=("#9E9AC8", ">"))
_known("gradient-only", "aligned:GradientOnly", "gradient maps only",
       "Two orthogonal maps per site transform the task vector. Both align gradients of the loss: one at the layer's "
       "inputs, the other at its outputs.",
       **_MAPS, maps="input gradients (in) and output gradients (out)", row=9, style=("#C9B800", "d"))
_known("theseus", "aligned:Theseus", "THESEUS",
       "Two orthogonal maps per site transform the task vector: one aligns the two models' inputs of the layer, the "
       "other aligns its outputs. No gradients are used.",
       **_MAPS, uses_loss=False, maps="inputs (in) and outputs (out)", usual_at_1=True, row=6, style=("#0072B2", "s"))
_known("naive", "naive:Naive", "naive (padded)",
       "The task vector is added unchanged, padded with zeros or cropped. No data is used.",
       uses_samples=False, turns=False, usual_at_1=True, row=1, style=("#A0703C", "x"))
_known("transfusion", "transfusion:TransFusion", "TransFusion",
       "Permutations of heads, neurons and axes reorder the source's pretrained weights to match the target's, and "
       "the task vector is reordered with them. They are computed from the weights alone, without data.",
       uses_samples=False, usual_at_1=True, row=2, style=("#6A51A3", "P"))
_known("gradfix", "naive:GradFix", "GradFix",
       "The task vector is added unchanged, but only where its sign agrees with the target's negative gradient.",
       turns=False, options=("signs",), usual_at_1=True, row=3, style=("#009E73", "^"))
_known("fewshot", "finetuning:Fewshot", "one training step",
       "One step of AdamW on the mean loss of the samples. It shows what the same samples give without a source.",
       turns=False, trains_on="samples", options=_RECIPE, usual=True, row=4, style=("#888888", "v"))
_known("finetune", "finetuning:Finetune", "fine-tuning",
       "AdamW on nine tenths of the split, without the samples that are measured on. It shows what training gives.",
       turns=False, trains_on="split", options=(*_BRIEFLY, "warmup"), row=5, style=("#333333", "p"))
_known("readout", "untouched:ReadoutAlone", "readout",
       "The unchanged target with its final projection corrected in closed form towards the fine-tuned source's "
       "predictions. Nothing is carried.",
       uses_labels=False, turns=False, row=20, style=("#4C9A8A", "8"))
_known("train", "brief:Train", "training",
       "A few steps of AdamW on the samples and their labels, without a source. It shows what training on the same "
       "samples gives. Samples left out of the training choose the learning rate and the number of steps.",
       turns=False, trains_on="samples", options=_BRIEFLY, row=21, style=("#5B5B5B", "<"))
_known("distill", "brief:Distill", "distilling",
       "A few steps of AdamW towards the fine-tuned source's predictions on the samples, without labels. Nothing is "
       "carried. Samples left out of the training choose the learning rate and the number of steps.",
       turns=False, trains_on="samples", uses_labels=False, options=_BRIEFLY, row=22, style=("#1B5E85", ">"))
# fmt: on
_BUILT_IN |= set(METHODS)
BRIEF = ("train", "distill")
"""The methods that train for a few steps, which a comparison may count: "train@20"."""
OF_POLISH = ("polish_steps", "polish_on")
"""The options of a polish alone."""
POLISH_OPTIONS = (*OF_POLISH, *_RECIPE, "train_batch", "checkpoint")
"""The options that a polish reads, whatever the method is."""


@dataclass(frozen=True)
class Option:
    """One option: how it is typed, what it means, which values it takes, and where it counts."""

    section: str
    """The heading of a command's help that it stands under."""
    help: str
    group: str = "port"
    """The commands that take it: those that take this group."""
    type: type = str
    flag: str | None = None
    """How it is typed, where that is not its name."""
    also: str | None = None
    """Another way to type it."""
    metavar: str | None = None
    choices: Sequence[str] | Mapping[str, Any] | None = None
    least: int | None = None
    read: Callable[[str, str], Any] | None = None
    """Reads what is typed, given with the option that it was typed for."""
    typed_default: str | None = None
    """The default as it is typed, where that is another than Python's."""
    recorded: bool = True
    """Whether the recorded command names it where it is not the default."""
    decisive: bool = False
    """Whether a measured number depends on it."""
    python: str = ""
    """What Python callers may give instead."""
    takes_functions: bool = False
    """Whether Python callers may give a function instead of one of the choices."""
    takes_auto: bool = False
    """Whether "auto" is one more choice."""

    def typed_as(self, name: str) -> str:
        """Return what is typed on the command line for the option of this name."""
        return self.flag or f"--{name.replace('_', '-')}"

    @property
    def all_choices(self) -> tuple[str, ...]:
        return (*([AUTO] if self.takes_auto else []), *(self.choices or ()))

    def check(self, name: str, value: Any, default: Any) -> None:
        """Refuse a value that is not among the choices, or is below the least; None only where it is the default."""
        if (value is None and default is None) or (self.takes_functions and callable(value)):
            return
        if self.choices is not None:
            _require_one_of(self.typed_as(name), value, self.all_choices)
        if self.least is None:
            return
        if self.type is float:
            if not isinstance(value, int | float) or not isfinite(value) or value < self.least:
                raise UsageError(f"{self.typed_as(name)} is {value}", f"use a number of at least {self.least}")
        elif type(value) is not int or value < self.least:
            raise UsageError(f"{self.typed_as(name)} is {value}", f"use a whole number of at least {self.least}")


def option(default: Any, section: str, help: str, **facts: Any) -> Any:
    """Declare an option as a field of `Settings`; `facts` are the fields of `Option`."""
    return field(default=default, metadata={"option": Option(section, help, **facts)})


def require_rank(rank: int | float | None) -> int | float | None:
    """Return a rank that is a whole number of at least 1, a share of energy between 0 and 1, or None."""
    if rank is None or (type(rank) is int and rank >= 1) or (type(rank) is float and 0.0 < rank < 1.0):
        return rank
    which = ": the rank 1, or all of the energy?" if rank == 1.0 and type(rank) is float else ""
    raise RankError(
        f"the rank is {rank!r}{which}",
        "give a whole number of at least 1, or a share of energy between 0 and 1, such as 0.95",
    )


def read_rank(text: str, option: str = "--rank") -> int | float:
    """Read a rank as it is typed: 16, or 0.95."""
    for kind in (int, float):
        try:
            rank = kind(text)
        except ValueError:
            continue
        require_rank(rank)
        return rank
    raise RankError(f"{option} is '{text}'", "give a whole number such as 16, or a share of energy such as 0.95")


def read_alpha(text: str, option: str = "--alpha") -> float | str:
    """Read alpha as it is typed: auto, or a number."""
    if text == AUTO:
        return text
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option} is '{text}'", f"use {AUTO}, or a number such as 1 or 0.5") from None


def read_layers(text: str, option: str = "--layers") -> str | tuple[int, ...]:
    """Read layers as they are typed: index, similarity, or 0,0,1,1."""
    if text in LAYERS:
        return text
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        otherwise = f"use {' or '.join(LAYERS)}, or the source block of each target block: 0,0,1,1"
        raise UsageError(f"{option} is '{text}'", did_you_mean(text, LAYERS, otherwise)) from None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", re.IGNORECASE)


def read_size(text: str, option: str) -> int:
    """Read a size in bytes as it is typed.

    >>> read_size("1.5 GB", "--max-download")
    1500000000
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} is '{text}'", "use a size such as 500MB or 2GB")
    return int(float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " "))


def read_lines(file: str, option: str) -> list[str]:
    """Read a text file of one entry a line."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: '{file}' cannot be read", "give a text file with one entry a line") from error
    if not text.strip():
        raise UsageError(f"{option}: '{file}' is empty", "give a text file with one entry a line")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _require_one_of(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        remedy = did_you_mean(str(value), choices, f"use one of: {', '.join(choices)}")
        raise UsageError(f"{option} is '{value}'", remedy)


_DATA, _METHOD, _TRAINING = "Samples", "Method", "Training"
_MEASURING, _RUN, _OUTPUT = "Measuring", "Running", "Output"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a port."""

    # fmt: off
    split: str | None = option(None, _DATA, "Split to calibrate on; train by default.", recorded=False, decisive=True)
    n: int | None = option(
        None, _DATA, f"Calibration samples in all; by default {DEFAULT_SAMPLES}, or all if there are fewer.",
        flag="-n", also="--samples", type=int, least=1, recorded=False)
    per_class: int | None = option(
        None, _DATA, "Calibration samples per class, instead of -n.",
        flag="-k", also="--per-class", type=int, least=1, recorded=False)
    config: str | None = option(
        None, _DATA, "Configuration of the data set, if it has several.", group="data", decisive=True)
    max_download: int = option(
        DEFAULT_DOWNLOAD, _DATA, "Maximum download per data set; of a larger one, a part is read.",
        group="data", read=read_size, typed_default="2GB", decisive=True)
    image_column: str | None = option(
        None, _DATA, "Column with the images, if it cannot be found by its type.", group="data", decisive=True)
    label_column: str | None = option(
        None, _DATA, "Column with the labels, if it cannot be found by its type.", group="data", decisive=True)
    text_column: str | None = option(
        None, _DATA, "Column with the texts, or the two columns of a pair, if they cannot be found by their names. "
        "For a prompt and its answer: prompt=COLUMN,completion=COLUMN.",
        group="data", metavar="COLUMN[,COLUMN]", decisive=True)
    caption_column: str | None = option(
        None, _DATA, "Column with the captions of the images, if there is one.", group="data", decisive=True)
    max_length: int | None = option(
        None, _DATA, "Maximum tokens per text; by default the tokenizer's limit, but at most 2048.",
        group="data", type=int, metavar="TOKENS", least=1, decisive=True)
    special_tokens: bool = option(
        True, _DATA, "Read texts and prompts without the tokenizer's special tokens, such as [CLS] or <s>.",
        group="data", flag="--no-special-tokens", type=bool, decisive=True, python="False leaves them out.")
    class_names: Sequence[str] | None = option(
        None, _DATA, "File with one class name per line.",
        group="data", metavar="FILE", read=read_lines, decisive=True, python="A list of names.")
    templates: Sequence[str] = option(
        DEFAULT_TEMPLATES, _DATA, "File with one prompt per line; {} stands for the class name.",
        group="data", metavar="FILE", read=read_lines, decisive=True, python="A list of prompts.")
    prompts: Sequence[str] | None = option(
        None, _DATA, "With --data generated: file with one prompt per line, which the fine-tuned source continues; by "
        "default neutral prompts.",
        metavar="FILE", read=read_lines, decisive=True, python="A list of prompts.")
    seed: int = option(0, _DATA, "Seed for drawing the samples.", group="data", type=int, decisive=True)
    batch_size: int | None = option(
        None, _RUN, "Batch size; by default a fast one that fits. It is halved automatically if the GPU runs out of "
        "memory.", group="data", type=int, least=1)
    device: str = option("auto", _RUN, "auto, cpu, cuda or cuda:N.", group="data", recorded=False)
    dtype: str = option(
        "auto", _RUN, "Precision for running the models; auto is float32.",
        group="data", choices=("auto", "float32", "float64", "bfloat16"), decisive=True)
    memory: int | None = option(
        None, _RUN, "Maximum device memory to use, such as 8GB; by default all of it.",
        group="limits", metavar="SIZE", read=read_size, type=int, least=1)
    device_map: str | None = option(
        None, _RUN, "Spread models that do not fit one GPU over all GPUs and the CPU's memory, with accelerate.",
        group="limits", choices=("auto", "balanced", "sequential"))
    method: str = option(
        AUTO, _METHOD, "How to port; leave it at the default unless you want to compare methods (see 'hf-bico "
        "compare'). auto: bico-path if the objective predicts classes, bico otherwise; for decoders, bico-last is "
        "tried too and the samples choose.",
        choices=METHODS, metavar="METHOD", takes_auto=True)
    completion: str = option(
        "drop", _METHOD, "How to handle directions that calibration did not see: drop them, or complete the maps "
        "arbitrarily (svd).", group="aligning", choices=("drop", "svd"), decisive=True)
    alpha: float | str = option(
        AUTO, _METHOD, "How much of the task vector to add. auto: as much as the samples clearly support, possibly "
        "nothing. A number is used as it is; the paper uses 1.",
        group="aligning", metavar="auto|NUMBER", read=read_alpha, decisive=True)
    bold: bool = option(
        False, _METHOD, "Take larger steps with --alpha auto, and check a polish on fewer than 20 samples less "
        "strictly: a larger gain on average, but more ports that hurt.",
        group="aligning", type=bool, decisive=True)
    layers: str | Sequence[int] = option(
        "index", _METHOD, "Which source block each target block takes: by index, by similarity, or a list such as "
        "0,0,1,1.",
        group="aligning", metavar="index|similarity|LIST", read=read_layers, decisive=True)
    sampling: str = option(
        "random", _DATA, "How to choose calibration samples.",
        group="aligning", choices=SAMPLINGS, metavar="SAMPLING", decisive=True)
    labels: str = option(
        "auto", _DATA, "Use the labels of the data set, or the predictions of the fine-tuned source (pseudo). auto: "
        "the data set's, if it has any.",
        group="aligning", choices=("auto", "dataset", "pseudo"), decisive=True)
    augment: int | None = option(
        None, _DATA, "Altered copies of each sample; by default 7 for bico-path with fewer than 50 samples, otherwise "
        "none.",
        group="aligning", type=int, metavar="COPIES", least=0, decisive=True)
    unlabelled_samples: int = option(
        DEFAULT_UNLABELLED, _DATA, "Maximum number of samples to take from --unlabelled.",
        group="aligning", type=int, metavar="N", least=1, decisive=True)
    objective: str | Callable[..., Any] = option(
        "auto", _METHOD, "The loss whose gradients are aligned; auto: the loss that the models are made for.",
        group="aligning", choices=OBJECTIVES, metavar="OBJECTIVE", decisive=True, takes_functions=True,
        python="A callable (model, batch) -> loss that sums over the samples of `batch.pixels` or `batch.tokens`, and "
        "`batch.labels` (each -1 where the data set has none).")
    path_steps: int | None = option(
        None, _METHOD, "Steps of bico-path; 4 with --alpha auto, 2 with a number.",
        group="aligning", type=int, least=1, decisive=True)
    signs: str = option(
        "mean", _METHOD, "For gradfix: use the signs of the mean gradient, or the majority of the signs of all "
        "samples.",
        group="aligning", choices=("mean", "majority"), decisive=True)
    learning_rate: float | None = option(
        None, _TRAINING, f"Learning rate; {DEFAULT_RATE} by default for fewshot and finetune. For train, distill and "
        f"a polish, left-out samples "
        "choose it.", group="training", type=float, least=0, decisive=True)
    weight_decay: float = option(
        0.1, _TRAINING, "Weight decay of AdamW.", group="training", type=float, least=0, decisive=True)
    train_steps: int | None = option(
        None, _TRAINING, f"Training steps: {FINETUNE_STEPS} by default for finetune; for train and distill a maximum, "
        f"{BRIEF_STEPS} by default.", group="training", type=int, least=1, decisive=True)
    train_batch: int = option(
        128, _TRAINING, "Batch size of training steps.", group="training", type=int, least=1, decisive=True)
    warmup: int = option(200, _TRAINING, "Warm-up steps of finetune.", group="training", type=int, least=0,
        decisive=True)
    eval_samples: int = option(
        DEFAULT_MEASURED, _MEASURING, "Maximum number of held-out samples to measure on.",
        group="measuring", type=int, metavar="N", least=1, decisive=True)
    evaluation: str = option(
        "auto", _MEASURING, "How to measure models: zero-shot (as the objective predicts), with a probe (a linear "
        "classifier fitted to the calibration samples), or both. auto: a probe for text-to-text, otherwise zero-shot.",
        group="measuring", choices=("auto", "zero-shot", "probe", "both"))
    tower: str | None = option(
        None, _METHOD, "Which tower of a CLIP to port; by default the one that the fine-tune changed.",
        choices=("vision", "text", "both"))
    probe: bool = option(
        False, _METHOD, "Fit a new classification head to the samples instead of using the source's.", type=bool,
        group="aligning", decisive=True)
    readout: bool = option(
        False, _METHOD, "Correct the final projection towards the predictions of the source.", type=bool)
    polish: bool = option(
        False, _METHOD, "After the port, train the ported weights for a few steps towards the predictions of the "
        "source, then correct the final projection. Left-out samples decide how many steps. Needs no labels.",
        type=bool, decisive=True)
    polish_steps: int = option(
        POLISH_STEPS, _TRAINING, "Maximum number of steps of --polish.", type=int, least=1, decisive=True)
    polish_on: str = option(
        "source", _TRAINING, "What --polish learns from: the predictions of the source, or the labels.",
        choices=("source", "labels"), decisive=True)
    control: bool = option(
        False, _MEASURING, "Also measure a port from mispaired samples: its gain should vanish.", type=bool)
    checkpoint: str | None = option(
        None, _TRAINING, "Folder from which an interrupted training resumes; by default next to the output.",
        metavar="FOLDER", recorded=False)
    format: str | None = option(
        None, _OUTPUT, "Write a full model, a PEFT adapter, or only the change; by default a LoRA gives an adapter, "
        "and anything else a full model.", choices=FORMATS, recorded=False)
    rank: int | float | None = option(
        None, _OUTPUT, "Rank of an adapter: a whole number, or the share of energy to keep per layer, such as 0.95. "
        "By default a LoRA keeps its rank, and anything else is exact.", read=read_rank, recorded=False)
    evaluate: bool = option(
        True, _MEASURING, "Do not measure target, port and source on held-out samples.",
        flag="--no-eval", type=bool, recorded=False, python="False skips it.")
    force: bool = option(
        False, _RUN, "Continue even if the base looks wrong or the port measured worse.", type=bool)
    calibration_batch: int | None = option(
        None, _RUN, "Batch size of the calibration, to repeat a port exactly.",
        group="python", flag="calibration_batch", type=int, least=1, recorded=False)
    # fmt: on

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Make settings of options by name; sizes may be texts such as 2GB."""
        for name in options:
            if name not in OPTIONS:
                meant = "per_class" if name == "k" else name
                remedy = did_you_mean(meant, OPTIONS, f"the options are: {', '.join(OPTIONS)}")
                raise UsageError(f"there is no option '{name}'", remedy)
        sizes = {name: options.get(name) for name in ("max_download", "memory")}
        read = {name: read_size(size, name) for name, size in sizes.items() if isinstance(size, str)}
        return cls(**{**options, **read})

    def __post_init__(self) -> None:
        for one in fields(self):
            OPTIONS[one.name].check(one.name, getattr(self, one.name), one.default)
        self._check_layers()
        self._check_texts()
        self._check_together()
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}", "use a whole number of at least 0, and below 2^63")
        if not self.finds_alpha and (not isinstance(self.alpha, int | float) or not isfinite(self.alpha)):
            raise UsageError(f"--alpha is {self.alpha}", f"use {AUTO}, or a finite number; 1 is the paper's")

    def _check_together(self) -> None:
        """Refuse options that contradict each other."""
        if require_rank(self.rank) is not None and self.format not in (None, "adapter"):
            raise UsageError(f"--rank was given with --format {self.format}", "use --rank with --format adapter")
        if self.labels == "pseudo" and self.objective not in ("auto", *PREDICTING):
            raise UsageError(
                "pseudo-labels need an objective that predicts classes, and this one does not",
                "leave one of the two out",
            )
        if self.bold and not self.finds_alpha:
            raise UsageError(
                f"--bold lets the samples choose larger steps, and --alpha is {self.alpha}", "leave one of the two out"
            )
        if self.n is not None and self.per_class is not None:
            raise UsageError("-n and -k were both given", "choose the number of samples in all, or per class")
        if self.control and not self.evaluate:
            raise UsageError("--control is measured, and --no-eval measures nothing", "leave one of the two out")

    def _check_texts(self) -> None:
        for name, texts in (("templates", self.templates), ("class_names", self.class_names)):
            if isinstance(texts, str):
                raise UsageError(f"{name} is one string, {texts!r}", "give a list of strings")
            for text in texts or ():
                if not isinstance(text, str):
                    raise UsageError(f"{name} holds {text!r}", "give a list of strings")
        object.__setattr__(self, "templates", tuple(self.templates))
        for template in self.templates:
            if "{}" not in template:
                raise UsageError(f"the template {template!r} has no place for the class name", "put {} into it")
        if not self.templates:
            raise UsageError("there is no prompt template", "give at least one line with {} in it")

    def _check_layers(self) -> None:
        if isinstance(self.layers, str):
            _require_one_of("--layers", self.layers, LAYERS)
            return
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or any(type(block) is not int or block < 0 for block in self.layers):
            raise UsageError(
                f"--layers is {list(self.layers)}", "give the source block of each target block, such as 0,0,1,1"
            )

    def copies(self, samples: int) -> int:
        """Return how many altered copies of each of so many samples are used."""
        if self.augment is not None:
            return self.augment
        return method_info(self.method).copies if samples < FEW_SAMPLES else 0

    @property
    def finds_alpha(self) -> bool:
        """Whether the samples choose how much of the task vector is added."""
        return self.alpha == AUTO

    @property
    def resolved(self) -> Settings:
        """The same with the method that "auto" stands for, once the objective is known."""
        if self.method != AUTO:
            return self
        return replace(self, method=AUTO_METHODS[0 if self.predicts else 1])

    @property
    def tried_too(self) -> tuple[str, ...]:
        """The methods that "auto" tries beside the one that it stands for."""
        return TRIED_TOO.get(self.objective, ()) if isinstance(self.objective, str) else ()

    @property
    def steps(self) -> int:
        """Steps of bico-path."""
        return self.path_steps or (4 if self.finds_alpha else 2)

    @property
    def rate(self) -> float:
        """The learning rate, where it is not chosen by samples."""
        return DEFAULT_RATE if self.learning_rate is None else self.learning_rate

    @property
    def training_steps(self) -> int:
        """The steps of a method that trains."""
        return self.train_steps or FINETUNE_STEPS if self.trains_on_all else self.brief_steps

    @property
    def brief_steps(self) -> int:
        """The steps of train and distill."""
        return self.train_steps or BRIEF_STEPS

    def reads(self, name: str) -> bool:
        """Return whether the method, or the polish after it, reads an option."""
        if self.polish and name in POLISH_OPTIONS:
            return True
        return name not in OF_POLISH and self.method in option_methods(name)

    @property
    def trains(self) -> bool:
        """Whether anything is trained for several steps, so that an interruption is worth resuming."""
        return self.polish or self.trains_on_all or self.method in BRIEF

    @property
    def batch(self) -> int:
        """Samples at a time where nothing is differentiated."""
        return self.batch_size or USUAL_BATCH

    @property
    def trains_on_all(self) -> bool:
        """Whether the method trains on all of the split, and not on some samples."""
        return method_info(self.method).trains_on == "split"

    @property
    def own_objective(self) -> bool:
        """Whether the task loss is the caller's own."""
        return not isinstance(self.objective, str)

    @property
    def names_classes(self) -> bool:
        """Whether classes need names: as words of prompts, or as answers."""
        return self.objective in ("auto", "zero-shot", "contrastive", "text-to-text")

    @property
    def predicts(self) -> bool:
        """Whether the objective tells classes apart."""
        return self.objective in PREDICTING


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(Settings)}
"""Every option by its name in Python."""


def _described() -> str:
    """Return the docstring of `Settings`: every option under its heading."""
    sections: dict[str, list[str]] = {}
    for name, known in OPTIONS.items():
        text = f"{name}: {known.help} {known.python}".rstrip()
        sections.setdefault(known.section, []).append(indent("\n".join(wrap(text, 110)), "    "))
    listed = [f"{title}:\n" + "\n".join(lines) for title, lines in sections.items()]
    return "\n\n".join(["The options of a port.", *listed])


Settings.__doc__ = _described()
