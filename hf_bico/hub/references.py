"""Parse repo references: a local folder, a Hub id or address, or open_clip's own `ARCHITECTURE/TAG`.

Looks at local folders only; makes no request, and imports open_clip (which loads torch) only for names of its own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hf_bico.errors import RecordError, RepoNotFoundError
from hf_bico.utils.files import expanded
from hf_bico.utils.text import is_unicode, near

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_REVISION = r"(?!.*\.\.)[\w./-]+"
_HUB_ID = re.compile(rf"(?P<id>(?:{_OWNER}/)?{_PART})(?:@(?P<revision>{_REVISION}))?")
_HUB_ADDRESS = re.compile(
    rf"(?:https?://)?(?:huggingface\.co|hf\.co)/(?:datasets/)?"
    rf"(?P<id>(?:{_OWNER}/)?{_PART})(?:/tree/(?P<revision>{_REVISION}?))?/?"
)
_CACHED = re.compile(r"(?:models|datasets)--(?P<id>.+)/snapshots/(?P<revision>[0-9a-f]{40})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_ID = 96

RepoName = tuple[str, str]
"""The type and id of a Hub repo."""
REPO_TYPES = ("model", "dataset")
LOCAL: RepoName = ("local", "a local folder")
"""Stands for a model or data set that is not known to be on the Hub."""


@dataclass(frozen=True)
class HubReference:
    """A repo on the Hub, at a revision or at its main branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def parse(reference: str | Path, what: str, *, files: bool = False) -> Path | HubReference:
    """Return a local folder (or file, if `files` are allowed), else a Hub id; `what` names it in errors.

    >>> str(parse("org/name@v2", "the model"))
    'org/name@v2'
    """
    text = str(reference)
    if not text:
        raise RepoNotFoundError(f"{what}: the reference is empty", "name a Hub repo or a folder")
    if isinstance(reference, Path) or text.startswith("local-dir:"):
        return _local(text.removeprefix("local-dir:"), what, files)
    if not text.startswith("hf-hub:") and os.path.exists(expanded(text)):
        return _local(text, what, files)
    return hub_reference(text.removeprefix("hf-hub:")) or _local(text, what, files)


def hub_reference(text: str) -> HubReference | None:
    """Parse a Hub id or address; None if the text is neither.

    >>> str(hub_reference("https://huggingface.co/org/name/tree/v2"))
    'org/name@v2'
    """
    named = _HUB_ADDRESS.fullmatch(text) or _HUB_ID.fullmatch(text)
    return HubReference(named["id"], named["revision"]) if named and is_repo_id(named["id"]) else None


def cached_repo(folder: Path) -> HubReference | None:
    """Return the repo and commit of a snapshot folder in the Hub's cache."""
    match = _CACHED.fullmatch("/".join(folder.absolute().parts[-3:]))
    return HubReference(match["id"].replace("--", "/"), match["revision"]) if match else None


def is_hub_id(text: str) -> bool:
    """Return whether a text is a valid `OWNER/NAME`."""
    return "/" in text and is_repo_id(text)


def is_repo_id(text: str) -> bool:
    """Return whether a text is a valid `OWNER/NAME`, or one of the Hub's old ids of a single word."""
    named = _HUB_ID.fullmatch(text)
    if named is None or named["revision"] is not None or len(text) > _MAX_ID:
        return False
    return "--" not in text and ".." not in text and not text.endswith(".git")


def is_commit(text: str) -> bool:
    """Return whether a text is the full name of a commit."""
    return _COMMIT.fullmatch(text) is not None


def recorded_repo(name: str, commit: str) -> str:
    """Return the reference of a repo at the commit that a record names; never of a folder that is called alike."""
    if not is_repo_id(name) or not is_commit(commit):
        raise RecordError(f"'{name}' at '{commit}' is no commit of a Hub repo", "name what to use yourself")
    return f"hf-hub:{name}@{commit}"


