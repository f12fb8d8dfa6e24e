import warnings
from dataclasses import FrozenInstanceError, fields

import pytest

from penstock import settings
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
        ("engine_process", "0", False),
    ],
)
def test_from_env_reads_each_setting(name, text, value):
    found = Settings.from_env({f"PENSTOCK_{name.upper()}": text})
    assert getattr(found, name) == value
    others = [f.name for f in fields(Settings) if f.name != name]
    assert [getattr(found, other) for other in others] == [getattr(Settings(), other) for other in others]


def test_from_env_reads_the_real_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_THREADS", "5")
    assert Settings.from_env().threads == 5


def test_from_env_takes_an_empty_variable_as_unset():
    empty = {variable(f): "" for f in fields(Settings)}
    assert Settings.from_env(empty) == Settings()


def test_from_env_warns_of_unknown_names_once_and_ignores_them(monkeypatch):
    monkeypatch.setattr(settings, "_told", set())
    with pytest.warns(UserWarning, match="is not a setting") as told:
        assert Settings.from_env({"PENSTOCK_THREAD": "3", "PENSTOCK_ZZZZ": "", "PENSTOCK_THREADS": "2"}).threads == 2
    close, far = (str(warning.message) for warning in told)
    assert close == "PENSTOCK_THREAD is not a setting and is ignored, did you mean PENSTOCK_THREADS?"
    assert far.startswith("PENSTOCK_ZZZZ is not a setting and is ignored, expected one of ")
    assert all(variable(f) in far for f in fields(Settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Settings.from_env({"PENSTOCK_THREAD": "3"}) == Settings()


def test_is_blank_tells_a_variable_with_nothing_in_it_from_none():
    blank = [{"PENSTOCK_API_KEY": text} for text in ("", "  ", "\t\n")]
    assert all(settings.is_blank("api_key", environ) for environ in blank)
    assert not any(settings.is_blank("api_key", environ) for environ in ({}, {"PENSTOCK_API_KEY": " x"}))


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
    made = Settings(api_key="hush", threads=3)
    assert shown(made)["api_key"] == "(set)"
    assert shown(made)["threads"] == 3
    assert shown(Settings())["api_key"] is None
    assert "hush" not in f"{made}"
