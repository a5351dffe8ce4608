"""The frozen sets of an attempt, their digests, and the keys that derive from them.

    roster      U1: the devices whose advertisements arrived; their indexes are the order of their Ed25519 keys
    sharers     U2: those whose sealed shares arrived
    survivors   U3: those whose masked Update was committed

Each digest covers the set before it, and the first one the terms. A pair derives its mask key from the digest of the
sharers: devices that see different sets get masks that do not cancel, instead of a sum that shows less than it should.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fanin.edge.masking import agreement
from fanin.edge.masking.agreement import Sign, agreed, check_form, derived, digest, is_signature, opened
from fanin.edge.masking.graph import HararyGraph, graph_of
from fanin.edge.masking.keystream import MaskKey
from fanin.edge.masking.messages import RosterEntry, RosterMessage, bitmap, members_of, u32
from fanin.edge.masking.parameters import GraphParameters
from fanin.edge.masking.sharing import SHARE_BYTES, is_share
from fanin.edge.masking.terms import MaskTerms
from fanin.protos.errors import InvalidInput
from fanin.protos.names import check_key


def commitment_of(terms: MaskTerms, device: bytes, seed: bytes) -> bytes:
    """Return the commitment of the seed of a self mask."""
    return digest(agreement.COMMITMENT_LABEL, terms.digest, device, seed)


def certificate_of(authority: Sign, device: bytes) -> bytes:
    """Return the certificate of a device's Ed25519 key by an authority."""
    return authority(agreement.IDENTITY_CONTEXT, device)


def signed_keys(terms: MaskTerms, entry: RosterEntry) -> bytes:
    """Return what the signature of an entry covers, after its context."""
    return b"".join((terms.digest, entry.sealing, entry.masking, entry.commitment))


def check_entry(what: str, terms: MaskTerms, entry: RosterEntry, authority: str) -> None:
    """Raise InvalidInput unless an entry is one that a device advertised for these terms.

    1. Ed25519 key: not of small order. 2. X25519 keys: in their shortest form, different. 3. Signature by the device.
    4. Under the threat ``active``: certificate by the authority. Points of low order are refused by the coordinator
    when it receives the entry, and by a device when it uses them.
    """
    check_key(what, entry.device.hex())
    check_form(what, entry.sealing)
    check_form(what, entry.masking)
    if entry.sealing == entry.masking:
        raise InvalidInput(f"{what}: got one X25519 key for two purposes, expected two", code="FN-1631")
    if not is_signature(entry.device, entry.signature, agreement.KEYS_CONTEXT, signed_keys(terms, entry)):
        raise InvalidInput(f"{what}: the signature of the advertised keys is not by the device", code="FN-1632")
    certifier = bytes.fromhex(authority)
    if terms.is_active and not is_signature(certifier, entry.certificate, agreement.IDENTITY_CONTEXT, entry.device):
        raise InvalidInput(f"{what}: the certificate is not by the authority {authority}", code="FN-1632")


def check_different(what: str, entries: Sequence[RosterEntry]) -> None:
    """Raise InvalidInput if two entries share a key or a commitment."""
    keys = [key for entry in entries for key in (entry.device, entry.sealing, entry.masking, entry.commitment)]
    if len(set(keys)) != len(keys):
        raise InvalidInput(f"{what}: got {len(entries)} devices that share a key, expected own ones", code="FN-1631")


def roster_digest(terms: MaskTerms, chosen: GraphParameters, entries: Sequence[RosterEntry]) -> bytes:
    """Return the digest of a roster."""
    numbers = map(u32, (len(entries), chosen.degree, chosen.threshold))
    return digest(agreement.ROSTER_LABEL, terms.digest, *numbers, *(entry.encoded() for entry in entries))


@dataclass(frozen=True, kw_only=True)
class RosterView:
    """What a device knows of the roster, and the coordinator's whole roster.

    Attributes:
        num_devices: n.
        parameters: Degree and threshold.
        digest: Digest of the roster.
        entries: Entries by index: of the device and its neighbors, or of all devices.
    """

    num_devices: int
    parameters: GraphParameters
    digest: bytes
    entries: Mapping[int, RosterEntry]

    @cached_property
    def graph(self) -> HararyGraph:
        """The graph of the roster."""
        return graph_of(self.num_devices, self.parameters.degree, self.digest)

    def message(self, index: int) -> RosterMessage:
        """Return what a device receives of this roster."""
        return RosterMessage(
            num_devices=self.num_devices,
            index=index,
            degree=self.parameters.degree,
            threshold=self.parameters.threshold,
            digest=self.digest,
            peers={peer: self.entries[peer] for peer in self.graph.neighbors(index)},
        )


