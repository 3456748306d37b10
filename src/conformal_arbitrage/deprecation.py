"""Deprecation: what is to go still works, says what to use instead, and names the release that removes it.

Knows nothing of what is deprecated: functions and keywords are marked where they are defined. Options of the command
line are marked with click's own `deprecated`.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecation:
    """One thing that is to go.

    Attributes:
        name: what is deprecated, as a user writes it.
        instead: what to use instead.
        since: the release that deprecated it.
        until: the release that removes it.
    """

    name: str
    instead: str
    since: str
    until: str

    def __str__(self) -> str:
        return f"{self.name} is deprecated since {self.since}, and removed in {self.until}; use {self.instead} instead"

    def overdue(self, version: str) -> bool:
        """Tell whether a version should not have it any more."""
        return _numbers(version) >= _numbers(self.until)


DEPRECATIONS: list[Deprecation] = []
"""Everything that is marked, so that a test can find what a release should have removed."""


def deprecated(*, instead: str, since: str, until: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function that is to go: it warns its caller, and does its work.

    Args:
        instead: what to use instead.
        since: the release that deprecates it.
        until: the release that removes it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        notice = _noted(Deprecation(name=f"{function.__qualname__}()", instead=instead, since=since, until=until))

        @functools.wraps(function)
        def warning(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(str(notice), DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warning

    return decorate


def renamed_keyword(old: str, new: str, *, since: str, until: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose keyword has a new name: the old one warns, and means the new one.

    Args:
        old: the keyword's former name.
        new: its name from now on.
        since: the release that renames it.
        until: the release that no longer knows the former name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = f"{function.__qualname__}({old}=...)"
        notice = _noted(Deprecation(name=name, instead=f"{new}=...", since=since, until=until))

        @functools.wraps(function)
        def renaming(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(
                        f"{function.__qualname__}() got {old} and {new}, which are one keyword; leave out {old}"
                    )
                warnings.warn(str(notice), DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renaming

    return decorate


def _noted(notice: Deprecation) -> Deprecation:
    DEPRECATIONS.append(notice)
    return notice


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])
