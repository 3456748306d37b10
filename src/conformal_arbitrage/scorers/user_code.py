"""Code that the user wrote: find it by MODULE:NAME, pin its source, run it, and translate whatever it raises.

Knows nothing of scorers or graders.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import dedent
from types import ModuleType, TracebackType
from typing import Any

from conformal_arbitrage.errors import ArbitrageError, ConfigError, ScorerError


@dataclass(frozen=True, slots=True)
class UserCode:
    """Translate the exceptions of a block that runs the user's code: `with UserCode(translate): function(query)`.

    A function, a grader or a plugin that we did not write may raise anything, so this takes every `Exception`, as only the
    boundary of the store's writer thread does too. Nothing is swallowed: `translate` returns the error to raise in its
    stead, with the original as its cause. A `ScorerError` passes unchanged, since it already says what went wrong, and so
    do KeyboardInterrupt, SystemExit and CancelledError, which are not `Exception`s.
    """

    translate: Callable[[Exception], ArbitrageError]

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ScorerError):
            raise self.translate(error) from error


def describe(error: Exception) -> str:
    """Return an exception's type and message on one line, cut to a readable length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}"


def source_identity(code: Any) -> dict[str, str]:
    """Return `source_sha256`, the digest of the source text of a function, or of the class of an object.

    Empty if it is not available: C functions, partials, lambdas of a shell. What the function calls is not part of
    its source, so a change there needs a new name.
    """
    whole: Any = inspect.unwrap(code) if callable(code) else code
    if isinstance(whole, partial):
        return {}
    try:
        source = inspect.getsource(whole if _has_definition(whole) else whole.__class__)
    except (OSError, TypeError):
        return {}
    return {"source_sha256": hashlib.sha256(dedent(source).encode()).hexdigest()}


def _has_definition(code: object) -> bool:
    return inspect.isroutine(code) or inspect.isclass(code)


def load_object(name: str, folder: str | Path = "") -> Any:
    """Return the Python object that MODULE:NAME refers to; modules may lie in `folder` or in the current folder.

    Raises:
        ConfigError: there is no such object, or its module fails on import.
    """
    module, _, attribute = name.removeprefix("python:").partition(":")

    def translate(error: Exception) -> ConfigError:
        return ConfigError(f"{name!r} cannot be loaded ({describe(error)}); write MODULE:NAME of a Python object")

    with UserCode(translate):
        return getattr(_import(module, [str(Path(folder).resolve()), str(Path.cwd())]), attribute)


def _import(module: str, folders: list[str]) -> ModuleType:
    """Import a module, looking into the folders first.

    The command line must find a `rules.py` beside arbitrage.toml, but a library must not change where the rest of the
    program finds its modules. So the folders are searched through sys.path only if the module's top-level package lies in
    one of them, and only while it is imported: its own imports of neighbouring files work, and afterwards sys.path is as
    before. Loading the file by its location alone would not do, since neighbours would not be found.
    """
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    top = module.partition(".")[0]
    if top in sys.modules or PathFinder.find_spec(top, folders) is None:
        return importlib.import_module(module)
    with _searched_first(folders):
        return importlib.import_module(module)


@contextmanager
def _searched_first(folders: list[str]) -> Generator[None]:
    before = sys.path[:]
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before