def recorded_folder(name: str) -> Path:
    """Find the folder that a record names, in the current folder or one level below."""
    matches: list[Path] = []
    if Path(name).name == name and name not in ("", ".."):  # records have names only: a path is not followed
        folders = sorted(entry.name for entry in os.scandir() if entry.is_dir() and not entry.name.startswith("."))
        here = [Path(name)] if os.path.exists(name) else []
        matches = here or [Path(folder, name) for folder in folders if os.path.isdir(os.path.join(folder, name))]
    if not matches:
        raise RecordError(f"it was made from the local folder '{name}', which is not here", "run it beside that folder")
    if len(matches) > 1:
        raise RecordError(
            f"it was made from the local folder '{name}', and there are '{matches[0]}' and '{matches[1]}'",
            "run it beside the right one",
        )
    return matches[0]


def near_folder(text: str) -> str | None:
    """Return a local folder with a similar path, matched part by part."""
    folder = Path()
    for part in expanded(text).parts:
        if not os.path.isdir(folder / part):
            similar = near(part, [path.name for path in folder.glob("*") if path.is_dir()])
            if similar is None:
                return None
            part = similar
        folder /= part
    return str(folder)


def _local(text: str, what: str, files: bool) -> Path:
    path = expanded(text)
    if not is_unicode(path.name):  # records and cards are in UTF-8
        raise RepoNotFoundError(f"{what}: the name '{path.name}' is not valid UTF-8", "rename it")
    if os.path.isdir(path) or (files and os.path.isfile(path)):  # pathlib raises on long names
        return path.resolve()
    if os.path.isfile(path):
        configs = "config.json (of open_clip: open_clip_config.json)"
        raise RepoNotFoundError(
            f"{what}: '{text}' is a file", f"name its folder, '{path.parent}', with the model's {configs} in it"
        )
    similar = near_folder(text)
    raise RepoNotFoundError(
        f"{what}: there is no folder '{text}'", f"did you mean '{similar}'?" if similar else "check the path"
    )


def hub_repo(reference: HubReference, what: str) -> HubReference | None:
    """Return the Hub repo of an open_clip name such as `ViT-B-16/laion2b_s34b_b88k`; None for other names.

    >>> str(hub_repo(HubReference("ViT-B-16-plus-240/laion400m_e32"), "the target"))
    'timm/vit_base_patch16_plus_clip_240.laion400m_e31'
    """
    architecture, _, tag = reference.id.partition("/")
    if not tag or architecture not in _architectures():
        return None
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    entry = get_pretrained_cfg(architecture, tag)
    if not entry:
        tags = list_pretrained_tags_by_model(architecture)
        names = ", ".join(f"{architecture}/{known}" for known in tags)
        raise RepoNotFoundError(
            f"{what}: open_clip knows no '{tag}' of {architecture}",
            f"use one of: {names}" if tags else "name a Hub repo or a folder",
        )
    owner, _, rest = str(entry.get("hf_hub", "")).partition("/")
    if not rest:
        raise RepoNotFoundError(
            f"{what}: open_clip downloads '{reference.id}' from outside of the Hub",
            "download it, save it as safetensors and name the folder",
        )
    return HubReference(f"{owner}/{rest.partition('/')[0]}")


def near_open_clip(reference: HubReference) -> str | None:
    """Return an open_clip name whose architecture resembles the last part of this id."""
    name = reference.id.rpartition("/")[2]
    if not get_close_matches(name, _architectures(), n=1, cutoff=0.8):
        return None
    from open_clip.pretrained import list_pretrained

    tags = dict(list_pretrained())  # architecture to its last tag
    matches = get_close_matches(name, tags, n=1, cutoff=0.8)
    return f"{matches[0]}/{tags[matches[0]]}" if matches else None


@cache
def _architectures() -> frozenset[str]:
    spec = find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "model_configs"
    return frozenset(file.stem for file in folder.glob("*.json"))
