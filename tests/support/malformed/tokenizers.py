"""Tokenizers, image processors and chat templates that are broken, or do not end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from support.malformed.table import add, change_json, deep, put, spoils


def _put(file: str, content: bytes | str, scene: Path) -> None:
    put(scene / file, content)


def _change(file: str, path: tuple[str, ...], value: Any, scene: Path) -> None:
    change_json(scene / file, *path, to=value)


TOKENIZER, SETTINGS = "llama/tokenizer.json", "llama/tokenizer_config.json"
TEMPLATE = "llama/chat_template.jinja"
PROCESSOR = "transformers/target/preprocessor_config.json"
for name, content in {
    "of_no_bytes": b"",
    "that_is_no_json": "{",
    "that_is_a_list": "[]",
    "that_says_nothing": "{}",
    "of_other_bytes": b"\xff\xfe\x00",
    "nested_without_end": deep(5000),
}.items():
    add(f"tokenizer_{name}", "evaluate_plain", "MissingProcessorError", partial(_put, TOKENIZER, content))
for name, path, value in (
    ("with_a_model_in_a_text", ("model",), "BPE"),
    ("with_a_vocabulary_in_a_list", ("model", "vocab"), [1, 2]),
    ("with_negative_numbers", ("model", "vocab"), {"a": -1}),
    ("with_an_unknown_model", ("model", "type"), "Magic"),
    ("with_a_broken_expression", ("pre_tokenizer", "pattern"), {"Regex": "("}),
    ("with_added_tokens_in_a_text", ("added_tokens",), "none"),
):
    add(f"tokenizer_{name}", "evaluate_plain", "MissingProcessorError", partial(_change, TOKENIZER, path, value))
for name, path, value in (
    ("with_a_length_in_a_list", ("model_max_length",), [5]),
    ("with_names_that_are_a_number", ("model_input_names",), 5),
    ("with_a_padding_token_in_a_mapping", ("pad_token",), {"a": 1}),
    ("with_a_class_that_is_a_number", ("tokenizer_class",), 5),
):
    add(
        f"tokenizer_settings_{name}", "evaluate_plain", "MissingProcessorError", partial(_change, SETTINGS, path, value)
    )


@spoils("evaluate_plain", "MissingProcessorError")
def no_tokenizer(scene: Path) -> None:
    for file in (scene / "llama").glob("tok*"):
        file.unlink()


@spoils("evaluate_plain", "MissingProcessorError")
def tokenizer_with_more_tokens_than_the_model(scene: Path) -> None:
    change_json(scene / TOKENIZER, "model", "vocab", "a", to=5000)


LOOP = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "x" + "{% endfor %}" * 3
DOUBLE = "{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}"
TEMPLATES = {
    "that_counts_to_a_billion": "{% for i in range(10**9) %}x{% endfor %}",
    "that_loops_in_loops": LOOP,
    "that_doubles": "{% set n = namespace(a='aa') %}" + DOUBLE,
    "that_repeats_a_letter": "{{ 'a' * 10**11 }}",
    "that_raises_to_powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "that_pads_to_a_billion": "{{ 'a'.center(10**11) }}",
    "that_reaches_for_classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "that_reaches_for_globals": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "that_imports_a_file": "{% import '/etc/passwd' as x %}{{ x }}",
    "that_calls_itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "that_is_broken": "{% for",
    "that_is_nested_without_end": "{{ " + "(" * 20_000,
    "that_always_raises": "{{ raise_exception('no') }}",
    "that_divides_by_zero": "{{ 1 / 0 }}",
    "that_says_nothing_of_the_chat": "hello",
}
for name, text in TEMPLATES.items():
    add(f"template_{name}", "evaluate_chats", "UnreadableSampleError", partial(_put, TEMPLATE, text))
for name, content in {
    "of_no_bytes": b"",
    "that_is_a_list": "[]",
    "nested_without_end": deep(5000),
}.items():
    add(f"processor_{name}", "evaluate", "MissingProcessorError", partial(_put, PROCESSOR, content))
for name, path, value, error in (
    ("of_no_kind_and_size", ("size",), {"shortest_edge": 2**40}, "MissingProcessorError"),
    ("of_an_unknown_kind", ("image_processor_type",), "MagicImageProcessor", "MissingProcessorError"),
    ("with_a_size_in_a_text", ("size",), "large", "MissingProcessorError"),
    ("with_a_size_without_end", ("size",), {"shortest_edge": 10**7}, "MissingProcessorError"),
    ("with_a_crop_without_end", ("crop_size",), {"height": 10**6, "width": 10**6}, "MissingProcessorError"),
    ("with_a_crop_of_another_size", ("crop_size",), {"height": 20, "width": 20}, "UnsupportedModelError"),
    ("with_a_mean_in_a_text", ("image_mean",), "grey", "UnreadableSampleError"),
    ("with_a_mean_of_two", ("image_mean",), [0.5, 0.5], "UnreadableSampleError"),
    ("with_a_resampling_that_is_none", ("resample",), 99, "UnreadableSampleError"),
):
    add(f"processor_{name}", "evaluate", error, partial(_change, PROCESSOR, path, value))


@spoils("evaluate", "MissingProcessorError")
def no_processor(scene: Path) -> None:
    for file in (scene / "transformers" / "target").glob("pre*"):
        file.unlink()
