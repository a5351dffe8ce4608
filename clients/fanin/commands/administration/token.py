"""``fanin token``: tokens of people, and tokens that enroll devices.

The secret of a token is drawn on this machine, and the coordinator receives its digest. It is printed once, or written
to a file that only this user can read.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fanin.commands.administration.rows import lifetime_of, tags_of, tags_text, time_text, token_row
from fanin.commands.administration.verbs import Verbs, administrator, run_verb
from fanin.commands.console.tables import print_tables
from fanin.commands.console.terminal import (
    DEFAULT_STATE,
    CaOption,
    JsonOption,
    ServerOption,
    StateOption,
    TokenOption,
    prints_text,
    write_json,
)
from fanin.commands.console.usage import check_place, wrong_usage
from fanin.protos.errors import InvalidInput
from fanin.protos.messages import NewToken, Role, TokenInfo, TokenRotation

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token; fanin token list shows them.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="File for the secret, readable by this user alone; default: print it.")
]


def main(argv: Sequence[str]) -> int:
    """Run ``fanin token``."""
    verbs: Verbs = {"create": create, "list": list_tokens, "rotate": rotate, "revoke": revoke}
    return run_verb("token", "Create, list, replace and revoke the tokens of a coordinator.", verbs, argv)


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Names the bearer in records: a person, or a ward.")],
    role: Annotated[str, typer.Option("--role", metavar="viewer|operator|admin", help="What a person may do.")] = "",
    for_devices: Annotated[bool, typer.Option("--for-devices", help="Create a token that enrolls devices.")] = False,
    uses: Annotated[
        int | None, typer.Option("--uses", min=1, help="Number of devices that it enrolls; default: any number.")
    ] = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="Lifetime, such as 12h, 7d or 8w; default: no end.")
    ] = "",
    label: Annotated[str, typer.Option("--label", help="Label of the devices that it enrolls.")] = "",
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="Tag of these devices; repeatable.")
    ] = None,
    out: OutOption = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Create a token, and print its secret once.

    Creating tokens of people needs the role admin, creating enrollment tokens the role operator.
    """
    with wrong_usage():
        if out is not None and out.exists():
            raise InvalidInput(f"--out: {out} exists, expected a new file; name another one", code="FN-1001")
        secret, sha256 = _new_secret(out)
        new = NewToken(
            name=name,
            role=_role(role, for_devices=for_devices),
            sha256=sha256,
            lifetime_s=lifetime_of(expires),
            max_uses=uses,
            label=label,
            tags=tags_of(tag or ()),
        )
    with _kept(secret, out), administrator(state, server, ca, token_file) as client:
        token = client.create_token(new)
    _print(token, secret, out, json)


def list_tokens(
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """List the tokens, without their secrets. Operators see enrollment tokens only."""
    with administrator(state, server, ca, token_file) as client:
        tokens = list(client.tokens())
    if json:
        write_json(json, {"tokens": [token_row(token) for token in tokens]})
    if prints_text(json):
        print_tables(_table(tokens) if tokens else "no tokens; create one with: fanin token create")


def rotate(
    name: NameArgument,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="New lifetime, such as 12h, 7d or 8w; default: as before.")
    ] = "",
    out: OutOption = None,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Replace the secret of a token, and print the new one once. The old one is refused from then on.

    A file of --out is replaced once the coordinator has accepted the new secret. An expired token needs --expires.
    """
    with wrong_usage():
        secret, sha256 = _new_secret(out)
        rotation = TokenRotation(name=name, sha256=sha256, lifetime_s=lifetime_of(expires))
    with _kept(secret, out), administrator(state, server, ca, token_file) as client:
        token = client.rotate_token(rotation)
    _print(token, secret, out, json)


def revoke(
    name: NameArgument,
    state: StateOption = DEFAULT_STATE,
    server: ServerOption = "",
    ca: CaOption = None,
    token_file: TokenOption = None,
    json: JsonOption = "",
) -> None:
    """Revoke a token. Its calls under way end; devices that enrolled with it stay enrolled."""
    with administrator(state, server, ca, token_file) as client:
        token = client.revoke_token(name)
    if json:
        write_json(json, {"token": token_row(token)})
    if prints_text(json):
        sys.stdout.write(f"token {token.name}: revoked\n")


def _role(role: str, *, for_devices: bool) -> Role:
    people = [each.value for each in Role if each is not Role.DEVICE]
    if for_devices:
        if role:
            raise InvalidInput(f"--role: got {role} with --for-devices, expected one of the two", code="FN-1008")
        return Role.DEVICE
    if role not in people:
        got = repr(role) if role else "none"
        raise InvalidInput(
            f"--role: got {got}, expected one of {', '.join(people)}, or --for-devices for a token that enrolls "
            "devices",
            code="FN-1008",
        )
    return Role(role)


def _new_secret(out: Path | None) -> tuple[str, str]:
    """Return a secret and its digest. Raises InvalidInput if the file for it cannot be created."""
    # Imported here: wrong usage needs no grpc.
    from fanin.clients.administrator import new_secret

    if out is not None:
        check_place("--out", out)
    return new_secret()


@contextmanager
def _kept(secret: str, out: Path | None) -> Iterator[None]:
    """Write a secret to its file if the coordinator accepts the token.

    It is stored first: a token whose secret nobody has would be worse than a file with an unknown token.
    """
    if out is None:
        yield
        return
    draft = out.with_name(f"{out.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secret}\n")
    try:
        yield
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(out)


def _print(token: TokenInfo, secret: str, out: Path | None, json: str) -> None:
    """Print a secret once: as text, or in the JSON on standard output. No file but ``--out`` ever has it."""
    if json == "-":
        row = {} if out is not None else {"secret": secret}
        write_json(json, {"token": token_row(token), **row})
        return
    if json:
        write_json(json, {"token": token_row(token)})
    until = f", until {time_text(token.expires_at)}" if token.expires_at is not None else ""
    sys.stderr.write(f"token {token.name}: {token.role.value}{until}\n")
    sys.stdout.write(f"secret in {out}\n" if out is not None else f"{secret}\n")


def _table(tokens: Sequence[TokenInfo]) -> Table:
    table = Table()
    table.add_column("name", no_wrap=True)
    for heading in ("role", "id", "created", "by", "expires", "revoked", "uses", "label", "tags"):
        table.add_column(heading)
    for token in tokens:
        uses = "" if token.role is not Role.DEVICE else f"{token.num_uses} of {token.max_uses or 'any'}"
        expires, revoked = time_text(token.expires_at), time_text(token.revoked_at)
        created = (token.token_id, time_text(token.created_at), token.created_by)
        table.add_row(
            token.name, token.role.value, *created, expires, revoked, uses, token.label, tags_text(token.tags)
        )
    return table
