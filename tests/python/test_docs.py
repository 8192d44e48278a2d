"""What README and docs show works as it stands there.

A ```console block with `<!-- run -->` on the line above it is run, line by line, in a folder that holds the same
files as the repository. `$ ` starts a command, `> ` goes on with it, the other lines are what it must print: each
must be found in the output, in order, and `...` stands for anything. `<!-- run: exit 1 -->` expects another exit code
of the last command.

`<!-- run: server -->` marks a block whose command serves: it is started on free ports, and the blocks below it in the
same document talk to it. `make serve` stands for the server over the example models, which every document starts
with. Ports 8000, 8001 and 8002 of the commands become those of the server.
"""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from server import ROOT, Server, binary, free_ports

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"])
MARK = re.compile(r"^<!-- run(?:: (?P<how>server|exit (?P<code>\d+)))? -->$")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# Flags of other programs in the documents.
FOREIGN = {
    "cargo": {"--package", "--check"},
    "our own programs": {"--list", "--server", "--url"},
    "docker": {"--ipc"},
    "nobody": {"--flag"},
}


@dataclass
class Block:
    """A marked block: its commands, each with the lines that it must print."""

    line: int
    serves: bool
    code: int
    commands: list[tuple[str, list[str]]] = field(default_factory=list)


def blocks(document: Path) -> list[Block]:
    found = []
    lines = document.read_text().splitlines()
    for number, line in enumerate(lines):
        if not (mark := MARK.match(line)):
            continue
        assert lines[number + 1] == "```console", f"{document}:{number + 2}: a mark stands right above a console block"
        block = Block(number + 2, mark["how"] == "server", int(mark["code"] or 0))
        for shown in lines[number + 2 : lines.index("```", number + 2)]:
            if shown.startswith("$ "):
                block.commands.append((shown[2:], []))
            elif shown.startswith("> ") and block.commands:
                command, output = block.commands.pop()
                block.commands.append((f"{command}\n{shown[2:]}", output))
            elif shown.strip():
                assert block.commands, f"{document}:{number + 2}: a block starts with a command"
                block.commands[-1][1].append(shown)
        assert block.commands, f"{document}:{number + 2}: the block has no command"
        found.append(block)
    return found


