"""Keys and certificates of a deployment: an authority, a server's certificate, and a key for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrecon._src.deploy.admission import SECRET_BYTES, read_key
from fedrecon._src.storage.atomic import write_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

VALID_DAYS = 730
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")
_NODE = re.compile(r"[\w-]{1,100}")


class KeyExists(ValueError):
    """A key file exists already; keys are never replaced."""


def make_authority(folder: Path) -> Path:
    """Make `ca.key`, which stays with whoever runs the server, and `ca.crt`, which every node gets."""
    return _make_certificate(folder, "ca", None, ())


def make_server(folder: Path, hosts: Sequence[str]) -> Path:
    """Make `server.key` and `server.crt`, signed by the authority in the folder.

    Args:
      folder: has `ca.key` and `ca.crt`.
      hosts: every host name and address by which nodes reach the server; this machine's own are added.
    """
    check_hosts(hosts)
    issuer = _read_pair(folder / "ca.crt", folder / "ca.key")
    return _make_certificate(folder, "server", issuer, dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))


def make_node(folder: Path, name: str) -> Path:
    """Make `name.key`, which goes to the node, and `name.pub`, which the server gets; both as OpenSSH writes them."""
    from cryptography.hazmat.primitives import serialization as formats
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    check_node(folder, name)
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(formats.Encoding.PEM, formats.PrivateFormat.OpenSSH, formats.NoEncryption())
    public = key.public_key().public_bytes(formats.Encoding.OpenSSH, formats.PublicFormat.OpenSSH)
    return _write_keys(folder, {f"{name}.key": private, f"{name}.pub": public + b"\n"})


def make_helper(folder: Path) -> Path:
    """Make `helper.key`, the key of the second server of secure sums, and `helper.pub`, which device plans name."""
    from cryptography.hazmat.primitives import serialization as formats
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.generate()
    private = key.private_bytes(formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption())
    public = key.public_key().public_bytes_raw().hex() + "\n"
    return _write_keys(folder, {"helper.key": private, "helper.pub": public.encode()})


def read_helper(path: Path) -> X25519PrivateKey:
    """Read the helper's private key; raises a `ValueError` if it cannot be used."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return read_key(path, lambda content: load_pem_private_key(content, None), X25519PrivateKey, "a helper's key")


def make_token_secret(folder: Path) -> Path:
    """Make `tokens.key`, the secret that the coordinator shares with the backend that vouches for devices."""
    return _write_keys(folder, {"tokens.key": secrets.token_hex(SECRET_BYTES).encode() + b"\n"})


def check_hosts(hosts: Sequence[str]) -> None:
    """Raise a `ValueError` unless all are host names or addresses."""
    for host in hosts:
        if not _is_address(host) and (len(host) > 253 or not _HOST.fullmatch(host)):
            raise ValueError(f"--host must be a host name or an address, without a port (got {host[:60]!r})")


def check_node(folder: Path, name: str) -> None:
    """Raise a `ValueError` unless a node can have this name and its key would replace no file."""
    if not _NODE.fullmatch(name):
        raise ValueError(f"a node name must be at most 100 letters, digits, - and _ (got {name[:60]!r})")
    _check_new(folder / f"{name}.key", folder / f"{name}.pub")


def check_server(certificate: Path, key: Path, authority: Path) -> None:
    """Raise a `ValueError` unless nodes that trust the authority can trust a server with this certificate and key."""
    from cryptography.exceptions import InvalidSignature

    issued, _ = _read_pair(certificate, key)
    try:
        issued.verify_directly_issued_by(_read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"{certificate} was not signed by {authority}, so no node would trust this server") from None


def _make_certificate(folder: Path, name: str, issuer: tuple[Any, Any] | None, hosts: Iterable[str]) -> Path:
    """Make a key and its certificate, signed by the issuer or, for an authority, by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as formats
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"fedrecon {name}")])
    is_authority = issuer is None
    signer = key if issuer is None else issuer[1]
    unused = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys(unused.split(), False),
    )
    builder = (
        x509.CertificateBuilder(subject if issuer is None else issuer[0].subject, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_authority:
        names = [x509.IPAddress(ipaddress.ip_address(h)) if _is_address(h) else x509.DNSName(h) for h in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        server_only = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(server_only, critical=False)
    certificate = builder.sign(signer, hashes.SHA256()).public_bytes(formats.Encoding.PEM)
    private = key.private_bytes(formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption())
    return _write_keys(folder, {f"{name}.key": private, f"{name}.crt": certificate})


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _read_pair(certificate: Path, key: Path) -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    public = _read_certificate(certificate)
    private = read_key(key, lambda content: load_pem_private_key(content, None))
    if private.public_key() != public.public_key():
        raise ValueError(f"{key} is not the key of {certificate}; use two files that were made together")
    return public, private


def _read_certificate(path: Path) -> Any:
    from cryptography.x509 import load_pem_x509_certificate

    return read_key(path, load_pem_x509_certificate, what="a certificate")


def _check_new(*paths: Path) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise KeyExists(f"{path} exists; keys are never replaced. Move it away, or use another folder.")


def _write_keys(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write new files, all or, if one cannot be written, none; only their owner may read `*.key`. Return the last."""
    paths, written = [folder / name for name in contents], list[Path]()
    _check_new(*paths)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for path, content in zip(paths, contents.values(), strict=True):
            mode = 0o600 if path.suffix == ".key" else 0o644
            with write_errors(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                written.append(path)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        for path in written:
            path.unlink()
        raise
    return paths[-1]
