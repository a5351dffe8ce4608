"""Lists that change only on purpose: requirements, settings of a coordinator, and subcommands.

A change that adds an entry also adds it here, so that a review sees it.
"""

import re
from dataclasses import fields

from house.tree import CONSTRAINTS, requirements

from fanin.commands.main import SUBCOMMANDS
from fanin.server.settings import Settings

REQUIREMENTS = {
    "": ["cryptography", "grpcio", "numpy", "protobuf"],
    "onnx": ["onnxruntime"],
    "server": [
        "alembic",
        "click",
        "grpcio-health-checking",
        "grpcio-reflection",
        "jinja2",
        "prometheus-client",
        "rich",
        "rpds-py",
        "sqlalchemy",
        "starlette",
        "typer",
        "uvicorn",
    ],
    "litert": ["ai-edge-litert"],
    "tflite": ["numpy", "tflite-runtime"],
    "export": ["ai-edge-litert", "flatbuffers", "litert-torch", "onnx", "onnxruntime", "onnxscript", "torch"],
    "datacenter": ["safetensors", "torch"],
    "transformers": ["transformers"],
    "plots": ["matplotlib"],
    "images": ["pillow"],
    "parquet": ["pyarrow"],
    "telemetry": [
        "opentelemetry-exporter-otlp-proto-grpc",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-sdk",
    ],
    "privacy": ["dp-accounting"],
    "simulation": ["loky"],
    "ray": ["ray"],
    "flower": ["flwr"],
    "docs": ["mermaidx", "mkdocstrings-python", "zensical"],
    "backup": ["fsspec", "s3fs"],
    "browser": ["playwright"],
    "dev": [
        "build",
        "datasets",
        "flask",
        "flask-cors",
        "flwr-datasets",
        "grafana-foundation-sdk",
        "grpcio-tools",
        "hatchling",
        "hypothesis",
        "import-linter",
        "moto",
        "mypy",
        "mypy-protobuf",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "scipy",
        "tensorboardx",
        "types-grpcio",
        "types-grpcio-health-checking",
        "types-grpcio-reflection",
        "types-protobuf",
        "uv",
    ],
}
ELSEWHERE = {"tflite-runtime"}
"""Requirements that need numpy 1. They cannot be tested together with the others, so they have their own list."""
SETTINGS = [
    "data",
    "durability",
    "has_page",
    "listen",
    "names",
    "retention",
    "state",
    "strategies",
    "tls_cert",
    "tls_key",
    "web",
]
COMMANDS = [
    "assemble",
    "audit",
    "backup",
    "bench",
    "bundle",
    "completion",
    "config",
    "demo",
    "describe",
    "device",
    "doctor",
    "evaluate",
    "evaluations",
    "explain",
    "export",
    "fetch",
    "infer",
    "init",
    "inspect",
    "join",
    "partition",
    "pause",
    "plan",
    "policy",
    "privacy",
    "promote",
    "prune",
    "publish",
    "reclaim",
    "report",
    "restore",
    "resume",
    "rollback",
    "run",
    "runs",
    "serve",
    "simulate",
    "stats",
    "status",
    "stop",
    "study",
    "token",
    "train",
    "verify",
    "watch",
]


def canonical(requirement: str) -> str:
    """Return the distribution's name, normalized as in PEP 503."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_requirements() -> None:
    assert {extra: sorted(map(canonical, needs)) for extra, needs in requirements().items()} == REQUIREMENTS


def test_settings_of_a_coordinator() -> None:
    assert sorted(field.name for field in fields(Settings)) == SETTINGS


def test_subcommands() -> None:
    assert sorted(SUBCOMMANDS) == COMMANDS


def test_every_requirement_is_pinned() -> None:
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^;\s]+", pin) for pin in pins)
    pinned = {canonical(pin) for pin in pins}
    needed = {name for names in REQUIREMENTS.values() for name in names} | {"hatchling"}
    assert needed - pinned == ELSEWHERE


def test_torch_is_pinned_without_a_build() -> None:
    # A pin with a build tag (+cpu) would refuse every other build. A pin without a tag accepts any build.
    (torch,) = (line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    assert "+" not in torch
