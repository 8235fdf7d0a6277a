"""A file of a Hub repo as a stream, of which only the bytes that are read are downloaded."""

from __future__ import annotations

import io
import os

from hf_bico.errors import HubUnavailableError
from hf_bico.hub.client import HubRepo


class RemoteFile(io.RawIOBase):
    """A file of a repo, of which exactly what is read is asked for, by Range requests."""

    def __init__(self, repo: HubRepo, name: str) -> None:
        self._repo = repo
        self._name = name
        self._size = repo.files[name]
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

        repo, start = self._repo, self._place
        end = self._size if size < 0 else min(start + size, self._size)
        if end <= start:
            return b""
        address = hf_hub_url(repo.id, self._name, repo_type=repo.type, revision=repo.commit)
        headers = {
            **build_hf_headers(token=repo.hub.token, library_name="hf-bico"),
            "Range": f"bytes={start}-{end - 1}",
        }
        response = http_backoff("GET", address, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        hf_raise_for_status(response)
        content: bytes = response.content
        if len(content) != end - start:
            raise HubUnavailableError(
                f"'{repo.id}': {end - start} bytes of '{self._name}' were asked for and {len(content)} came",
                "try again in a while; an endpoint other than the Hub's own must serve Range requests",
            )
        self._place = end
        return content
