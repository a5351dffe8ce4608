"""Decisions about tokens and devices, the same for every store: pure functions of the record and the request."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, assert_never

from fanin.protos.calls import MICROSECONDS
from fanin.protos.errors import Conflict, NotFound, PermissionDenied, Unauthenticated
from fanin.protos.messages import (
    NO_DIGEST,
    TOKEN_ID_CHARS,
    AuditEntry,
    Ban,
    BanDevice,
    DeviceChange,
    DeviceInfo,
    DeviceState,
    LabelDevice,
    NewToken,
    Principal,
    RemoveDevice,
    Role,
    TagDevice,
    TokenInfo,
    TokenRotation,
    UnbanDevice,
)
from fanin.protos.names import check_tags
from fanin.protos.texts import counted
from fanin.server.storage.records import AuditFact, by_name

MAX_SUBJECT_CHARS: Final = 4_000
"""Longest subject of an entry of the audit log: 16 tags of the longest names and values fit."""
_FAULTS: Final = MappingProxyType({"revoked": "FN-1415", "expired": "FN-1492", "replaced": "FN-1494"})
"""The code of each fault of a token."""


def token_of(new: NewToken, by: Principal | None, now_s: float) -> TokenInfo:
    """Return the record of a new token."""
    return TokenInfo(
        name=new.name,
        role=new.role,
        token_id=new.sha256[:TOKEN_ID_CHARS],
        created_at=now_s,
        created_by="" if by is None else str(by),
        expires_at=None if new.lifetime_s is None else now_s + new.lifetime_s,
        max_uses=new.max_uses,
        label=new.label,
        tags=new.tags,
    )


def check_new_token(new: NewToken, same_name: TokenInfo | None, same_secret: TokenInfo | None) -> bool:
    """Return whether a token is new, and not the repetition of a request. Raises Conflict."""
    if same_name is None and same_secret is None:
        return True
    is_repeated = same_name == same_secret and same_name is not None and same_name.role is new.role
    if is_repeated and same_name is not None and same_name.revoked_at is None:
        return False
    taken = "the name" if same_name is not None else "the digest of its secret"
    raise Conflict(
        f"token {new.name}: another token has {taken}, expected a new one; choose another name: fanin token list shows "
        "the names, of which those of revoked tokens stay taken. fanin token rotate --expires renews an expired token",
        code="FN-1406",
    )


def check_token_change(name: str, token: TokenInfo | None) -> TokenInfo:
    """Return the token of a name. Raises NotFound."""
    if token is None:
        raise NotFound(f"token {name[:64]!r}: not found; fanin token list shows the names", code="FN-1407")
    return token


def rotated(token: TokenInfo, rotation: TokenRotation, same_secret: TokenInfo | None, now_s: float) -> TokenInfo | None:
    """Return a token with another secret, or None if it has this one already. Raises Conflict."""
    if token.revoked_at is not None:
        raise Conflict(f"token {token.name}: revoked; create a new one: fanin token create", code="FN-1408")
    if same_secret is not None:
        if same_secret.name != token.name:
            raise Conflict(
                f"token {token.name}: another token has the digest of this secret; draw another", code="FN-1406"
            )
        return None
    expires_at = token.expires_at if rotation.lifetime_s is None else now_s + rotation.lifetime_s
    changed_token = replace(token, token_id=rotation.sha256[:TOKEN_ID_CHARS], expires_at=expires_at)
    if changed_token.fault(now_s):
        raise Conflict(
            f"token {token.name}: expired, so another secret would be refused, too; give it another lifetime, such as "
            f"fanin token rotate {token.name} --expires 30d",
            code="FN-1470",
        )
    return changed_token


def check_revocation(token: TokenInfo, others: Iterable[TokenInfo], now_s: float) -> bool:
    """Return whether a token is revoked now, and was not before. Raises Conflict for the last one of an admin.

    A token that expires does not replace one that lasts: nobody would be an admin when it ends.

    Args:
        token: The token.
        others: All other tokens, or those of admins.
        now_s: Wall time, in seconds.
    """
    if token.revoked_at is not None:
        return False
    admins = [each for each in others if each.role is Role.ADMIN and not each.fault(now_s)]
    lasts = token.expires_at is None
    if token.role is Role.ADMIN and not any(each.expires_at is None or not lasts for each in admins):
        raise Conflict(
            f"token {token.name}: the last one with the role admin{' that does not expire' if admins else ''}, so "
            "nobody could create another; create one without --expires first, or replace its secret: fanin token "
            "rotate",
            code="FN-1409",
        )
    return True


def check_use(token: TokenInfo | None, now_s: float) -> TokenInfo:
    """Return an enrollment token that may enroll one more device. Raises Unauthenticated."""
    token = checked_token("enroll", token, now_s)
    if token.role is not Role.DEVICE:
        raise Unauthenticated(
            f"enroll: the token {token.name} is of a person with the role {token.role.value}, expected an enrollment "
            "token; a device must not have a token of a person: fanin token create --for-devices creates the right one",
            code="FN-1493",
        )
    if token.max_uses is not None and token.num_uses >= token.max_uses:
        raise Unauthenticated(
            f"enroll: the enrollment token {token.name} is used up, by {counted(token.num_uses, 'device')}; ask the "
            "operator for another: fanin token create --for-devices",
            code="FN-1412",
        )
    return token


def checked_token(call: str, token: TokenInfo | None, now_s: float) -> TokenInfo:
    """Return a token that is valid now. Raises Unauthenticated, whose text is for the holder of the secret."""
    if token is None:
        raise Unauthenticated(
            f"{call}: this coordinator has no token with this secret; check that it is of this coordinator, and that "
            "nobody has replaced it (fanin token rotate)",
            code="FN-0670",
        )
    if fault := token.fault(now_s):
        raise refused_token(f"{call}: the token {token.name}", fault)
    return token


def refused_token(what: str, fault: str = "expired") -> Unauthenticated:
    """Return the error for a token that was valid before: ``fault`` is revoked, expired or replaced."""
    code = _FAULTS[fault]
    return Unauthenticated(
        f"{what} is {fault}; ask the operator of the coordinator for another (fanin token create)", code=code
    )


def enrolled(device_id: str, public_key: str, token: TokenInfo | None, now_s: float) -> DeviceInfo:
    """Return the record of a device that enrolls now."""
    known = DeviceInfo(device_id=device_id, public_key=public_key, enrolled_at=now_s, state=DeviceState.NEW)
    if token is None:
        return known
    return replace(known, label=token.label, tags=token.tags, enrolled_by=token.name)


def enrollment_fact(device_id: str, token: TokenInfo | None) -> AuditFact:
    """Return the entry of the audit log for an enrollment."""
    subject = "" if token is None else f"token {token.name}"
    return AuditFact(principal=f"device {device_id}", call="Enroll", subject=subject)


def banned(device_id: str, since: float) -> PermissionDenied:
    """Return the error for a device that is banned. Its reason is the operator's and not for the device."""
    return PermissionDenied(
        f"device {device_id}: banned since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M} UTC by an operator of "
        f"this coordinator; ask an operator why, and to lift the ban (fanin device unban {device_id}); do not retry",
        code="FN-1413",
    )


