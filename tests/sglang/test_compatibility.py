"""The plugin names what it needs of SGLang, and refuses another."""

import sys
from importlib import metadata
from typing import Any

import tests.sglang.engine  # isort: skip  # noqa: F401  the shims, before SGLang

import pytest
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import spec_registry, spec_utils
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from adaptivespec.errors import ConfigError
from adaptivespec.sglang import plugin
from adaptivespec.sglang.compat import SUPPORTED, check_compatibility
from adaptivespec.sglang.plugin import ALGORITHM, check_registration


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang as it is before its plugins are loaded."""
    monkeypatch.setattr("sglang.srt.plugins._plugins_loaded", False)
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})


def test_the_installed_sglang_is_the_one_that_works() -> None:
    assert metadata.version("sglang") == SUPPORTED
    check_compatibility()


def test_a_missing_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BaseSpecWorker, "note_request_finished")
    with pytest.raises(ConfigError, match=r"note_request_finished does not exist.*0\.5\.23"):
        check_compatibility()


def test_a_parameter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(batch: Any, accept_index: Any, allocator: Any) -> None: ...

    monkeypatch.setattr(spec_utils, "move_accept_tokens_to_target_kvcache", moved)
    with pytest.raises(ConfigError, match=r"move_accept.*has no num_correct_drafts, token_to"):
        check_compatibility()


@pytest.mark.usefixtures("unregistered")
def test_sglangs_own_loader_finds_the_plugin() -> None:
    check_registration()
    algorithm = SpeculativeAlgorithm.from_string(ALGORITHM)
    assert algorithm.is_speculative()
    assert not algorithm.has_draft_kv()


@pytest.mark.usefixtures("unregistered")
def test_a_plugin_that_sglang_failed_to_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs the exception and goes on."""

    def broken() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(plugin, "register", broken)
    with pytest.raises(ConfigError, match="has not registered ADAPTIVESPEC"):
        check_registration()


@pytest.mark.usefixtures("unregistered")
def test_a_list_of_plugins_without_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS: 'another' leaves out 'adaptivespec'"):
        check_registration()


def test_the_entry_point_is_the_one_in_the_metadata() -> None:
    points = metadata.entry_points(group=GENERAL_PLUGINS_GROUP)
    assert "adaptivespec.sglang.plugin:register" in [point.value for point in points]


@pytest.mark.usefixtures("unregistered")
def test_an_installed_plugin_that_is_not_selected_does_nothing() -> None:
    """It is a name in SGLang's list of algorithms: it hooks into nothing, and its worker is not
    even loaded. `test_losslessness` has plain decoding beside it."""
    hooks = {target: list(added) for target, added in HookRegistry._hooks.items()}
    before = set(sys.modules)
    plugin.register()
    assert {target: list(added) for target, added in HookRegistry._hooks.items()} == hooks
    assert list(spec_registry._REGISTRY) == [ALGORITHM]
    assert SpeculativeAlgorithm.from_string(None).is_none()
    assert not {m for m in set(sys.modules) - before if m.startswith("adaptivespec.")}
