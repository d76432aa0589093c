"""Runs and trials."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "gradnorm_runs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("study", sa.String(200), nullable=False, index=True),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("created_at", sa.Double, nullable=False, index=True),
        sa.Column("ended_at", sa.Double),
        sa.Column("heartbeat", sa.Double),
        sa.Column("storage", sa.Text, nullable=False),
        sa.Column("host", sa.String(255)),
        sa.Column("git_commit", sa.String(64)),
        sa.Column("versions", sa.JSON),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("data", sa.JSON),
        sa.Column("notes", sa.JSON),
        sa.Column("results", sa.JSON),
        sa.Column("error", sa.Text),
    )
    op.create_table(
        "gradnorm_trials",
        sa.Column("id", sa.String(72), primary_key=True),
        sa.Column("run_id", sa.String(64), sa.ForeignKey("gradnorm_runs.id"), nullable=False, index=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("arm", sa.Text, nullable=False),
        sa.Column("arm_number", sa.Integer, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("reason", sa.String(32)),
        sa.Column("diverged_step", sa.Integer),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("num_steps", sa.Integer, nullable=False),
        sa.Column("loss", sa.Double),
        sa.Column("grad_norm", sa.Double),
        sa.Column("steps_per_second", sa.Double),
        sa.Column("started_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("heartbeat", sa.Double),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("num_parameters", sa.BigInteger),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("overrides", sa.JSON, nullable=False),
        sa.Column("notes", sa.JSON),
        sa.Column("summary", sa.JSON),
        sa.Column("error", sa.Text),
    )


def downgrade() -> None:
    op.drop_table("gradnorm_trials")
    op.drop_table("gradnorm_runs")
