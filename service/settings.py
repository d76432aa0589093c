"""Settings of the service: environment variables that begin with `GRADNORM_`.

GRADNORM_STORAGE=/data/runs GRADNORM_TOKEN=... uvicorn --factory service.app:create_app
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from study.storage import Storage


class Settings(BaseSettings):
    """What a deployment may set; the defaults suit a laptop."""

    model_config = SettingsConfigDict(env_prefix="GRADNORM_", extra="ignore")

    storage: str = "runs"  # folder or URI under which the runs lie
    db: str | None = None  # SQLAlchemy URL; SQLite in the storage folder if absent
    token: SecretStr | None = None  # asked of every request but /healthz, if set
    render_workers: int = Field(
        default=1, ge=1, le=64
    )  # threads that draw; drawing is bound by Python's lock
    render_queue: int = Field(default=64, ge=1)  # pictures that may wait; beyond it 503
    render_timeout: float = Field(
        default=30.0, gt=0
    )  # seconds until a picture that waits or draws is given up
    read_workers: int = Field(default=4, ge=1, le=256)  # threads that read the database and the parts
    read_queue: int = Field(default=512, ge=1)
    read_timeout: float = Field(default=10.0, gt=0)  # seconds until a database or storage counts as away
    picture_cache_mb: int = Field(default=32, ge=0)  # finished pictures
    trace_cache_mb: int = Field(default=64, ge=0)  # decoded columns
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    event_seconds: float = Field(default=1.0, gt=0)  # how often a live run is looked at for its events

    @property
    def database_url(self) -> str:
        """The catalogue's URL; ValueError where it can be neither read nor derived."""
        if self.db:
            return self.db
        storage = Storage(self.storage)
        if not storage.is_local:
            raise ValueError(
                f"storage '{self.storage}' is remote, no database can lie beside it; known: any "
                "SQLAlchemy URL (GRADNORM_DB)"
            )
        return f"sqlite:///{Path(storage.root) / 'gradnorm.db'}"
