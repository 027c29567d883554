"""Keys and certificates: your own authority, a server's certificate, and a key for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedrecon._src.storage.arrays import writing
from fedrecon._src.storage.folders import sync

YEARS = 2
AUTHORITY, SERVER = "ca", "server"
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*\.?")


class KeyExists(ValueError):
    """A key file exists already; keys are never replaced."""


def make_authority(folder: Path) -> Path:
    """Make an authority: `ca.key`, which stays with whoever runs the server, and `ca.crt`, which everybody gets.

    Args:
      folder: where both go.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedrecon authority")])
    builder = _begin(name, name, private.public_key())
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_uses(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA384())
    )
    return _write_pair(
        folder / f"{AUTHORITY}.key", _pem_of_key(private), folder / f"{AUTHORITY}.crt", _pem(certificate)
    )


def make_server(folder: Path, names: Sequence[str]) -> Path:
    """Make a server's key and its certificate, signed by the authority in the folder.

    Args:
      folder: has `ca.key` and `ca.crt`; gets `server.key` and `server.crt`.
      names: every host name and address by which nodes reach the server. This machine's own are added.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    check_hosts(names)
    authority, signer = _read_pair(folder / f"{AUTHORITY}.crt", folder / f"{AUTHORITY}.key")
    private = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedrecon server")])
    known = dict.fromkeys([*names, "localhost", "127.0.0.1", "::1"])
    builder = _begin(name, authority.subject, private.public_key())
    certificate = (
        builder.add_extension(x509.SubjectAlternativeName([_general_name(name) for name in known]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_uses(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    return _write_pair(folder / f"{SERVER}.key", _pem_of_key(private), folder / f"{SERVER}.crt", _pem(certificate))


def check_server(certificate: Path, key: Path, authority: Path) -> None:
    """Check that nodes which trust the authority can trust a server with this certificate and key.

    Args:
      certificate: the server's.
      key: its private key.
      authority: the authority's certificate.

    Raises:
      ValueError: a file is missing or damaged, or the files do not belong together; the message names them.
    """
    from cryptography.exceptions import InvalidSignature

    issued, _ = _read_pair(certificate, key)
    try:
        issued.verify_directly_issued_by(_read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(
            f"{certificate} was not signed by {authority}, so no node would trust this server; use files that were "
            "made together, or make new ones with fedrecon keys in another folder"
        ) from None


def check_hosts(names: Sequence[str]) -> None:
    """Check the names by which nodes reach a server.

    Args:
      names: host names or addresses.

    Raises:
      ValueError: one is neither; the message names it.
    """
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if len(name) > 253 or not _HOST.fullmatch(name):
                raise ValueError(
                    f"--host is {name[:60]!r}; give a host name or an address alone, such as fed.example.org or "
                    "192.0.2.7, without a port"
                ) from None


def check_node(folder: Path, name: str) -> None:
    """Check that a node can have this name, and that its key would replace no file.

    Args:
      folder: where its key would go.
      name: the node's name.

    Raises:
      ValueError: it cannot have this name, or the key exists; the message says why.
    """
    if not 0 < len(name) <= 100 or not all(character.isalnum() or character in "-_" for character in name):
        raise ValueError(f"a node cannot be called {name[:60]!r}; use at most 100 letters, digits, - and _")
    _check_new(folder / f"{name}.key", folder / f"{name}.pub")


def make_node(folder: Path, name: str) -> Path:
    """Make a node's key: `name.key`, which stays with the node, and `name.pub`, which the server gets.

    Args:
      folder: where both go.
      name: the node's name, for people.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    check_node(folder, name)
    private = ec.generate_private_key(ec.SECP384R1())
    encoding, plain = serialization.Encoding, serialization.NoEncryption()
    written = private.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    public = private.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return _write_pair(folder / f"{name}.key", written, folder / f"{name}.pub", public + b"\n")


# ---- files ----


def _read_pair(certificate: Path, key: Path) -> tuple[Any, Any]:
    """Read a certificate and the private key that belongs to it."""
    from cryptography.hazmat.primitives import serialization

    public = _read_certificate(certificate)
    private: Any = _read(key, lambda content: serialization.load_pem_private_key(content, None))
    if private.public_key() != public.public_key():
        raise ValueError(f"{key} is not the key of {certificate}; use two files that were made together")
    return public, private


def _read_certificate(path: Path) -> Any:
    from cryptography import x509

    return _read(path, x509.load_pem_x509_certificate)


def _read(path: Path, load: Callable[[bytes], Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    if not path.is_file():
        raise ValueError(f"{path} is missing; make it with fedrecon keys, or put it back")
    try:
        return load(path.read_bytes())
    except (ValueError, TypeError, UnsupportedAlgorithm):  # OpenSSL's own reasons do not help
        raise ValueError(f"{path} is damaged, or is not a PEM file with a certificate or an unencrypted key") from None


def _begin(subject: Any, issuer: Any, public: Any) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _uses(**allowed: bool) -> Any:
    from cryptography import x509

    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    return x509.KeyUsage(**{**dict.fromkeys(names.split(), False), **allowed})


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(private: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _check_new(*paths: Path) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise KeyExists(f"{path} exists; keys are never replaced. Move it away, or use another folder.")


def _write_pair(key: Path, private: bytes, public: Path, content: bytes) -> Path:
    """Write a private key and its public part: both or, if the second cannot be written, neither."""
    _check_new(key, public)
    key.parent.mkdir(parents=True, exist_ok=True)
    _write(key, private, 0o600)
    try:
        return _write(public, content, 0o644)
    except BaseException:
        key.unlink()
        raise


def _write(path: Path, content: bytes, mode: int) -> Path:
    """Write a new file. It gets its name once all of it is on disk, and never replaces another file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
            sync(temporary)
            os.link(temporary, path)
        except FileExistsError:
            raise KeyExists(f"{path} exists; keys are never replaced. Move it away, or use another folder.") from None
        finally:
            temporary.unlink(missing_ok=True)
    return path
