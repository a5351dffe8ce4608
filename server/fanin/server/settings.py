"""The settings of a coordinator, validated when it starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fanin.protos.addresses import Address, parse_address
from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_name
from fanin.protos.plans import RetentionPlan
from fanin.server.care.certificates import OwnFiles
from fanin.server.storage.disk import Durability

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a coordinator.

    Attributes:
        state: The folder for its durable state.
        listen: HOST:PORT to listen on.
        names: Further host names and addresses under which devices reach it.
        durability: What an acknowledged Update survives.
        strategies: Flower strategies of the operator that Plans may name.
        web: HOST:PORT of the page; None for the default of ``web.listener``.
        has_page: Whether the page is served.
        tls_cert: The operator's own certificate with its chain, in PEM; None: the local authority issues one.
        tls_key: Its private key, in PEM.
        retention: What is kept of Runs whose Plan has no limits.
        data: Files of the data sets on which Versions are evaluated, by the name that a Plan uses.
    """

    state: Path
    listen: str
    names: tuple[str, ...] = ()
    durability: Durability = Durability.HOST
    strategies: tuple[str, ...] = ()
    web: str | None = None
    has_page: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    retention: RetentionPlan = field(default_factory=RetentionPlan)
    data: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        parse_address("listen", self.listen)
        if self.web is not None:
            if not self.has_page:
                raise InvalidInput(
                    f"--web {self.web}: got it together with --no-web; remove one of the two", code="FN-1421"
                )
            parse_address("--web", self.web)
        if (self.tls_cert is None) != (self.tls_key is None):
            given = "--tls-cert" if self.tls_key is None else "--tls-key"
            raise InvalidInput(f"tls: got {given} alone, expected --tls-cert and --tls-key", code="FN-1446")
        for name, path in self.data.items():
            check_name("data", name)
            if not path.is_file():
                raise InvalidInput(
                    f"data: {name}: {path}: no such file; expected an .npz file with y and an array for each input, "
                    "such as x",
                    code="FN-0352",
                )

    @property
    def address(self) -> Address:
        """The address to listen on."""
        return parse_address("listen", self.listen)

    @property
    def web_address(self) -> Address | None:
        """The address of ``--web``, None without one."""
        return None if self.web is None else parse_address("--web", self.web)

    @property
    def is_local_page(self) -> bool:
        """Whether only this machine reaches the page."""
        return self.web_address is None or self.web_address.is_loopback

    @property
    def all_names(self) -> frozenset[str]:
        """All names that the certificate must cover."""
        addresses = [address for address in (self.address, self.web_address) if address is not None]
        own = [address.host for address in addresses if not address.is_unspecified]
        return frozenset((*LOCAL_NAMES, *own, *self.names))

    @property
    def own_files(self) -> OwnFiles | None:
        """The files of the operator's own certificate, which must cover the names that were given."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return OwnFiles(certificate=self.tls_cert, key=self.tls_key, names=self.names)
