"""The routes that write: repositories, settings, LFS objects, commits, branches, tags, discussions."""

from __future__ import annotations

import base64
import fnmatch
import json
import uuid
from typing import Any, cast

from .blobs import Blob, File, is_lfs
from .card import judge
from .hub import Ticket
from .routes import PREFIXES, need_user, of_repo, open_repo, plain
from .server import Answer, Call
from .store import Gated, Refusal, Repo, Type
from .xet import take_over


def page_url(call: Call, repo_id: str, type: Type) -> str:
    """The address of a repository's page."""
    return f"{call.hub.url}/{PREFIXES[type]}{repo_id}"


def _named(call: Call) -> tuple[str, Type]:
    asked = call.json()
    owner = asked.get("organization") or need_user(call)
    return f"{owner}/{asked['name']}", cast(Type, asked.get("type") or "model")


# -- repositories


@plain("POST", "api/repos/create")
def create(call: Call) -> Answer:
    """A new repository in a namespace of the user's; 409 with the same body when it exists."""
    user = need_user(call)
    repo_id, type = _named(call)
    namespace = repo_id.split("/")[0]
    if not call.hub.owns(user, namespace):
        raise Refusal(403, f'You don\'t have the rights to create a {type} under the namespace "{namespace}".')
    found = {"url": page_url(call, repo_id, type), "name": repo_id, "id": repo_id}
    asked = call.json()
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    try:
        call.hub.create(repo_id, type, private)
    except Refusal as refusal:
        raise Refusal(refusal.status, refusal.message, body=found) from None
    return Answer.json(found)


def _own(call: Call, repo_id: str, type: Type) -> Repo:
    user = need_user(call)
    repo = open_repo(call, type, repo_id)
    if not call.hub.owns(user, repo.namespace):
        raise Refusal(403, "You don't have the rights to change this repository")
    return repo


@plain("DELETE", "api/repos/delete")
def delete(call: Call) -> Answer:
    """Removes a repository."""
    need_user(call)
    repo = _own(call, *_named(call))
    call.hub.delete(repo.id, repo.type)
    return Answer.json({})


@plain("POST", "api/repos/move")
def move(call: Call) -> Answer:
    """Renames a repository."""
    asked = call.json()
    repo = _own(call, asked["fromRepo"], asked.get("type") or "model")
    if not call.hub.owns(call.user, asked["toRepo"].split("/")[0]):
        raise Refusal(403, f"You don't have the rights to move a repository to {asked['toRepo']}")
    call.hub.move(repo.id, asked["toRepo"], repo.type)
    return Answer.json({"url": page_url(call, repo.id, repo.type)})