@dataclass(frozen=True, kw_only=True)
class DeviceSet:
    """The sharers or the survivors.

    Attributes:
        members: Indexes, in rising order.
        digest: Digest of the set, which covers the set before it.
        encoded: The set as a bitmap.
    """

    members: tuple[int, ...]
    digest: bytes
    encoded: bytes

    @cached_property
    def indexes(self) -> frozenset[int]:
        """The members as a set."""
        return frozenset(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredShares:
    """U2, and the shares that a device holds.

    Attributes:
        sharers: U2.
        shares: By owner its share of b and its share of s. In a complete graph the own share of b is there, too.
        unopened: Senders whose sealed shares do not open, or are no shares.
    """

    sharers: DeviceSet
    shares: Mapping[int, tuple[bytes, bytes]] = field(repr=False)
    unopened: tuple[int, ...]


def opened_shares(key: bytes, ciphertext: bytes) -> tuple[bytes, bytes] | None:
    """Return a sealed share of b and of s; None if they do not open, or are no shares."""
    pair = opened(key, ciphertext)
    if pair is None or not is_share(pair[:SHARE_BYTES]) or not is_share(pair[SHARE_BYTES:]):
        return None
    return pair[:SHARE_BYTES], pair[SHARE_BYTES:]


def sharers_of(view: RosterView, data: bytes) -> DeviceSet:
    """Return the sharers of a bitmap. Raises InvalidInput if it is malformed."""
    members = tuple(members_of(data, view.num_devices))
    return DeviceSet(members=members, digest=digest(agreement.SHARERS_LABEL, view.digest, data), encoded=data)


def survivors_of(num_devices: int, sharers: DeviceSet, data: bytes) -> DeviceSet:
    """Return the survivors of a bitmap. Raises InvalidInput if it is malformed, or names a device that is no sharer."""
    members = tuple(members_of(data, num_devices))
    if not sharers.indexes.issuperset(members):
        raise InvalidInput("survivors: got a device that sent no shares, expected sharers", code="FN-1633")
    return DeviceSet(members=members, digest=digest(agreement.SURVIVORS_LABEL, sharers.digest, data), encoded=data)


def set_bytes(view: RosterView, members: Sequence[int]) -> bytes:
    """Return indexes as a bitmap."""
    return bitmap(view.num_devices, members)


def share_key(view: RosterView, own: int, ends: tuple[int, int], private: X25519PrivateKey) -> bytes:
    """Return the key with which a sender seals shares for a receiver, for either of them.

    Args:
        view: The roster.
        own: Index of the caller.
        ends: Indexes of the sender and the receiver.
        private: The private sealing key of the caller.
    """
    sender, receiver = ends
    peer = receiver if own == sender else sender
    shared = agreed(f"device {peer} of the roster", private, view.entries[peer].sealing)
    keys = view.entries[sender].sealing, view.entries[receiver].sealing
    return derived(shared, agreement.SHARE_LABEL, view.digest, u32(sender), u32(receiver), *keys)


def pair_mask(view: RosterView, sharers: DeviceSet, own: int, peer: int, private: X25519PrivateKey) -> MaskKey:
    """Return the mask of a pair, as the device ``own`` adds it.

    Args:
        view: The roster.
        sharers: U2.
        own: Index of the device.
        peer: Index of its neighbor.
        private: The private masking key of the device.
    """
    low, high = min(own, peer), max(own, peer)
    shared = agreed(f"device {peer} of the roster", private, view.entries[peer].masking)
    ends = view.entries[low].masking, view.entries[high].masking
    key = derived(shared, agreement.MASK_LABEL, sharers.digest, u32(low), u32(high), *ends)
    return MaskKey(key, is_negative=own > peer)


def self_mask(sharers: DeviceSet, index: int, seed: bytes) -> MaskKey:
    """Return the self mask of a device."""
    return MaskKey(derived(seed, agreement.SELF_LABEL, sharers.digest, u32(index)))
