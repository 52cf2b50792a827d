"""Tells of compilations that should not be: what a loop calls compiles at its first call and never after."""

import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")

_COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event for every program that is compiled or, for its want in the process, read from the compilation cache."""


class CompilationWatch:
    """Calls functions, and warns with a line where one compiles again: which program, how long, and what had changed.

    The first call of each function is expected to compile. It costs a dictionary look-up a call where nothing compiles.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Warn through `warn`."""
        self._warn = warn
        self._signatures: dict[str, Mapping[str, str]] = {}
        self._warned: set[str] = set()
        self._compiled: list[_Compilation] = []
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __call__(self, function: Callable[..., Result], *args: Any, when: str = "", **kwargs: Any) -> Result:
        """What `function` returns; `when` is said in a warning."""
        name = function.__name__
        self._compiled.clear()
        self._thread = threading.get_ident()
        try:
            result = function(*args, **kwargs)
        finally:
            self._thread = None
        if self._compiled or name not in self._signatures:
            # Arrays that were donated to the call still know their shape, type and place.
            bound = inspect.signature(function).bind(*args, **kwargs)
            self._judge(name, _signature(bound.arguments), when)
        return result

    def _judge(self, name: str, signature: Mapping[str, str], when: str) -> None:
        before = self._signatures.get(name)
        self._signatures[name] = signature
        if before is None:
            return
        longest = max(self._compiled, key=lambda compilation: compilation.seconds)
        others = f" and {len(self._compiled) - 1} more" if len(self._compiled) > 1 else ""
        line = f"{longest.program}{others} of {name} compiled again{when}: {_difference(before, signature)}."
        if line not in self._warned:
            self._warned.add(line)
            self._warn(f"Warning: {line} It took {sum(c.seconds for c in self._compiled):.1f} s.")

    def _listen(self, event: str, duration_secs: float, **details: Any) -> None:
        # Other threads, that of checkpoints for instance, compile on their own account.
        if event == _COMPILED and self._thread == threading.get_ident():
            self._compiled.append(_Compilation(str(details.get("fun_name", "a program")), duration_secs))


@dataclasses.dataclass(frozen=True)
class _Compilation:
    program: str
    seconds: float


def _signature(arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """What a compilation depends on in a function's arguments, by the path of each leaf."""
    return {
        ".".join(filter(None, (name, jax.tree_util.keystr(path, simple=True, separator=".")))): _describe(leaf)
        for name, argument in arguments.items()
        for path, leaf in jax.tree.leaves_with_path(argument)
    }


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return repr(leaf)
    weak = " (weak type)" if getattr(leaf, "weak_type", False) else ""
    place = f" on {leaf.sharding}" if leaf.committed else ""
    return f"{leaf.dtype}{list(leaf.shape)}{weak}{place}"


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    paths = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    if not paths:
        return "its arguments are as before, so something else that it depends on has changed"
    more = f", and {len(paths) - 1} more changed" if len(paths) > 1 else ""
    return f"{paths[0]} was {before.get(paths[0], 'absent')} and is {now.get(paths[0], 'absent')}{more}"
