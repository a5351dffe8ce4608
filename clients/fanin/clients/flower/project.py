"""The project of a Flower app: ``[tool.flwr.app]`` of a pyproject.toml, which names the app and its configuration."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from fanin.clients.flower.task import AppFailed, FlowerSettings
from fanin.clients.textfiles import reason_of

FILE: Final = "pyproject.toml"
CLIENT_APP: Final = "clientapp"
SERVER_APP: Final = "serverapp"


def resolved(settings: FlowerSettings, component: str = CLIENT_APP) -> FlowerSettings:
    """Return settings that name an app. A folder names an app of its project, as in ``flwr run FOLDER``.

    Args:
        settings: The settings.
        component: The app of the project: ``clientapp`` or ``serverapp``.

    Raises:
        AppFailed: The folder has no project of a Flower app.
    """
    if not names_folder(settings):
        return settings
    folder = settings.folder / settings.app
    components = _section(folder / FILE, settings.app).get("components")
    app = components.get(component) if isinstance(components, Mapping) else None
    if not isinstance(app, str):
        raise AppFailed(
            f"flower app {settings.app}: {folder / FILE} has no {component} in [tool.flwr.app.components], expected "
            "package.module:name; add it, or name the app",
            code="FN-0917",
        )
    return replace(settings, app=app, folder=folder.resolve())


def names_folder(settings: FlowerSettings) -> bool:
    """Return whether settings name the folder of a project, and not an app."""
    return ":" not in settings.app and (settings.folder / settings.app).is_dir()


def configuration(settings: FlowerSettings) -> Mapping[str, object]:
    """Return ``[tool.flwr.app.config]`` of the nearest project; empty without one. Raises AppFailed."""
    for folder in (settings.folder, *settings.folder.parents):
        if (path := folder / FILE).is_file() and (section := _section(path, settings.app)):
            config = section.get("config", {})
            return config if isinstance(config, Mapping) else {}
    return {}


def _section(path: Path, app: str) -> Mapping[str, object]:
    """Return ``[tool.flwr.app]`` of a file; empty if it has none. Raises AppFailed."""
    try:
        table: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise AppFailed(
            f"flower app {app}: {path}: cannot be read ({reason_of(exc)}); name MODULE:APP", code="FN-0917"
        ) from exc
    for name in ("tool", "flwr", "app"):
        table = table.get(name, {}) if isinstance(table, Mapping) else {}
    return table if isinstance(table, Mapping) else {}
