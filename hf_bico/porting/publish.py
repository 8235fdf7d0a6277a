"""Pushes a folder that holds a record, and refuses results that are broken, worse, or made from the same repo.

Does not know how commits are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hf_bico.errors import OutputError, PushError, PushRefusedError
from hf_bico.hub.client import MAIN, Hub
from hf_bico.hub.push import (
    Pushed,
    PushOptions,
    push_command,
    push_files,
    require_pushable,
    restricted_repos,
    suggest_push,
    translate_push_errors,
)
from hf_bico.hub.references import LOCAL, RepoName
from hf_bico.reports.model_cards import CARD_FILE, render_card, write_card
from hf_bico.reports.record import ChangeRecord, DataRecord, ModelRecord, Record, UnlabelledRecord, read_any
from hf_bico.reports.results import headline, is_worse
from hf_bico.utils.files import sha256_of


def push_folder(
    folder: Path,
    repo_id: str,
    options: PushOptions | None = None,
    hub: Hub | None = None,
    *,
    made_from: Sequence[RepoName] | None = None,
    kept: bool = True,
) -> Pushed:
    """Push a folder that this tool wrote; repeating a push changes nothing.

    `made_from` names the Hub repos behind a folder without a record; a folder that is not `kept` cannot be pushed
    again later.
    """
    options, hub = options or PushOptions(), hub or Hub()
    if not folder.is_dir():
        raise PushError(f"there is no folder '{folder}'", "name a folder that hf-bico wrote")
    record = read_any(folder) if made_from is None else None
    if record is not None:
        _require_whole(folder, record)
        made_from = _repos_of(record)
        if isinstance(record, Record) and is_worse(record) and not options.force:
            line = push_command(folder, repo_id, replace(options, force=True))
            raise PushRefusedError(
                f"{headline(record)} It is not pushed.", f"insist with: {line}" if kept else "insist with force=True"
            )
    with suggest_push(push_command(folder, repo_id, options) if kept else None):
        full_id = require_pushable(repo_id, replace(options, overwrite=True), hub)
    replaces = not options.create_pr and options.revision in (None, MAIN)
    if replaces and record is not None and any(name.lower() == full_id.lower() for _, name in made_from or ()):
        raise PushRefusedError(f"this was made from '{full_id}', which a push would replace", "push to another repo")
    edited = record is not None and not _name_repo(full_id, options.revision, record, folder)
    restricted = restricted_repos(made_from or [LOCAL], hub)
    with translate_push_errors(full_id, options, push_command(folder, full_id, options) if kept else None):
        pushed = push_files(folder, full_id, options, restricted, hub)
    because = ", ".join(restricted) + " is not public, and this was made from it"
    unasked = pushed.private and options.private is None and restricted
    return replace(pushed, because=because if unasked else None, edited_card=edited)


def _require_whole(folder: Path, record: Record | ChangeRecord) -> None:
    """Refuse a folder whose weights are not those of its record."""
    files = record.output.files if record.output is not None else {}
    for name, digest in files.items():
        file = folder / Path(name).name
        if not file.is_file() or sha256_of([file])[file.name] != digest:
            raise PushError(
                f"'{name}' in '{folder.name}' is not the file that the record speaks of",
                "port again, or get it from where the folder was copied",
            )


def _repos_of(record: Record | ChangeRecord) -> list[RepoName]:
    """Return type and id of the Hub repos that a result was made from; LOCAL in addition for local inputs."""
    inputs: list[tuple[str, ModelRecord | DataRecord | UnlabelledRecord]]
    inputs = [("model", model) for model in record.models]
    if isinstance(record, Record) and record.data is not None:
        inputs += [("dataset", data) for data in (record.data, record.data.unlabelled) if data is not None]
    repos = [(kind, entry.id) for kind, entry in inputs if entry.commit is not None]
    return repos if len(repos) == len(inputs) else [*repos, LOCAL]


def _name_repo(repo_id: str, revision: str | None, record: Record | ChangeRecord, folder: Path) -> bool:
    """Write the repo's name into record and card; leave an edited card as it is, and return False."""
    card, output = folder / CARD_FILE, record.output
    ours = not card.is_file() or card.read_bytes() == render_card(record).encode()
    if output is None or (output.repo, output.revision) == (repo_id, revision):
        return ours
    named = replace(record, output=replace(output, repo=repo_id, revision=revision))
    try:
        if ours:
            write_card(named, folder)
        named.write(folder)
    except (OSError, ValueError) as error:
        raise OutputError(f"'{folder.name}' cannot be written: {error}", "push a copy of the folder") from error
    return ours
