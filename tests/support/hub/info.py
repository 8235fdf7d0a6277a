"""The JSON objects that describe a repository: its info, its tree entries, its discussions. Knows no request."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection
from typing import Any

import yaml

from .blobs import Blob, File
from .card import metadata
from .store import Commit, Discussion, Repo

HEADER_LIMIT = 100_000_000
LIBRARIES = {
    "adapter_config.json": "peft",
    "open_clip_config.json": "open_clip",
    "modules.json": "sentence-transformers",
    "model_index.json": "diffusers",
    "config.json": "transformers",
}
LISTED = ("id", "modelId", "author", "private", "gated", "downloads", "likes", "tags", "createdAt", "lastModified")


def repo_info(repo: Repo, commit: Commit, blobs: bool = False, expand: Collection[str] = ()) -> dict[str, Any]:
    """The info of a repository at a commit: all of it, or the id and the properties asked for."""
    card = _card(commit)
    config = _config(commit)
    library = card.get("library_name") or _library(commit, config)
    base = _base_models(card, commit)
    found: dict[str, Any] = {
        "_id": repo.id,
        "id": repo.id,
        "author": repo.namespace,
        "sha": commit.sha,
        "lastModified": commit.date,
        "createdAt": repo.created,
        "private": repo.private,
        "gated": repo.gated,
        "disabled": repo.disabled,
        "downloads": repo.downloads,
        "downloadsAllTime": repo.downloads,
        "likes": repo.likes,
        "cardData": card or None,
        "siblings": [_sibling(path, file, blobs) for path, file in sorted(commit.files.items())],
        "usedStorage": sum(file.size for file in commit.files.values()),
        "tags": _tags(repo, commit, card, config, library, base),
    }
    if repo.type == "model":
        found |= {
            "modelId": repo.id,
            "pipeline_tag": card.get("pipeline_tag"),
            "library_name": library,
            "model-index": card.get("model-index"),
            "config": config or None,
            "safetensors": _safetensors(commit),
            "baseModels": base,
            "evalResults": _eval_results(commit),
        }
    if expand:
        return {key: value for key, value in found.items() if key in {"_id", "id", *expand} and value is not None}
    for key in ("downloadsAllTime", "baseModels", "evalResults"):
        found.pop(key, None)
    return {key: value for key, value in found.items() if value is not None}


def listed_info(repo: Repo, full: bool, card: bool, config: bool, expand: Collection[str]) -> dict[str, Any]:
    """The shorter info of a listing."""
    commit = repo.at()
    if expand:
        return repo_info(repo, commit, expand=expand)
    keys = {*LISTED, "_id", "pipeline_tag", "library_name"}
    keys |= {"sha", "siblings", "cardData" if repo.type == "dataset" else "sha"} if full else set()
    keys |= {"cardData"} if card else set()
    keys |= {"config"} if config else set()
    return {key: value for key, value in repo_info(repo, commit).items() if key in keys}


def _sibling(path: str, file: File, blobs: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": path}
    if blobs:
        found |= {"size": file.size, "blobId": file.git_id}
        if file.lfs:
            found["lfs"] = {"sha256": file.blob.sha256, "size": file.size, "pointerSize": len(file.pointer)}
    return found


def _card(commit: Commit) -> dict[str, Any]:
    readme = commit.files.get("README.md")
    if readme is None:
        return {}
    try:
        # dates and the like become text, as they do in the Hub's JSON
        text = json.dumps(metadata(readme.blob.read().decode(errors="replace")), default=str)
    except ValueError:  # it contains itself
        return {}
    found: dict[str, Any] = json.loads(text)
    return found


def _json(commit: Commit, path: str) -> dict[str, Any]:
    if path not in commit.files:
        return {}
    try:
        found = json.loads(commit.files[path].blob.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _config(commit: Commit) -> dict[str, Any]:
    config = _json(commit, "config.json")
    found: dict[str, Any] = {key: config[key] for key in ("architectures", "model_type") if key in config}
    if adapter := _json(commit, "adapter_config.json"):
        found["peft"] = {key: adapter[key] for key in ("base_model_name_or_path", "task_type") if adapter.get(key)}
    return found


def _library(commit: Commit, config: dict[str, Any]) -> str | None:
    found = next((library for name, library in LIBRARIES.items() if name in commit.files), None)
    return None if found == "transformers" and "model_type" not in config else found


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [item for item in value or [] if isinstance(item, str)]


def _base_models(card: dict[str, Any], commit: Commit) -> dict[str, Any] | None:
    models = _texts(card.get("base_model"))
    if not models:
        return None
    relation = card.get("base_model_relation")
    if relation is None and "adapter_config.json" in commit.files:
        relation = "adapter"
    if relation is None and len(models) > 1 and "merge" in _texts(card.get("tags")):
        relation = "merge"
    return {"relation": relation or "finetune", "models": [{"_id": name, "id": name} for name in models]}


def _tags(
    repo: Repo, commit: Commit, card: dict[str, Any], config: dict[str, Any], library: str | None, base: Any
) -> list[str]:
    tags: list[str] = []
    if repo.type == "model":
        tags += [library or ""]
        tags += ["pytorch"] if "pytorch_model.bin" in commit.files else []
        tags += ["safetensors"] if any(path.endswith(".safetensors") for path in commit.files) else []
        tags += [config.get("model_type") or "", card.get("pipeline_tag") or ""]
    for key in ("task_categories", "size_categories"):
        tags += [f"{key}:{name}" for name in _texts(card.get(key))]
    tags += _texts(card.get("tags"))
    tags += [f"language:{name}" if repo.type == "dataset" else name for name in _texts(card.get("language"))]
    tags += [f"dataset:{name}" for name in _texts(card.get("datasets"))]
    if base:
        names = [model["id"] for model in base["models"]]
        tags += [f"base_model:{name}" for name in names]
        tags += [f"base_model:{base['relation']}:{name}" for name in names]
    tags += ["benchmark:official"] if repo.benchmark and "eval.yaml" in commit.files else []
    tags += ["model-index"] if card.get("model-index") else []
    tags += [f"license:{name}" for name in _texts(card.get("license"))]
    return list(dict.fromkeys([tag for tag in tags if tag] + ["region:us"]))


def _eval_results(commit: Commit) -> list[dict[str, Any]]:
    """The entries of `.eval_results/*.yaml`, and an error for each file that is none."""
    found: list[dict[str, Any]] = []
    for path, file in sorted(commit.within(".eval_results").items()):
        try:
            entries = yaml.safe_load(file.blob.read())
            for entry in entries:
                if not all(isinstance(entry["dataset"][key], str) for key in ("id", "task_id")):
                    raise ValueError("dataset.id and dataset.task_id are required")
                float(entry["value"])
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            found.append({"filename": path, "error": str(error)})
        else:
            found += [{"filename": path, "data": entry} for entry in entries]
    return found


def safetensors_header(blob: Blob) -> dict[str, Any] | None:
    """The header of a safetensors file, None when it is none."""
    size = int.from_bytes(blob.read(0, min(8, blob.size)), "little")
    if blob.size < 8 or size > min(HEADER_LIMIT, blob.size - 8):
        return None
    try:
        header = json.loads(blob.read(8, 8 + size))
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def _safetensors(commit: Commit) -> dict[str, Any] | None:
    """Parameters by dtype of the model's one file, or of the shards that its index names."""
    index = _json(commit, "model.safetensors.index.json").get("weight_map")
    if "model.safetensors" in commit.files:
        names = ["model.safetensors"]
    elif isinstance(index, dict):
        names = sorted({name for name in index.values() if name in commit.files})
    else:
        names = [path for path in commit.files if path.endswith(".safetensors") and "/" not in path][:1]
    parameters: Counter[str] = Counter()
    for name in names:
        for tensor, entry in (safetensors_header(commit.files[name].blob) or {}).items():
            if tensor != "__metadata__" and isinstance(entry, dict) and "dtype" in entry and "shape" in entry:
                parameters[entry["dtype"]] += math.prod(entry["shape"])
    return {"parameters": dict(parameters), "total": sum(parameters.values())} if parameters else None


