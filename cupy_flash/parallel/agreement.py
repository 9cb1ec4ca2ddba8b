"""Check that all processes of a group make the same call, before its first message.

Otherwise one process would silently read the bytes of another with the wrong dtype, shape or options, or the
communication library would abort because a message is longer than expected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import InvalidArgumentsError

__all__ = ["Agreement"]


class Agreement:
    """The comparison of one call: 32-byte headers, and full texts only if headers differ.

    Parameters
    ----------
    gather : callable, optional
        All-gather of bytes, of equal length in all processes, in the order of ranks. Default: nothing is
        compared.
    moment : mapping of str to object
        What distinguishes calls with the same arguments, such as a call number.
    known : set of bytes, optional
        Digests of arguments that all processes agreed on, which are not compared again. Default: every call
        is compared.
    """

    def __init__(
        self,
        gather: Callable[[bytes], list[bytes]] | None = None,
        moment: Mapping[str, Any] | None = None,
        known: set[bytes] | None = None,
    ) -> None:
        self._gather, self._moment, self._known = gather, moment or {}, known

    def reach(self, terms: Mapping[str, Any]) -> None:
        """Compare the arguments of a call, by name, with those of the other processes; refuse differences."""
        everyone = self._compare(terms)
        if everyone is not None:
            raise _difference(everyone)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """On an exception inside, tell the other processes that this one refuses its call.

        why only where every call is compared: otherwise the others may not compare, and would never answer.
        """
        try:
            yield
        except Exception as error:
            if self._known is None:
                with suppress(Exception):  # why: the first exception is being raised
                    self._compare({"refused": str(error).partition("\n")[0] or type(error).__name__})
            raise

    def _compare(self, terms: Mapping[str, Any]) -> list[dict[str, str]] | None:
        """The terms of every process, or None if they are equal."""
        if self._gather is None:
            return None
        # why without the seed: each training step has a new one, and would wait for the other processes.
        signature = _digest(_text({name: x for name, x in terms.items() if name != "seed"}))
        if self._known is not None and signature in self._known:
            return None
        text = _text({**terms, **self._moment})
        header = _digest(text) + len(text).to_bytes(4, "little")
        headers = self._gather(header)
        if all(other == header for other in headers):
            if self._known is not None:
                self._known.add(signature)
            return None
        longest = max(int.from_bytes(other[-4:], "little") for other in headers)
        return [json.loads(other) for other in self._gather(text.ljust(longest))]


def _text(terms: Mapping[str, Any]) -> bytes:
    return json.dumps({name: str(value) for name, value in terms.items()}).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=28).digest()


def _difference(everyone: list[dict[str, str]]) -> InvalidArgumentsError:
    """The error that names the differences and their processes."""
    refusals = [(f"process {rank}", x["refused"]) for rank, x in enumerate(everyone) if "refused" in x]
    if refusals:
        return InvalidArgumentsError(
            "other processes of the group refuse their call.",
            reasons=refusals,
            hint="arguments that every process takes",
        )
    table = []
    for name in dict.fromkeys(name for x in everyone for name in x):
        ranks: dict[str, list[str]] = {}
        for rank, x in enumerate(everyone):
            ranks.setdefault(x.get(name, "none"), []).append(str(rank))
        if len(ranks) > 1:
            table += [(name, _short(value), f"process {', '.join(who)}") for value, who in ranks.items()]
    names = ", ".join(dict.fromkeys(name for name, _, _ in table))
    return InvalidArgumentsError(
        f"the processes of the group make different calls: {names}.",
        table,
        hint="the same arguments and the same order of calls in every process",
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
