"""Tokens, devices and times of the administration, as text and as JSON."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from fanin.commands.console.streams import printable
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import AuditEntry, DeviceCondition, DeviceInfo, TokenInfo

UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])")


def lifetime_of(text: str) -> float | None:
    """Return the seconds of a text such as 12h or 7d; None for "". Raises InvalidInput."""
    if not text:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"--expires: got {text!r}, expected a number and s, m, h, d or w, as in 12h or 7d", code="FN-1008"
        )
    return float(match.group(1)) * UNITS[match.group(2)]


def tags_of(texts: Sequence[str], option: str = "--tag") -> dict[str, str]:
    """Return the tags of texts NAME=VALUE. Raises InvalidInput."""
    tags: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in tags:
            problem = "the name a second time" if name in tags else "no value"
            raise InvalidInput(f"{option} {text}: got {problem}, expected NAME=VALUE, each name once", code="FN-1008")
        tags[name] = value
    return tags


def tags_text(tags: Mapping[str, str]) -> str:
    """Return tags as text."""
    return " ".join(f"{name}={value}" for name, value in tags.items())


def time_text(time_s: float | None) -> str:
    """Return a time in UTC, or "" for none."""
    return "" if time_s is None else f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S}Z"


def condition_text(condition: DeviceCondition | None) -> str:
    """Return battery and network as text."""
    if condition is None:
        return ""
    battery = "" if condition.battery_percent is None else f"{condition.battery_percent} %"
    charging = {True: "charging", False: "on battery", None: ""}[condition.is_charging]
    network = "" if condition.network is None else condition.network.value
    return ", ".join(filter(None, (battery, charging, network)))


def token_row(token: TokenInfo) -> dict[str, object]:
    """Return a token for JSON. It has no secret."""
    return {
        "name": token.name,
        "role": token.role.value,
        "token_id": token.token_id,
        "created_at": token.created_at,
        "created_by": token.created_by,
        "expires_at": token.expires_at,
        "revoked_at": token.revoked_at,
        "max_uses": token.max_uses,
        "num_uses": token.num_uses,
        "label": token.label,
        "tags": dict(token.tags),
    }


def device_row(info: DeviceInfo) -> dict[str, object]:
    """Return a device for JSON."""
    ban, condition = info.ban, info.condition
    network = None if condition is None or condition.network is None else condition.network.value
    return {
        "device_id": info.device_id,
        "public_key": info.public_key,
        "label": info.label,
        "tags": dict(info.tags),
        "state": info.state.value,
        "enrolled_at": info.enrolled_at,
        "enrolled_by": info.enrolled_by,
        "ban": None if ban is None else {"reason": ban.reason, "time": ban.time, "by": ban.by},
        "last_seen": info.last_seen,
        "runtimes": list(info.runtimes),
        "fanin_version": info.fanin_version,
        "battery_percent": None if condition is None else condition.battery_percent,
        "is_charging": None if condition is None else condition.is_charging,
        "network": network,
        "num_updates": info.num_updates,
        "last_rejection": info.last_rejection,
        "rejected_at": info.rejected_at,
    }


def device_lines(info: DeviceInfo) -> str:
    """Return a device as lines of text."""
    ban = "" if info.ban is None else f"{time_text(info.ban.time)} by {info.ban.by}: {info.ban.reason or 'no reason'}"
    rejection = f"{time_text(info.rejected_at)}: {info.last_rejection}" if info.last_rejection else ""
    enrolled = f"{time_text(info.enrolled_at)}{f' by token {info.enrolled_by}' if info.enrolled_by else ''}"
    fields = {
        "device": info.device_id,
        "label": info.label,
        "tags": tags_text(info.tags),
        "state": info.state.value,
        "banned": ban,
        "enrolled": enrolled,
        "last seen": time_text(info.last_seen) or "never",
        "runtimes": ", ".join(info.runtimes),
        "fanin": info.fanin_version,
        "condition": condition_text(info.condition),
        "updates": f"{info.num_updates} accepted of this key, in all its enrollments",
        "last rejection": rejection,
        "public key": info.public_key,
    }
    return "".join(f"{name:15}{printable(value)}\n" for name, value in fields.items() if value)


def audit_row(entry: AuditEntry) -> dict[str, object]:
    """Return an entry of the audit log for JSON."""
    names = ("sequence", "time_us", "principal", "call", "subject", "outcome", "digest")
    return {name: getattr(entry, name) for name in names}
