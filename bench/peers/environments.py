"""The environments that others' programs run in, below `.peers/`: made once, with pinned versions, by pip and npm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.processes import HOUSE

FOLDER = HOUSE / "bench" / ".peers"
INSTALL_S = 600


class Missing(Exception):
    """This environment cannot be had here; the text says why."""


@dataclass(frozen=True)
class Environment:
    """*packages* for Python, of *python* at least, or for Node (*node*); *programs* must be on the machine already."""

    name: str
    packages: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)
    node: bool = False
    programs: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def bin(self) -> Path:
        """Where its programs are."""
        return self.folder / ("node_modules/.bin" if self.node else "bin")

    @property
    def version(self) -> str:
        """Of what is measured, which is the first package."""
        return self.packages[0].rpartition("=" if not self.node else "@")[2]

    def made(self) -> None:
        """Have it ready, made new when its packages are other ones than those. Raises Missing."""
        for program in self.programs:
            if shutil.which(program) is None:
                raise Missing(f"{program} is not installed")
        pins = self.folder / "pins"
        if pins.exists() and pins.read_text().split() == list(self.packages):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.node:
            _done(["npm", "install", "--silent", "--prefix", str(self.folder), *self.packages])
        else:
            _done([_interpreter(self.python), "-m", "venv", str(self.folder)])
            pip = [str(self.bin / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            _done([*pip, "install", *self.packages])
        pins.write_text("\n".join(self.packages) + "\n")


def _interpreter(least: tuple[int, int]) -> str:
    """A Python of at least that version. Raises Missing."""
    able = f"import sys; sys.exit(sys.version_info[:2] < {least})"
    for python in _interpreters():
        if shutil.which(python) and subprocess.run([python, "-c", able], capture_output=True).returncode == 0:
            return python
    raise Missing(f"no Python {least[0]}.{least[1]} was found")


def _interpreters() -> Iterator[str]:
    yield sys.executable
    yield from ("python3.12", "python3.13")
    yield from map(str, sorted(Path.home().glob(".pyenv/versions/3.1[23].*/bin/python")))


def _done(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{command[0]}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise Missing(f"{Path(command[0]).name} failed: {said[-1]}")


def make(environments: list[Environment], tell: Callable[[str], None]) -> dict[str, str]:
    """Make each of them; why not, for those that cannot be had."""
    missing = {}
    for name, environment in {environment.name: environment for environment in environments}.items():
        tell(name)
        try:
            environment.made()
        except Missing as reason:
            missing[name] = str(reason)
    return missing
