"""Says which patches of which series apply to a llama.cpp tree, and chooses the series for it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .build import require_checkout
from .errors import BuildError
from .fetch import pin_directories, pin_directory
from .series import Series, git_apply, read_series, touched

EXACT, LOOSE, UPSTREAM, NO = "exact", "-C1", "upstream", "no"
_MEANINGS = f"""\
  {EXACT}: applies; {LOOSE}: only with one line of context on each side, which may put a hook into
  another function; {UPSTREAM}: the source contains the change; {NO}: does not apply"""


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of applying a series to one tree.

    Attributes:
        words: For each patch tried: exact, -C1, upstream or no.
        where: Files and lines of the patch that failed, "" when none did.
    """

    words: tuple[str, ...]
    where: str = ""

    @property
    def applies(self) -> bool:
        """Whether every patch applied, exactly or not, or is part of the tree."""
        return NO not in self.words

    @property
    def builds(self) -> bool:
        """Whether every patch applied exactly or is part of the tree: a build accepts that."""
        return set(self.words) <= {EXACT, UPSTREAM}


def try_series(series: Series, source: Path, overlay: Path, git: str) -> Tried:
    """Apply `series` to copies of the files that it changes, in the empty directory `overlay`.

    Stops at the first patch that does not apply, not even with less context. `source` is only read.
    """
    words: list[str] = []
    for patch in series.patches:
        for name in touched(patch, overlay, git):
            if (source / name).is_file() and not (overlay / name).exists():
                (overlay / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, overlay / name)
        if git_apply(git, overlay, str(patch)).returncode == 0:
            words.append(EXACT)
            continue
        done = git_apply(git, overlay, "-C1", str(patch))
        if done.returncode == 0:
            words.append(LOOSE)
        elif git_apply(git, overlay, "-C1", "--reverse", "--check", str(patch)).returncode == 0:
            words.append(UPSTREAM)
        else:
            failed = re.findall(r"patch failed: (\S+)", done.stderr)
            missing = re.findall(r"error: (\S+): No such file", done.stderr)
            where = ", ".join([*failed, *missing]) or done.stderr.strip()
            return Tried((*words, NO), where)
    return Tried(tuple(words))


def choose_series(
    source: Path, patches: Path, pin: str, git: str, say: Callable[[str], None]
) -> Path:
    """Return the directory of the series to build the checkout `source` with.

    `patches` is the directory of the patches; `pin` names the only series to try, "" tries all, the
    default first. Reports with `say` what applies. Raises BuildError, with what to do next, when no
    series applies exactly.
    """
    require_checkout(source)
    directories = {pin: pin_directory(patches, pin)} if pin else pin_directories(patches)
    results = {}
    for name, directory in directories.items():
        with tempfile.TemporaryDirectory(prefix="evoke-applies-") as scratch:
            results[name] = try_series(read_series(directory), source, Path(scratch), git)
    report = "\n".join(_line(name, result, directories) for name, result in results.items())
    say(f"patches that apply to {source}:\n{report}\n{_MEANINGS}")
    for name, result in results.items():
        if result.builds:
            say(f"building with the series for {name}")
            return directories[name]
    raise BuildError(_advice(source, results))


def _line(name: str, result: Tried, directories: Mapping[str, Path]) -> str:
    numbers = [patch.name[:4] for patch in read_series(directories[name]).patches]
    words = [f"{number} {word}" for number, word in zip(numbers, result.words, strict=False)]
    untried = numbers[len(words) :]
    words += [f"{', '.join(untried)} not tried"] if untried else []
    where = f" (at {result.where})" if result.where else ""
    return f"  series for {name}: {', '.join(words)}{where}"


def _advice(source: Path, results: Mapping[str, Tried]) -> str:
    loose = [name for name, result in results.items() if result.applies]
    first = (
        f"The series for {loose[0]} needs new context lines only: refresh it for this version"
        if loose
        else "Refresh a series for this version"
    )
    return (
        f"no series applies exactly to {source}. What you can do:\n"
        f"  * Check out a version between the pins ({', '.join(results)}), or use a pin: omit "
        f"--source.\n"
        f'  * {first}, as patches/README.md describes under "Refreshing the series".\n'
        f"  * Add --stock: evoke-proxy also works with a server without the patches, but then a "
        f"limited cache cannot be refilled."
    )