@of_repo("PUT", "settings", "write")
def settings(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Makes a repository private or public, gated or open."""
    asked = call.json()
    if "visibility" in asked or "private" in asked:
        repo.private = asked.get("visibility") == "private" or bool(asked.get("private"))
    if "gated" in asked:
        repo.gated = cast(Gated, asked["gated"])
    return Answer.json({"private": repo.private, "gated": repo.gated})


@plain("POST", "api/validate-yaml")
def validate_yaml(call: Call) -> Answer:
    """What is wrong with a README's metadata; asked with and without a token."""
    asked = call.json()
    errors, warnings = judge(asked.get("content", ""), asked.get("repoType") or "model")
    found = {
        "errors": [{"message": message} for message in errors],
        "warnings": [{"message": message} for message in warnings],
    }
    return Answer.json(found, 400 if errors else 200)


# -- LFS objects


@of_repo("POST", "preupload", "propose")
def preupload(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """How each file is to be sent, and what is there already."""
    asked = call.json()
    present = repo.at(arguments[0]).files
    ignored = [line.strip() for line in asked.get("gitIgnore", "").splitlines()]
    answers = []
    for file in asked["files"]:
        path = file["path"]
        mode = "lfs" if is_lfs(path, file["size"]) else "regular"
        answer: dict[str, Any] = {"path": path, "uploadMode": mode, "shouldIgnore": _ignores(ignored, path)}
        if path in present:
            answer["oid"] = present[path].etag
        answers.append(answer)
    return Answer.json({"files": answers})


def _ignores(patterns: list[str], path: str) -> bool:
    pieces = path.split("/")
    names = [*pieces, *("/".join(pieces[:size]) for size in range(2, len(pieces) + 1))]
    wanted = [pattern.strip("/") for pattern in patterns if pattern and not pattern.startswith("#")]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted for name in names)


@of_repo("POST", "lfs-batch", "propose")
def lfs_batch(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Where to put each object that the repository does not have."""
    objects = []
    for asked in call.json()["objects"]:
        answer: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in repo.objects:
            ticket = uuid.uuid4().hex
            call.hub.tickets[ticket] = Ticket(repo, asked["oid"], asked["size"])
            upload, verify = (f"{call.hub.url}/lfs-{verb}/{ticket}" for verb in ("upload", "verify"))
            answer["actions"] = {"upload": {"href": upload, "header": {}}, "verify": {"href": verify}}
        objects.append(answer)
    return Answer.json({"transfer": "basic", "objects": objects})


def _ticket(call: Call) -> Ticket:
    ticket = call.hub.tickets.get(call.parts[1])
    if ticket is None:
        raise Refusal(403, "The upload address is not valid")
    return ticket


@plain("PUT", "lfs-upload/")
def lfs_upload(call: Call) -> Answer:
    """Stores one object, if it is the one that was announced."""
    ticket = _ticket(call)
    if call.body.size != ticket.size or call.body.sha256 != ticket.oid:
        raise Refusal(400, f"The object is not the announced {ticket.oid} of {ticket.size} bytes")
    ticket.repo.objects[ticket.oid] = call.body
    return Answer(headers={"ETag": f'"{ticket.oid}"'})


@plain("POST", "lfs-verify/")
def lfs_verify(call: Call) -> Answer:
    """Whether the object arrived."""
    ticket = _ticket(call)
    if ticket.oid not in ticket.repo.objects:
        raise Refusal(404, f"Object {ticket.oid} was not uploaded")
    return Answer.json({})


# -- commits


@of_repo("POST", "commit", "propose")
def commit(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """A commit on a branch or a pull request, or on a new pull request."""
    header: dict[str, Any] = {}
    files: dict[str, File] = {}
    gone: list[str] = []
    revision = arguments[0]
    entries = [json.loads(line) for line in call.body.read().splitlines() if line.strip()]
    take_over(call.hub, repo, [entry["value"]["oid"] for entry in entries if entry["key"] == "lfsFile"])
    for entry in entries:
        _read_line(repo, revision, entry["key"], entry["value"], header, files, gone)
    if not header.get("summary"):
        raise Refusal(400, "The commit has no summary")
    if "README.md" in files and (
        errors := judge(files["README.md"].blob.read().decode(errors="replace"), repo.type)[0]
    ):
        raise Refusal(400, "Invalid metadata in README.md: " + "; ".join(errors))
    user = need_user(call)
    url = page_url(call, repo.id, repo.type)
    found: dict[str, Any] = {}
    with repo.lock:
        if call.flag("create_pr"):
            if header.get("parentCommit") and not repo.head(revision).startswith(header["parentCommit"]):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            num = repo.discuss(header["summary"], user, header.get("description") or "", pull_request=True)
            revision = f"refs/pr/{num}"
            found["pullRequestUrl"] = f"{url}/discussions/{num}"
        made = repo.apply(
            revision, files, gone, header["summary"], header.get("description") or "", user, header.get("parentCommit")
        )
    found |= {"success": True, "commitOid": made.sha, "commitUrl": f"{url}/commit/{made.sha}", "hookOutput": ""}
    return Answer.json(found)


def _read_line(
    repo: Repo,
    revision: str,
    key: str,
    value: dict[str, Any],
    header: dict[str, Any],
    files: dict[str, File],
    gone: list[str],
) -> None:
    if key == "header":
        header.update(value)
        return
    path: str = value["path"]
    if path.startswith("/") or any(piece in ("", ".", "..", ".git") for piece in path.strip("/").split("/")):
        raise Refusal(400, f"Invalid path: {path}")
    if key == "file":
        raw = value["content"]
        content = base64.b64decode(raw) if value.get("encoding", "base64") == "base64" else raw.encode()
        files[path] = File(Blob(content), lfs=False)
    elif key == "lfsFile":
        if value["oid"] not in repo.objects:
            raise Refusal(400, f"LFS object {value['oid']} of {path} was not uploaded")
        files[path] = File(repo.objects[value["oid"]], lfs=True)
    elif key == "deletedFile":
        repo.file(path, revision)
        gone.append(path)
    elif key == "deletedFolder":
        gone.append(path.strip("/"))
    else:
        raise Refusal(400, f"Unknown line in the commit: {key}")


# -- branches, tags, discussions


@of_repo("POST", "branch", "write")
def create_branch(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Starts a branch at main or at a given revision."""
    repo.branch(arguments[0], call.json().get("startingPoint") or "main")
    return Answer()


@of_repo("DELETE", "branch", "write")
def delete_branch(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Removes a branch, though never main."""
    if arguments[0] == "main":
        raise Refusal(403, "Cannot delete the main branch")
    if repo.branches.pop(arguments[0], None) is None:
        raise Refusal(404, f"Invalid rev id: {arguments[0]}", "RevisionNotFound")
    return Answer()


@of_repo("POST", "tag", "write")
def create_tag(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Tags a revision."""
    repo.tag(call.json()["tag"], arguments[0])
    return Answer()


@of_repo("DELETE", "tag", "write")
def delete_tag(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Removes a tag."""
    if repo.tags.pop(arguments[0], None) is None:
        raise Refusal(404, f"Invalid rev id: {arguments[0]}", "RevisionNotFound")
    return Answer()


@of_repo("POST", "discussions", "see")
def create_discussion(call: Call, repo: Repo, arguments: list[str]) -> Answer:
    """Opens a discussion, or a pull request as a draft; every user may."""
    user = need_user(call, "RepoNotFound")
    asked = call.json()
    pull = bool(asked.get("pullRequest"))
    status = "draft" if pull else "open"
    num = repo.discuss(asked["title"], user, asked.get("description") or "", pull, status)
    return Answer.json({"num": num, "url": f"{page_url(call, repo.id, repo.type)}/discussions/{num}"})
