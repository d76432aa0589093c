"""Settings come from the environment; a mistake is one clear line."""

import pytest
from pydantic import ValidationError

from service.settings import Settings


def test_the_environment_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADNORM_STORAGE", str(tmp_path))
    monkeypatch.setenv("GRADNORM_TOKEN", "secret")
    settings = Settings()
    assert settings.database_url == f"sqlite:///{tmp_path}/gradnorm.db"
    assert "secret" not in repr(settings)


def test_a_given_database_is_taken(monkeypatch):
    monkeypatch.setenv("GRADNORM_DB", "postgresql://team@db/runs")
    assert Settings().database_url == "postgresql://team@db/runs"


def test_a_remote_storage_needs_a_database():
    with pytest.raises(ValueError, match="GRADNORM_DB"):
        _ = Settings(storage="s3://bucket/runs?region=eu-west-1").database_url


def test_a_number_out_of_range_is_refused():
    with pytest.raises(ValidationError):
        Settings(render_workers=0)