def sharded_headers(commit: Commit, index_path: str) -> dict[str, Any]:
    """The index (without its map) and the header of every shard."""
    index = _json(commit, index_path)
    shards = sorted({name for name in index.get("weight_map", {}).values() if name in commit.files})
    headers = {name: safetensors_header(commit.files[name].blob) or {} for name in shards}
    return {"index": {"metadata": index.get("metadata")}, "headers": headers}


def tree_entry(repo: Repo, commit: Commit, path: str, expand: bool) -> dict[str, Any] | None:
    """The entry of a file or folder, None where there is neither."""
    file = commit.files.get(path)
    oid = commit.tree_id(path)
    if oid is None:
        return None
    found: dict[str, Any] = {"type": "file" if file else "directory", "oid": oid, "size": 0, "path": path}
    if file:
        found["size"] = file.size
        if file.lfs:
            found["lfs"] = {"oid": file.blob.sha256, "size": file.size, "pointerSize": len(file.pointer)}
    if expand:
        last = repo.last_change(commit, path)
        found["lastCommit"] = {"id": last.sha, "title": last.title, "date": last.date}
    return found


def discussion_info(repo: Repo, discussion: Discussion) -> dict[str, Any]:
    """The entry of a discussion in the list."""
    return {
        "num": discussion.num,
        "title": discussion.title,
        "author": {"name": discussion.author, "type": "user"},
        "status": discussion.status,
        "createdAt": discussion.created,
        "isPullRequest": discussion.pull_request,
        "repo": {"name": repo.id, "type": repo.type},
        "repoOwner": {"name": repo.namespace, "type": "user"},
        "numComments": 1,
        "topReactions": [],
        "numReactionUsers": 0,
        "pinned": False,
    }


def discussion_details(repo: Repo, discussion: Discussion) -> dict[str, Any]:
    """A discussion with its first comment and, of a pull request, its commits."""
    author = {"name": discussion.author}
    comment = {"edited": False, "hidden": False, "latest": {"raw": discussion.description}}
    events: list[dict[str, Any]] = [
        {"id": "0", "type": "comment", "createdAt": discussion.created, "author": author, "data": comment}
    ]
    found = discussion_info(repo, discussion) | {"events": events, "filesWithConflicts": []}
    if discussion.pull_request:
        found |= {"changes": {"base": "refs/heads/main"}, "diff": ""}
        for commit in reversed(repo.history(f"refs/pr/{discussion.num}")):
            if commit.date >= discussion.created and commit.sha != discussion.base:
                data = {"subject": commit.title, "oid": commit.sha}
                event = {"id": commit.sha, "type": "commit", "createdAt": commit.date, "author": author, "data": data}
                events.append(event)
    return found
