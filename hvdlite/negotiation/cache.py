"""Responses that all ranks know by number, so that a repeated tensor costs four bytes. Pure.

Every rank of a set holds one, and changes it only by what a Verdict says; so they
are equal everywhere, except that each rank keeps its own Request per id.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdlite.messages import Request, Response


class _Known(NamedTuple):
    response: Response
    request: Request


class ResponseCache:
    """One rank's mirror: id -> Response, and the Request of this rank that led to it."""

    def __init__(self) -> None:
        self._by_id: dict[int, _Known] = {}
        self._id_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def lookup(self, request: Request) -> int | None:
        """Return the id under which exactly this request was answered before, or None."""
        cache_id = self._id_of.get(request.name)
        if cache_id is None or self._by_id[cache_id].request != request:
            return None
        return cache_id

    def response(self, cache_id: int) -> Response:
        return self._by_id[cache_id].response

    def request(self, cache_id: int) -> Request:
        """Return what this rank asked for when it got that answer."""
        return self._by_id[cache_id].request

    def insert(self, cache_id: int, response: Response, request: Request) -> None:
        """Remember an answer. An older id of the same name is forgotten."""
        old = self._id_of.get(response.name)
        if old is not None:
            del self._by_id[old]
        self._by_id[cache_id] = _Known(response, request)
        self._id_of[response.name] = cache_id

    def evict(self, cache_id: int) -> str | None:
        """Forget an id, and return its name if it was known."""
        known = self._by_id.pop(cache_id, None)
        if known is None:
            return None
        del self._id_of[known.response.name]
        return known.response.name
