"""API keys, identified by hash only."""

from pathlib import Path

import pytest

from lorikeet.adapters.catalogue import CatalogueError
from lorikeet.adapters.keys import Key, Keys, read, sha256


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"- {{name: team-a, sha256: {sha256('secret a')}, isolate: true}}\n"
        f"- {{name: root, sha256: {sha256('secret b').upper()}, admin: true}}\n"
    )
    keys = read(path)
    assert keys.find("secret a") == Key("team-a", isolate=True, is_marked_isolate=True)
    assert keys.find("secret b") == Key("root", admin=True, isolate=True)
    for other in (None, "", "secret", sha256("secret a")):
        assert keys.find(other) is None
    assert keys.names == {"team-a", "root"} and keys.has_admin
    path.write_text("keys:\n" + "".join(f"  {line}\n" for line in path.read_text().splitlines()))
    assert read(path).names == keys.names


def test_the_administrator_s_own_key() -> None:
    assert not Keys().has_admin
    keys = Keys(admin_sha256=sha256("mine"))
    key = keys.find("mine")
    assert key is not None and key.admin and keys.find("yours") is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{}", "must be a list"),
        ("- a", "key 1 must be a mapping"),
        ("- {name: a, sha: b}", "key 1 must be a mapping"),
        ("- {sha256: b}", "has no `name`"),
        ("- {name: a, sha256: secret}", "the SHA-256 hash of the key"),
        ("- {name: a}", "must be 64 hexadecimal digits"),
        (f"- {{name: a, sha256: {'a' * 64}, admin: perhaps}}", "`admin` of key a"),
        (f"- {{name: a, sha256: {'a' * 64}}}\n- {{name: a, sha256: {'b' * 64}}}", "key a is given twice"),
        (f"- {{name: a, sha256: {'a' * 64}}}\n- {{name: b, sha256: {'a' * 64}}}", "the same `sha256`"),
    ],
)
def test_invalid_lists_of_keys(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(CatalogueError) as caught:
        read(path)
    assert part in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="cannot be read"):
        read(tmp_path / "none")
