"""Keys and certificates: an authority of one's own, a server's certificate, and a key for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

YEARS = 2
AUTHORITY, SERVER = "ca", "server"


class KeyExists(ValueError):
    """A file that would be replaced; keys are never replaced."""


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
    _write_key(folder / f"{AUTHORITY}.key", private)
    return _write(folder / f"{AUTHORITY}.crt", _pem(certificate))


def make_server(folder: Path, names: Sequence[str]) -> Path:
    """Make a server's key and its certificate, signed by the authority in the folder.

    Args:
      folder: has `ca.key` and `ca.crt`; gets `server.key` and `server.crt`.
      names: every host name and address that nodes will know the server by. Those of this machine itself are added.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    files = [folder / f"{AUTHORITY}.crt", folder / f"{AUTHORITY}.key"]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing: make an authority first, with fedrecon keys {folder}")
    authority = x509.load_pem_x509_certificate(files[0].read_bytes())
    signer: Any = serialization.load_pem_private_key(files[1].read_bytes(), None)
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
    _write_key(folder / f"{SERVER}.key", private)
    return _write(folder / f"{SERVER}.crt", _pem(certificate))


def make_node(folder: Path, name: str) -> Path:
    """Make a node's key: `name.key`, which stays with the node, and `name.pub`, which the server gets.

    Args:
      folder: where both go.
      name: of the node, for people.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not name or not all(character.isalnum() or character in "-_" for character in name):
        raise ValueError(f"a node cannot be called {name!r}; use letters, digits, - and _")
    private = ec.generate_private_key(ec.SECP384R1())
    encoding, plain = serialization.Encoding, serialization.NoEncryption()
    written = private.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    public = private.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(folder / f"{name}.key", written, secret=True)
    return _write(folder / f"{name}.pub", public + b"\n")


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


def _write_key(path: Path, private: Any) -> Path:
    from cryptography.hazmat.primitives import serialization

    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return _write(path, private.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain), secret=True)


def _write(path: Path, content: bytes, secret: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError:
        raise KeyExists(f"{path} exists; keys are never replaced. Move it away, or use another folder.") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path
