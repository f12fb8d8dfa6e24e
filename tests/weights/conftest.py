import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled


class Hub:
    """Stands in for snapshot_download: notes how it was called, then returns or raises what it was told.

    cached: the outcome when only the cache is asked, if it is another one.
    """

    def __init__(self):
        self.calls, self.outcome, self.cached, self.bars_off = [], "/cache/snapshot", None, None

    def __call__(self, id, **options):
        self.calls.append((id, options))
        self.bars_off = are_progress_bars_disabled()
        outcome = self.cached if self.cached is not None and options["local_files_only"] else self.outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub
