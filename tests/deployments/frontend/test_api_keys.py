from __future__ import annotations

from pathlib import Path

import pytest

from deployments.errors import InvalidApiKey
from deployments.frontend import api_keys
from deployments.frontend.api_keys import ApiKeys, hash_key, key_line
from engine.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may come in\n\nalice:{hash_key('sk-a')}\n  bob:{hash_key('sk-b')}  \n")
    return path


@pytest.fixture
def keys(file: Path, monkeypatch: pytest.MonkeyPatch) -> ApiKeys:
    monkeypatch.setattr(api_keys, "POLL_INTERVAL_S", 0.0)
    return ApiKeys(file)


def test_key_tells_its_name(keys):
    assert keys.find("sk-a").name == "alice"
    assert keys.find("sk-b").name == "bob"


@pytest.mark.parametrize("key", [None, "", "sk-c", "sk-", "sk-a ", "é"])
def test_anything_else_is_refused(keys, key):
    with pytest.raises(InvalidApiKey):
        keys.find(key)


def test_hash_itself_is_no_key(keys):
    with pytest.raises(InvalidApiKey):
        keys.find(hash_key("sk-a"))


def test_file_may_change_at_any_time(keys, file):
    file.write_text(f"carol:{hash_key('sk-c')}\n")
    assert keys.find("sk-c").name == "carol"
    with pytest.raises(InvalidApiKey):
        keys.find("sk-a")


def test_file_that_becomes_unreadable_leaves_the_keys_as_they_were(keys, file, caplog):
    file.write_text("sk-plain\n")
    assert keys.find("sk-a").name == "alice"
    assert "line 1" in caplog.text
    assert "sk-plain" not in caplog.text
    file.unlink()
    assert keys.find("sk-a").name == "alice"
    file.write_text(f"carol:{hash_key('sk-c')}\n")
    assert keys.find("sk-c").name == "carol"


def test_file_that_becomes_empty_lets_nobody_in(keys, file):
    file.write_text("")
    with pytest.raises(InvalidApiKey):
        keys.find("sk-a")


@pytest.mark.parametrize("text", ["", "# none\n", "sk-plain", "alice:sk-a", f"a b:{'0' * 64}", f"a:{'0' * 63}", "\xff"])
def test_file_that_is_no_good_at_the_start_is_a_configuration_error(tmp_path, text):
    path = tmp_path / "keys"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"ingress\.api_keys_file") as caught:
        ApiKeys(path)
    assert "sk-" not in str(caught.value)


def test_keys_of_the_configuration_are_valid_beside_those_of_the_file_and_without_one(file):
    line = key_line("carol", "sk-c")
    assert ApiKeys(file, [line]).find("sk-c").name == "carol"
    assert ApiKeys(file, [line]).find("sk-a").name == "alice"
    with pytest.raises(InvalidApiKey):
        ApiKeys(None, [line]).find("sk-a")
    with pytest.raises(ConfigError, match=r"ingress\.api_keys must be lines of .* got something else in line 1"):
        ApiKeys(None, ["sk-c"])


def test_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        ApiKeys(tmp_path / "none")
