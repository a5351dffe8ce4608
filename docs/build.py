"""Builds the site of the docs: ``python docs/build.py``, or ``make docs``.

The pages of docs/ are staged in build/pages, then zensical writes build/site. Staging does what a page cannot do:

- A link to a file outside of docs/ leads to a page with that file, so the site is complete without a repository.
- A mermaid diagram is a picture in two colors. No script is loaded from another host.
- Reference pages are generated: the Python API, the options of the commands, and the wire protocol.

A warning of zensical fails the build.
"""

import ast
import html
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

import mermaidx
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from fanin.commands.main import SUBCOMMANDS
from fanin.commands.main import main as run_fanin

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
PAGES: Final = ROOT / "build" / "pages"
SOURCES: Final = ("server", "clients", "edge", "datacenter", "protos")
FENCE: Final = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
MERMAID: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\(([^)\s:]+)\)")
THEMES: Final = {"light": "default", "dark": "dark"}
Comments = Mapping[tuple[int, ...], str]
"""The comments of a .proto file, by the path of what they describe."""
PACKAGES: Final = {
    "export": "fanin.edge.export",
    "simulation": "fanin.simulation",
    "clients": "fanin.clients",
    "datacenter": "fanin.datacenter",
}
"""The public packages: the page of each, and its name. A page has the names in ``__all__``."""
EXTENSIONS: Final = (
    "fanin.server.aggregation.rules.Rule",
    "fanin.server.aggregation.rules.ColumnRule",
    "fanin.server.aggregation.rules.DistanceRule",
    "fanin.server.aggregation.outer.OuterOptimizer",
    "fanin.edge.codecs.stage.Stage",
    "fanin.edge.codecs.stage.GroupStage",
    "fanin.edge.metrics.metric.Metric",
    "fanin.edge.runtimes.available.RuntimeRecord",
    "fanin.edge.runtimes.engine.GraphEngine",
    "fanin.datacenter.families.family.Family",
    "fanin.datacenter.observers.observer.TrainingObserver",
)
"""The Protocols and records that other packages implement."""


def stage() -> None:
    """Write build/pages: the pages of docs/ with their links and diagrams, and the generated ones."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for source in sorted(DOCS.rglob("*")):
        target = PAGES / source.relative_to(DOCS)
        if source.suffix == ".md":
            write(target, staged(source, target))
        elif source.parent.name == "assets":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    write(PAGES / "decisions/index.md", "".join(decisions()))
    for name, package in PACKAGES.items():
        names = sorted(importlib.import_module(package).__all__, key=str.lower)
        write(PAGES / f"reference/python/{name}.md", api(f"`{package}`", (defined(package, each) for each in names)))
    write(PAGES / "reference/python/extensions.md", api("Extension points", EXTENSIONS))
    write(PAGES / "reference/python/errors.md", api("Errors", ("fanin.protos.errors",)))
    write(PAGES / "reference/options.md", "".join(options()))
    write(PAGES / "reference/protos.md", "".join(protos()))


def write(path: Path, text: str) -> None:
    """Write a file of the staged pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def staged(source: Path, target: Path) -> str:
    """Return the text of a page with the links and diagrams of the site."""

    def link(match: re.Match[str]) -> str:
        name, _, anchor = match[1].partition("#")
        if not name:
            return match[0]
        page = os.path.relpath(place((source.parent / name).resolve()), target.parent)
        return f"]({page}{'#' + anchor if anchor else ''})"

    def diagram(match: re.Match[str]) -> str:
        pictures = []
        for color, theme in THEMES.items():
            name = f"{source.stem}-{match.start()}-{color}.svg"
            write(PAGES / "assets" / name, mermaidx.render(match[1], theme=theme).svg())
            address = os.path.relpath(PAGES / "assets" / name, target.parent)
            pictures.append(f"![Diagram]({address}#only-{color})")
        return '<div class="diagram" markdown>\n\n' + "\n".join(pictures) + "\n\n</div>"

    text = MERMAID.sub(diagram, source.read_text())
    parts = FENCE.split(text)
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))