def removed(device_id: str) -> Unauthenticated:
    """Return the error for a device that an operator removed."""
    return Unauthenticated(
        f"device {device_id}: removed by an operator of this coordinator; ask the operator whether it may come back, "
        "then start it again with a valid enrollment token (--token-file)",
        code="FN-1495",
    )


def unknown_device(device_id: str) -> NotFound:
    """Return the error for a device that is not enrolled."""
    return NotFound(
        f"device {device_id[:64]!r}: not enrolled here; fanin device list shows the devices", code="FN-1414"
    )


def changed(info: DeviceInfo, change: DeviceChange, by: Principal | None, now_s: float) -> DeviceInfo:
    """Return a device after a change. A removed device is returned as it is. Raises InvalidInput, Conflict."""
    match change.what:
        case LabelDevice(label=label):
            return replace(info, label=label)
        case TagDevice(set=added, remove=names):
            kept = {name: value for name, value in info.tags.items() if name not in names}
            tags = dict(sorted((kept | dict(added)).items()))
            check_tags(f"device {info.device_id}", tags)
            return replace(info, tags=MappingProxyType(tags))
        case BanDevice(reason=reason):
            return replace(info, ban=Ban(reason=reason, time=now_s, by=by_name(by)), state=DeviceState.BANNED)
        case UnbanDevice():
            return replace(info, ban=None, state=resting_state(is_banned=False, last_seen=info.last_seen))
        case RemoveDevice() if info.ban is not None:
            raise Conflict(
                f"device {info.device_id}: banned, and without its record its key could enroll again; keep it, or lift "
                "the ban first: fanin device unban",
                code="FN-1499",
            )
        case RemoveDevice():
            return info
        case other:
            assert_never(other)


def change_fact(change: DeviceChange, by: Principal | None) -> AuditFact:
    """Return the entry of the audit log for a change of a device."""
    match change.what:
        case LabelDevice(label=label):
            text = f"label {label!r}"
        case TagDevice(set=added, remove=names):
            text = " ".join(["tag", *(f"{name}={value!r}" for name, value in added.items()), *(f"-{n}" for n in names)])
        case BanDevice(reason=reason):
            text = f"ban {reason!r}"
        case UnbanDevice():
            text = "unban"
        case RemoveDevice():
            text = "remove"
        case other:
            assert_never(other)
    return AuditFact(principal=by_name(by), call="ChangeDevice", subject=f"device {change.device_id}: {text}")


def resting_state(*, is_banned: bool, last_seen: float | None) -> DeviceState:
    """Return the state of a device as the record has it: without the calls under way."""
    if is_banned:
        return DeviceState.BANNED
    return DeviceState.NEW if last_seen is None else DeviceState.AWAY


def tags_text(tags: Mapping[str, str]) -> str:
    """Return tags as lines, with a line feed before the first and after the last, so that each can be searched for."""
    return "".join(f"\n{name}={value}" for name, value in sorted(tags.items())) + "\n" if tags else ""


def tags_of(text: str | None) -> Mapping[str, str]:
    """Return the tags of such lines."""
    lines = (line.partition("=") for line in (text or "").split("\n") if line)
    return MappingProxyType({name: value for name, _, value in lines})


def next_entry(previous: AuditEntry | None, fact: AuditFact, now_s: float) -> AuditEntry:
    """Return the entry that follows ``previous``; None begins the log."""
    sequence, digest = (1, NO_DIGEST) if previous is None else (previous.sequence + 1, previous.digest)
    draft = AuditEntry(
        sequence=sequence,
        time_us=int(now_s * MICROSECONDS),
        principal=fact.principal,
        call=fact.call,
        subject=_bounded(fact.subject),
        outcome=fact.outcome,
        digest="",
    )
    return replace(draft, digest=draft.chained(digest))


def _bounded(subject: str) -> str:
    """Return a subject that an entry can have. The digest of a longer one proves what it was."""
    if len(subject) <= MAX_SUBJECT_CHARS:
        return subject
    digest = hashlib.sha256(subject.encode(errors="backslashreplace")).hexdigest()
    note = f"... ({len(subject)} characters, sha256 {digest})"
    return subject[: MAX_SUBJECT_CHARS - len(note)] + note
