from dataclasses import FrozenInstanceError, fields

import pytest

from penstock.errors import InvalidArgument
from penstock.settings import Settings, shown, variable


def test_from_env_gives_defaults_without_variables():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"HOME": "/", "MY_PENSTOCK_THREADS": "x"}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "3", 3),
        ("cache_dir", "/some where/else", "/some where/else"),
        ("device", "reference", "reference"),
        ("debug", "1", True),
        ("debug", "TRUE", True),
        ("debug", "off", False),
    ],
)
def test_from_env_reads_each_setting(name, text, value):
    settings = Settings.from_env({f"PENSTOCK_{name.upper()}": text})
    assert getattr(settings, name) == value
    others = [f.name for f in fields(Settings) if f.name != name]
    assert [getattr(settings, other) for other in others] == [getattr(Settings(), other) for other in others]


def test_from_env_reads_the_real_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_THREADS", "5")
    assert Settings.from_env().threads == 5


def test_from_env_takes_an_empty_variable_as_unset():
    empty = {variable(f): "" for f in fields(Settings)}
    assert Settings.from_env(empty) == Settings()


def test_from_env_refuses_unknown_names_with_the_known_ones():
    with pytest.raises(InvalidArgument) as refused:
        Settings.from_env({"PENSTOCK_THREAD": "3"})
    message = str(refused.value)
    assert message.startswith("PENSTOCK_THREAD is not a setting")
    assert all(variable(f) in message for f in fields(Settings))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("PENSTOCK_THREADS", "many", "an int of at least 1"),
        ("PENSTOCK_THREADS", "0", "an int of at least 1"),
        ("PENSTOCK_THREADS", "2.5", "an int of at least 1"),
        ("PENSTOCK_DEVICE", "gpu", "one of auto, cpu, cuda, reference"),
        ("PENSTOCK_DEBUG", "maybe", "one of 1, true, yes, on, 0, false, no, off"),
    ],
)
def test_from_env_refuses_bad_values_with_the_valid_ones(name, text, expected):
    with pytest.raises(InvalidArgument, match=f"^{name} is '{text}', expected {expected}$"):
        Settings.from_env({name: text})


def test_settings_are_frozen_and_described():
    with pytest.raises(FrozenInstanceError):
        Settings().threads = 2  # type: ignore[misc]
    assert all(f.metadata["help"] for f in fields(Settings))


def test_shown_tells_of_a_secret_only_that_it_is_set():
    settings = Settings(api_key="hush", threads=3)
    assert shown(settings)["api_key"] == "(set)"
    assert shown(settings)["threads"] == 3
    assert shown(Settings())["api_key"] is None
    assert "hush" not in f"{settings}"
