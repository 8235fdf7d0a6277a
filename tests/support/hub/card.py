"""The metadata block of a README: reads it, and judges it as the Hub does. Knows no repository."""

from __future__ import annotations

import re
from typing import Any

import yaml

_LICENSES = (
    "afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0"
    " bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5"
    " cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0"
    " cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0"
    " cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0"
    " etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0"
    " grok2-community h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2"
    " llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0"
    " other pddl postgresql unknown unlicense wtfpl zlib"
)
LICENSES = frozenset(_LICENSES.split())
_FRONT_MATTER = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*$", re.DOTALL | re.MULTILINE)
_LONGEST, _MOST_ALIASES = 1_000_000, 100
_REPO_ID = re.compile(r"(?:[\w][\w.-]*/)?[\w][\w.-]*")


def metadata(readme: str) -> dict[str, Any]:
    """The YAML block of a README, {} where there is none that can be read."""
    try:
        found = _load(readme)
    except (yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _load(readme: str) -> Any:
    block = _FRONT_MATTER.match(readme)
    if block is None:
        return None
    if len(block[1]) > _LONGEST or block[1].count("*") > _MOST_ALIASES:
        raise yaml.YAMLError("it is too large, or has too many aliases")  # a server does not read what expands
    return yaml.safe_load(block[1])


def judge(readme: str, repo_type: str = "model") -> tuple[list[str], list[str]]:
    """The Hub's errors and warnings about a README's metadata.

    >>> judge("---\\nlicense: [mit\\n---\\n")[0][0][:24]
    'Invalid YAML in metadata'
    >>> judge("---\\nlicense: mit\\ntags: vision\\n---\\n")[0]
    ['"tags" must be an array']
    """
    try:
        found = _load(readme)
    except yaml.YAMLError as error:
        return [f"Invalid YAML in metadata: {error}"], []
    if found is None:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(found, dict):
        return ["metadata must be a YAML object"], []
    errors: list[str] = []
    warnings: list[str] = []
    _judge_license(found, errors)
    for key in ("license_name", "license_link", "pipeline_tag", "library_name", "model_name", "base_model_relation"):
        _need_text(found, key, errors)
    for key in ("tags", "metrics"):
        _need_list_of_text(found, key, errors, text_too=False)
    _need_list_of_text(found, "language", errors, text_too=True)
    for name in _need_list_of_text(found, "datasets", errors, text_too=True):
        if not _REPO_ID.fullmatch(name):
            warnings.append(f'"datasets" with value "{name}" is not a dataset id from https://hf.co/datasets')
    for name in _need_list_of_text(found, "base_model", errors, text_too=True):
        if not _REPO_ID.fullmatch(name):
            errors.append(f'"base_model" with value "{name}" is not valid. Use a model id from https://hf.co/models.')
    if found.get("model-index") is not None and repo_type == "model":
        errors += _judge_index(found["model-index"])
    return errors, warnings


def _judge_license(found: dict[str, Any], errors: list[str]) -> None:
    for name in _need_list_of_text(found, "license", errors, text_too=True):
        if name not in LICENSES:
            errors.append(f'"license" must be one of the ids of https://hf.co/docs/hub/repositories-licenses: "{name}"')


def _need_text(found: dict[str, Any], key: str, errors: list[str]) -> None:
    if found.get(key) is not None and not isinstance(found[key], str):
        errors.append(f'"{key}" must be a string')


def _need_list_of_text(found: dict[str, Any], key: str, errors: list[str], text_too: bool) -> list[str]:
    value = found.get(key)
    if value is None:
        return []
    if text_too and isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        errors.append(f'"{key}" must be an array' if not text_too else f'"{key}" must be a string or an array')
        return []
    wrong = [index for index, item in enumerate(value) if not isinstance(item, str)]
    errors += [f'"{key}[{index}]" must be a string' for index in wrong]
    return [item for item in value if isinstance(item, str)]


def _judge_index(index: Any) -> list[str]:
    """What a model-index must have: https://github.com/huggingface/hub-docs/blob/main/modelcard.md."""
    errors: list[str] = []
    for at, model in _objects(index, "model-index", errors):
        _require(model, at, ("name", "results"), errors)
        for place, result in _objects(model.get("results", []), f"{at}.results", errors):
            _require(result, place, ("task", "dataset", "metrics"), errors)
            for part, keys in (("task", ("type",)), ("dataset", ("type", "name")), ("source", ("url",))):
                if isinstance(result.get(part), dict):
                    _require(result[part], f"{place}.{part}", keys, errors)
                elif part in result:
                    errors.append(f'"{place}.{part}" must be of type object')
            for metric_at, metric in _objects(result.get("metrics", []), f"{place}.metrics", errors):
                _require(metric, metric_at, ("type", "value"), errors)
    return errors


def _objects(value: Any, at: str, errors: list[str]) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list):
        errors.append(f'"{at}" must be an array')
        return []
    errors += [f'"{at}[{i}]" must be of type object' for i, item in enumerate(value) if not isinstance(item, dict)]
    return [(f"{at}[{index}]", item) for index, item in enumerate(value) if isinstance(item, dict)]


def _require(found: dict[str, Any], at: str, keys: tuple[str, ...], errors: list[str]) -> None:
    for key in keys:
        if found.get(key) is None:
            errors.append(f'"{at}.{key}" is required')
        elif key in ("name", "type", "url") and not isinstance(found[key], str):
            errors.append(f'"{at}.{key}" must be a string')
