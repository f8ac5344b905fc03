"""Which apps a SuperNode runs: what the guide says of ``--trusted-entities``, asked of Flower itself."""

import hashlib
import re
from base64 import urlsafe_b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.app_cmd.review import _sign_fab
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.fab import Fab
from flwr.superlink.servicer.control.control_handlers import _format_verification
from flwr.supernode.cli.flower_supernode import (
    _parse_args_run_supernode,
    _try_obtain_trusted_entities,
    _validate_public_keys_ed25519,
)
from flwr.supernode.start_client_internal import _verify_fab

EXAMPLE = "examples/flower-hospitals"
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # as Flower builds


def public(key):
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def app(request):
    """The example as `flwr run` ships it."""
    return build_fab_from_disk(request.config.rootpath / EXAMPLE)


def signed(app, key, identity="fpk_1"):
    """An app as the SuperLink passes it on after `flwr app review`."""
    signature, when = _sign_fab(app, key)
    told = {"public_key_id": identity, "signature": urlsafe_b64encode(signature).decode(), "signed_at": when}
    return Fab(hashlib.sha256(app).hexdigest(), app, _format_verification([told]))


def test_the_readmes_file_and_command_are_what_a_supernode_takes(request, tmp_path):
    text = (request.config.rootpath / EXAMPLE / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "trusted.yaml"
    path.write_text(block)
    assert "--trusted-entities trusted.yaml" in text
    options = _parse_args_run_supernode().parse_args(["--insecure", "--trusted-entities", str(path)])
    trusted = _try_obtain_trusted_entities(options.trusted_entities)
    assert trusted
    assert all(name.startswith("fpk_") for name in trusted)
    _validate_public_keys_ed25519(trusted)


def test_a_signature_holds_for_one_app_to_the_bit_under_one_key(app):
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    trusted = {"fpk_1": public(key)}
    fab = signed(app, key)
    assert _verify_fab(fab, trusted)
    assert not _verify_fab(signed(app, other), trusted)
    assert not _verify_fab(signed(app, key, "fpk_2"), trusted)
    changed = bytearray(app)
    changed[len(app) // 2] ^= 1
    assert not _verify_fab(Fab(fab.hash_str, bytes(changed), fab.verifications), trusted)


def test_a_list_without_a_name_is_no_list(tmp_path):
    """Flower asks `if trusted_entities`: an empty mapping lets every app run, as the guide warns."""
    path = tmp_path / "trusted.yaml"
    path.write_text("{}")
    assert not _try_obtain_trusted_entities(path)