class Desk:
    """The folder and the environment in which a document's commands run."""

    def __init__(self, folder: Path, ports: tuple[int, int, int]) -> None:
        self.folder = folder / "repository"
        self.folder.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in {"target", ".git"}:
                (self.folder / entry.name).symlink_to(entry)
        programs = folder / "bin"
        programs.mkdir()
        self.programs = programs
        self.environment = dict(os.environ, PATH=f"{programs}:{os.environ['PATH']}", NO_COLOR="1")
        library = ROOT / ".trireme" / "onnxruntime" / "libonnxruntime.so"
        if library.exists():
            self.environment.setdefault("TRIREME_ONNXRUNTIME", str(library))
        (self.folder / "target" / "release").mkdir(parents=True)
        (self.folder / "target" / "release" / "trireme").symlink_to(programs / "trireme")
        self.server = None
        self.use(ports)

    def use(self, ports: tuple[int, int, int]) -> None:
        """Points the commands at the server on these ports."""
        self.ports = ports
        # The client's default address is port 8000, which only people have.
        script = self.programs / "trireme"
        script.write_text(
            f'#!/bin/sh\ncase "$1 $*" in\n"infer "*--url*) ;;\n"infer "*) shift; set -- infer '
            f'--url http://127.0.0.1:{ports[0]} "$@" ;;\nesac\nexec {shlex.quote(str(binary()))} "$@"\n'
        )
        script.chmod(0o755)

    def localised(self, command: str) -> str:
        for name, port in zip(("8000", "8001", "8002"), self.ports):
            command = re.sub(rf"(?<=localhost:){name}\b|(?<=127\.0\.0\.1:){name}\b", str(port), command)
        return command

    def run(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.localised(command)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout

    def serve(self, command: str) -> None:
        """Starts a server with the command's arguments."""
        self.stop()
        words = shlex.split(command)
        assert words[:2] == ["trireme", "serve"], f"expected `trireme serve ...`, got {command!r}"
        arguments = [word for word in words[2:] if not re.match(r"--(http|grpc|metrics)-port", word)]
        self.server = Server(*arguments, popen={"cwd": self.folder})
        self.use((self.server.http_port, self.server.grpc_port, self.server.metrics_port))

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None


def missing(expected: list[str], output: str) -> str | None:
    """The first line that is not in the output at its turn."""
    printed = iter(output.splitlines())
    for line in expected:
        if line.strip() == "...":
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.strip().split("...")))
        if not any(pattern.fullmatch(got.strip()) for got in printed):
            return line
    return None


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if blocks(document)],
    ids=lambda path: path.name if path.parent == ROOT else f"{path.parent.name}/{path.name}",
)
def test_what_is_shown_works(document: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    marked = blocks(document)
    shared: Server = request.getfixturevalue("examples")
    ports = (shared.http_port, shared.grpc_port, shared.metrics_port)
    desk = Desk(tmp_path, ports)
    try:
        for block in marked:
            for number, (command, expected) in enumerate(block.commands, 1):
                place = f"{document.relative_to(ROOT)}:{block.line}: {command}"
                if block.serves and command == "make serve":
                    desk.stop()
                    desk.use(ports)
                elif block.serves:
                    desk.serve(command)
                    line = missing(expected, desk.server.log())
                    assert line is None, f"{place}\ndid not log {line!r}:\n{desk.server.log()}"
                else:
                    code, output = desk.run(command)
                    wanted = block.code if number == len(block.commands) else 0
                    assert code == wanted, f"{place}\nended with {code}, expected {wanted}:\n{output}"
                    line = missing(expected, output)
                    assert line is None, f"{place}\ndid not print {line!r}:\n{output}"
    finally:
        desk.stop()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    for link in LINK.finditer(text):
        target = link["target"].split("#")[0]
        if target and "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"


def test_flags_that_are_named_exist() -> None:
    """Every flag in the documents is one of a command's help."""
    commands = ["", "serve", "check", "config show", "config convert", "infer"]
    helps = [
        subprocess.run([binary(), *command.split(), "--help"], capture_output=True, text=True, check=True).stdout
        for command in commands
    ]
    known = {flag for text in helps for flag in FLAG.findall(text)} | set().union(*FOREIGN.values())
    # Another spelling, which help does not list.
    known |= {"--model-store"}
    for document in DOCUMENTS:
        unknown = sorted(set(FLAG.findall(document.read_text())) - known)
        assert not unknown, f"{document.name} names flags that no command has: {', '.join(unknown)}"


def test_flags_that_are_refused_are_listed() -> None:
    """docs/command-line.md lists the flags whose help says that they are not available yet."""
    text = subprocess.run([binary(), "serve", "--help"], capture_output=True, text=True, check=True).stdout
    entries = re.split(r"\n {2,}(?=--)", text)
    refused = {FLAG.search(entry).group() for entry in entries if "Not available yet:" in " ".join(entry.split())}
    page = (ROOT / "docs" / "command-line.md").read_text()
    listed = page.split("<!-- refused -->")[1].split("<!-- end -->")[0]
    # Two flags are refused for some of their values only.
    partly = {"--model-control-mode", "--model-repository"}
    assert set(FLAG.findall(listed)) - partly == refused


def test_free_ports_are_free() -> None:
    """The runner's own tools: three ports, and text that stands for anything."""
    assert len(set(free_ports(3))) == 3
    assert missing(["a", "b ... d", "..."], "a\nx\nb c d\n") is None
    assert missing(["b", "a"], "a\nb\n") == "a"