def place(path: Path) -> Path:
    """Return the staged page of a file or folder; that of one outside of docs/ is written here."""
    if path.is_relative_to(DOCS):
        return PAGES / path.relative_to(DOCS)
    name = path.relative_to(ROOT)
    page = PAGES / "repository" / (name if name.suffix == ".md" else name.with_name(f"{name.name}.md"))
    if page.exists():
        return page
    if name.suffix == ".md":
        write(page, path.read_text())  # ends a cycle of links
        write(page, staged(path, page))
        return page
    tracked = subprocess.run(["git", "ls-files", name], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    parts = [f"# {name}\n"]
    for file in tracked.split():
        parts.append(f"\n## {file}\n" if path.is_dir() else "")
        parts.append(f"\n````{Path(file).suffix[1:]}\n{(ROOT / file).read_text()}````\n")
    write(page, "".join(parts))
    return page


def decisions() -> Iterator[str]:
    """Yield the lines of the list of decisions."""
    yield "# Decisions\n\n"
    for path in sorted((DOCS / "decisions").glob("*.md")):
        yield f"- [{path.read_text().partition(chr(10))[0].removeprefix('# ')}]({path.name})\n"


def defined(package: str, name: str) -> str:
    """Return the dotted name of the definition of a name that a package exports."""
    value = getattr(importlib.import_module(package), name)
    module = getattr(value, "__module__", "")
    if module.startswith("fanin.") and hasattr(sys.modules[module], name):
        return f"{module}.{name}"
    for root in SOURCES:
        for path in sorted((ROOT / root / package.replace(".", "/")).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                    return ".".join((*path.relative_to(ROOT / root).with_suffix("").parts, name))
    raise SystemExit(f"docs/build.py: {package}.{name}: no definition found; add a case to defined()")


def api(title: str, names: Iterator[str] | tuple[str, ...]) -> str:
    """Return a page of the Python API."""
    return f"# {title}\n" + "".join(f"\n::: {name}\n" for name in names)


def options() -> Iterator[str]:
    """Yield the help of every command."""
    yield "# Options of the commands\n\n[Commands](commands.md) says what each command does and needs.\n"
    os.environ["COLUMNS"] = "100"
    for name in SUBCOMMANDS:
        text = io.StringIO()
        with redirect_stdout(text):
            try:
                run_fanin([name, "--help"])
            except SystemExit as exc:
                assert not exc.code, f"fanin {name} --help: got status {exc.code}, expected 0"
        yield f"\n## fanin {name}\n\n```text\n{text.getvalue().strip()}\n```\n"


def protos() -> Iterator[str]:
    """Yield the services and messages of the wire protocol, with the comments of the .proto files."""
    with tempfile.TemporaryDirectory() as folder:
        out, include = Path(folder, "set"), ROOT / "protos"
        files = sorted(str(path.relative_to(include)) for path in include.rglob("*.proto"))
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{include}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", *files], check=True)
        descriptors = FileDescriptorSet.FromString(out.read_bytes())
    yield "# Wire protocol\n\nThe coordinator and its clients speak gRPC. The .proto files, with their comments:\n"
    for file in descriptors.file:
        comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
        yield f"\n## {file.name}\n"
        yield from services(file, comments)
        for index, message in enumerate(file.message_type):
            yield from message_section(message, (4, index), comments)
        for index, enum in enumerate(file.enum_type):
            yield f"\n### {enum.name}\n{prose(comments.get((5, index), ''))}"
            yield "\n| value | number | meaning |\n|---|---|---|\n"
            for number, value in enumerate(enum.value):
                yield f"| `{value.name}` | {value.number} | {cell(comments.get((5, index, 2, number), ''))} |\n"


def services(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    """Yield the services of a file."""
    for index, service in enumerate(file.service):
        yield f"\n### {service.name}\n{prose(comments.get((6, index), ''))}"
        for number, method in enumerate(service.method):
            request, reply = (
                f"{'stream of ' if streams else ''}`{name.rpartition('.')[2]}`"
                for name, streams in (
                    (method.input_type, method.client_streaming),
                    (method.output_type, method.server_streaming),
                )
            )
            yield f"\n#### {service.name}.{method.name}\n\n{request} → {reply}\n"
            yield prose(comments.get((6, index, 2, number), ""))


def cell(comment: str) -> str:
    """Return a comment as the cell of a table."""
    return html.escape(" ".join(comment.split()), quote=False).replace("|", "\\|")


def prose(comment: str) -> str:
    """Return a comment as a paragraph, or as it is if its lines have a form."""
    lines = [line.removeprefix(" ") for line in comment.rstrip().split("\n")]
    if any(line.startswith((" ", "1.")) for line in lines):
        return "\n```text\n" + "\n".join(lines) + "\n```\n"
    return f"\n{html.escape(' '.join(lines), quote=False)}\n" if comment else ""


def message_section(
    message: DescriptorProto, path: tuple[int, ...], comments: Comments, outer: str = ""
) -> Iterator[str]:
    """Yield a message and the messages in it."""
    name = f"{outer}{message.name}"
    if message.options.map_entry:
        return
    yield f"\n### {name}\n{prose(comments.get(path, ''))}"
    if message.field:
        yield "\n| field | number | type | meaning |\n|---|---|---|---|\n"
    for index, field in enumerate(message.field):
        text = cell(comments.get((*path, 2, index), ""))
        yield f"| `{field.name}` | {field.number} | {type_name(field)} | {text} |\n"
    for index, inner in enumerate(message.nested_type):
        yield from message_section(inner, (*path, 3, index), comments, f"{name}.")


def type_name(field: FieldDescriptorProto) -> str:
    """Return the type of a field, as in the .proto file."""
    repeated = "repeated " if field.label == field.LABEL_REPEATED else ""
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{repeated}`{field.type_name.removeprefix('.fanin.v1.') or scalar}`"


if __name__ == "__main__":
    stage()
    zensical = Path(sys.executable).with_name("zensical")
    config = shutil.copy(DOCS / "zensical.toml", ROOT / "build")
    command = [str(zensical), "build", "--strict", "--clean", "--config-file", str(config)]
    sys.exit(subprocess.run(command, cwd=ROOT / "build", check=False).returncode)
