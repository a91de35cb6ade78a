"""What a Dockerfile says of each of its targets, read as an engine would; only what these tests need."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


@dataclass(frozen=True)
class Stage:
    """One stage, with what it takes over from the stage it begins with.

    Attributes:
        base: the image that everything begins with.
        lineage: names of the stages, from the first to this one.
        copies: (source stage or "" for the build context, sources, target).
        runs: shell commands of RUN, in order, of this stage and those before it.
        folders: made by ``install -d`` for the image's user.
    """

    name: str
    base: str
    lineage: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()
    stop_signal: str = ""
    ports: tuple[int, ...] = ()
    copies: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        made = [words.split() for run in self.runs for words in re.findall(r"install -d (.*)", run)]
        return tuple(word for words in made for word in words if word.startswith("/"))


def stages(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """Every named stage of the file."""
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for keyword, rest in _instructions(path.read_text()):
        if keyword == "FROM":
            base, _, name = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], rest).partition(" AS ")
            parent = found.get(base)
            stage = (
                replace(parent, name=name, lineage=(*parent.lineage, name)) if parent else Stage(name, base, (name,))
            )
        elif keyword == "ARG" and stage is None:
            name, _, arguments[name] = rest.partition("=")
        else:
            assert stage is not None, keyword
            stage = _after(stage, keyword, rest)
        if stage is not None:
            found[stage.name] = stage
    return found


def _after(stage: Stage, keyword: str, rest: str) -> Stage:
    match keyword:
        case "ENV":
            return replace(stage, env=stage.env | dict(word.split("=", 1) for word in shlex.split(rest)))
        case "USER":
            return replace(stage, user=rest)
        case "WORKDIR":
            return replace(stage, workdir=rest)
        case "ENTRYPOINT":
            return replace(stage, entrypoint=tuple(json.loads(rest)), command=())
        case "CMD":
            return replace(stage, command=tuple(json.loads(rest)))
        case "HEALTHCHECK":
            return replace(stage, healthcheck=tuple(json.loads(rest.partition("CMD")[2])))
        case "STOPSIGNAL":
            return replace(stage, stop_signal=rest)
        case "EXPOSE":
            return replace(stage, ports=tuple(map(int, rest.split())))
        case "COPY":
            *sources, target = rest.split()
            origin = sources.pop(0).removeprefix("--from=") if sources[0].startswith("--from=") else ""
            return replace(stage, copies=(*stage.copies, (origin, tuple(sources), target)))
        case "RUN":
            return replace(stage, runs=(*stage.runs, rest))
        case "VOLUME":
            return stage
    raise AssertionError(f"{keyword} is not understood here")


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [
        (keyword, rest.strip()) for keyword, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]
